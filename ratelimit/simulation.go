package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// Simulation decides as a Limiter does, on buckets in memory that are full at first, and at instants that it is told: to
// replay what came against other policies. Make it with [NewSimulation]. It is for one goroutine at a time. It only takes:
// it has no reservations, credits, charges or resets. Nothing is stored, and nothing is forgotten: each bucket that
// something was taken from keeps 70 to 100 bytes where its key has ten.
type Simulation struct {
	limiter Limiter
	memory  *bucket.Memory
	at      time.Time

	call call // the room for the next one
}

// NewSimulation returns a Simulation. Of config it uses HashKey, Policies and Refused. An error wraps ErrInvalidConfig.
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

// Buckets returns how many buckets it holds: those that something was taken from. One with Shards counts once.
func (s *Simulation) Buckets() int { return s.memory.Count() }

// Take decides as [Limiter.Take] does, at an instant that is taken for the time of the database, and may be before that of
// the last call. Its errors are those that are found before any SQL. Of a limit with Shards it takes from all rows together,
// as [Value.Take] does. Policies and Refused are given ctx; its end ends nothing.
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

// decide decides on the call, unless its answers are known.
func (s *Simulation) decide(c *call) {
	if len(c.Asks) > 0 {
		c.Answers = s.memory.Take(c.Asks, s.limiter.config.estimate())
	}
}
