package prefetch

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

// database is buckets in memory, on the other side of a network.
type database struct {
	t       testing.TB
	limiter *ratelimit.Limiter

	mu       sync.Mutex
	asked    []float64 // the cost of each Take
	returned float64   // by CreditTaken
	changed  Event     // the sum of all events

	clock   func(instant time.Time) time.Time
	travels func()                          // while a statement or its answer is on its way
	before  func(ctx context.Context) error // before it decides on a Take; nil: nothing is
	after   func() error                    // when the answer has arrived
}

func newDatabase(t testing.TB) *database {
	t.Helper()
	d := &database{t: t, clock: func(instant time.Time) time.Time { return instant }, travels: func() {}, after: func() error { return nil }}
	var err error
	d.limiter, err = ratelimit.New(ratelimittest.NewDB(), ratelimit.Config{AsOf: func() time.Time { return d.clock(time.Now()) }})
	require.NoError(t, err)
	return d
}

func (d *database) Take(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Decision, error) {
	d.travels()
	var before func(ctx context.Context) error
	d.change(func() {
		d.asked = append(d.asked, requests[0].Tokens())
		before = d.before
	})
	if before != nil {
		if err := before(ctx); err != nil {
			return ratelimit.Decision{}, err
		}
	}
	decision, err := d.limiter.Take(ctx, requests...)
	if err != nil {
		return decision, err
	}
	d.travels()
	return decision, d.after()
}

func (d *database) CreditTaken(ctx context.Context, at time.Time, requests ...ratelimit.Request) error {
	d.travels()
	if err := d.limiter.CreditTaken(ctx, at, requests...); err != nil {
		return err
	}
	d.change(func() { d.returned += requests[0].Tokens() })
	d.travels()
	return nil
}

func (d *database) Resolve(r ratelimit.Request) ratelimit.Limit { return d.limiter.Resolve(r) }

// report adds up the events.
func (d *database) report(e Event) {
	d.change(func() {
		d.changed.Taken, d.changed.Returned, d.changed.Lost = d.changed.Taken+e.Taken, d.changed.Returned+e.Returned, d.changed.Lost+e.Lost
	})
}

// change changes the database, safely beside concurrent calls.
func (d *database) change(f func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	f()
}

// holds returns the tokens of a row.
func (d *database) holds(request ratelimit.Request) float64 {
	d.t.Helper()
	v, err := d.limiter.Value(context.Background(), request)
	require.NoError(d.t, err)
	return v.Tokens
}

// process is a Limiter on a database.
func (d *database) process(limits Limits) *Limiter {
	return newOn(d, Config{Limits: limits, Report: d.report, Observer: d})
}

type fromMemoryKey struct{}

// Observe notes in the context of a call that it was answered from memory.
func (d *database) Observe(ctx context.Context, e event.Event) {
	if note, ok := ctx.Value(fromMemoryKey{}).(*bool); ok {
		*note = e.(ratelimit.Decided).Cached
	}
}

// take makes a call of a process, and reports whether it was answered from memory.
func take(ctx context.Context, p *Limiter, request ratelimit.Request) (d ratelimit.Decision, fromMemory bool, err error) {
	d, err = p.Take(context.WithValue(ctx, fromMemoryKey{}, &fromMemory), request)
	return d, fromMemory, err
}

// kept returns how many tokens a process keeps.
func (l *Limiter) kept() (tokens float64) {
	for i := range l.stripes {
		s := &l.stripes[i]
		s.mu.Lock()
		for _, h := range s.of {
			tokens += h.left
		}
		s.mu.Unlock()
	}
	return tokens
}
