package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/store"
)

// Simulation decides as a Limiter does, at instants that you pass, on buckets in memory that begin full. Use it to replay
// recorded requests against other policies. Make it with [NewSimulation]. Use it on one goroutine at a time. It has only Take:
// no reservations, credits, charges or resets. It never forgets a bucket: each bucket with taken tokens needs 70 to 100 bytes
// if its key has ten.
type Simulation struct {
	limiter Limiter
	memory  *bucket.Memory
	at      time.Time

	call call // reused by the next Take
}

// NewSimulation returns a Simulation. It uses HashKey, Policies and Refused of config. Errors wrap ErrInvalidConfig.
func NewSimulation(config Config) (*Simulation, error) {
	config = config.withDefaults()
	if err := config.validate(); err != nil {
		return nil, err
	}
	s := &Simulation{memory: bucket.NewMemory()}
	config.AsOf = func() time.Time { return s.at }
	s.limiter = Limiter{config: config, reports: reports{refused: config.Refused}}
	return s, nil
}

// Buckets returns the number of buckets with taken tokens. With Shards, each row counts.
func (s *Simulation) Buckets() int { return s.memory.Count() }

// Take decides as [Limiter.Take] does, at the instant at in place of the database's clock. The instant can be before the
// previous one. Take returns only the errors that Limiter.Take returns before any SQL. For a limit with Shards it begins
// with the first row. It passes ctx to Policies and Refused, and goes on if ctx has ended.
func (s *Simulation) Take(ctx context.Context, at time.Time, requests ...Request) (Decision, error) {
	if s == nil || s.memory == nil {
		return Decision{}, fmt.Errorf("%w: %s on a Simulation that NewSimulation did not return", ErrInvalidConfig, verbTake)
	}
	s.at = at
	c := &s.call
	asks, of, asked := c.plan.asks, c.plan.of, c.plan.asked
	*c = call{}
	c.Verb, c.plan.asks, c.plan.of, c.plan.asked = verbTake, asks, of, asked
	if err := c.plan.arrange(ctx, &s.limiter, verbTake, requests); err != nil {
		if errors.Is(err, errHolds) {
			err = fmt.Errorf("%w; a Simulation is not told when slots are given back, so it cannot say how many are held", err)
		}
		return Decision{}, err
	}
	c.Asks = c.plan.asks
	s.decide(c)
	if c.plan.ruled {
		_ = c.leaveShadowsOut(func(again *call) error { s.decide(again); return nil })
	}
	d := c.plan.decide(c.Answers)
	if s.limiter.reports.refused != nil {
		s.limiter.reports.refusals(ctx, c, &d)
	}
	return d, nil
}

// decide sets the answers of the call, unless they are known.
func (s *Simulation) decide(c *call) {
	if len(c.Asks) > 0 {
		ask := func(part *store.Call) error {
			part.Answers = s.memory.Take(part.Asks, s.limiter.config.estimate(), part.Look)
			return nil
		}
		if c.plan.sharded {
			_ = c.askRows(ask)
			return
		}
		_ = ask(&c.Call)
	}
}
