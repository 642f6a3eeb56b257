package ratelimit

import (
	"context"
	"fmt"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// Simulation decides as a Limiter does, on buckets in memory and at instants that it is told. It is for the programs of this
// module, which alone can make a bucket.Memory; [Value.Take] is for everybody. It is for one goroutine.
type Simulation struct {
	limiter Limiter
	memory  *bucket.Memory
	at      time.Time
	call    call    // the room for the next one
	states  []State // so, too
}

// NewSimulation returns a Simulation on the buckets of memory. Of config it uses HashKey, Policies and Refused. An error wraps
// ErrInvalidConfig.
func NewSimulation(memory *bucket.Memory, config Config) (*Simulation, error) {
	if memory == nil {
		return nil, fmt.Errorf("%w: the memory is nil; pass what bucket.NewMemory returned", ErrInvalidConfig)
	}
	config = config.withDefaults()
	if err := config.validate(); err != nil {
		return nil, err
	}
	s := &Simulation{memory: memory}
	config.AsOf = func() time.Time { return s.at }
	s.limiter = Limiter{config: config, reports: reports{refused: config.Refused}}
	return s, nil
}

// Take decides as [Limiter.Take] does, at an instant that is taken for the time of the database. Its errors are those that
// are found before any SQL. The States of the decision are good until the next call.
func (s *Simulation) Take(ctx context.Context, at time.Time, requests ...Request) (Decision, error) {
	s.at = at
	c := &s.call
	asks, of, asked := c.plan.asks, c.plan.of, c.plan.asked
	*c = call{}
	c.Verb, c.plan.asks, c.plan.of, c.plan.asked = verbTake, asks, of, asked
	if err := c.plan.arrange(ctx, &s.limiter, verbTake, requests); err != nil {
		return Decision{}, err
	}
	c.Asks = c.plan.asks
	s.decide(c)
	for c.plan.ruled {
		refused := c.plan.refusedInShadow(c.Answers)
		if refused == nil {
			break
		}
		again := c.withoutShadows(refused)
		s.decide(again)
		c.again(again)
	}
	d := s.decision(&c.plan, c.Answers)
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

// decision is plan.decide in the room that there is.
func (s *Simulation) decision(p *plan, answers []bucket.Answer) Decision {
	now := p.now
	if len(answers) > 0 {
		now = answers[0].Now
	}
	d := Decision{Allowed: true, At: time.UnixMicro(now)}
	s.states = s.states[:0]
	for i, of := range p.asked {
		var state State
		if of.bucket >= 0 {
			state = p.stateOf(of.bucket, &answers[of.bucket])
		} else {
			state = p.known[^of.bucket]
		}
		state.Cost = of.cost
		d.add(&state, i == 0)
		s.states = append(s.states, state)
	}
	d.States = s.states
	return d
}
