// Package load calls something from many goroutines at once, and measures it.
package load

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/pgratelimit/pgratelimit/bench/internal/stats"
)

// Call is one measured call, made by caller. An error ends the round.
type Call func(ctx context.Context, caller *Caller) error

// Caller is one of the goroutines that call, one call after the other.
type Caller struct {
	// Number is 0 for the first caller.
	Number int
	// Random is for this caller alone, and begins anew with the Group.
	Random *rand.Rand

	calls   int
	samples []time.Duration
}

// Group is the callers of one contender. It keeps its memory from round to round, so that measuring
// allocates next to nothing.
type Group struct {
	// Meter returns the processor time so far, in seconds; nil: it is not known.
	Meter func() float64

	callers []*Caller
	burst   int
	merged  []time.Duration
}

// NewGroup returns a group of callers that read the clock once every burst calls. More than one a reading is
// for calls that take no longer than reading the clock does; the percentiles are then percentiles of means.
func NewGroup(callers, burst int) *Group {
	g := &Group{callers: make([]*Caller, callers), burst: max(burst, 1)}
	for i := range g.callers {
		g.callers[i] = &Caller{Number: i, Random: rand.New(rand.NewPCG(uint64(i), 1))}
	}
	return g
}

// Result is what a round measured.
type Result struct {
	Calls       int
	Elapsed     time.Duration // until the last call that had begun was answered
	P50, P99    time.Duration // of one call
	Allocations uint64        // of this process meanwhile
	Processor   float64       // seconds of the processor meanwhile, by the group's meter; NaN without one
}

// Amount says when a round is over: after a time, or after a number of calls.
type Amount struct {
	For   time.Duration
	Calls int // spread evenly over the callers, each of which makes the same number, rounded up
}

// Run makes an amount of calls and returns when all begun calls are answered.
func (g *Group) Run(ctx context.Context, amount Amount, call Call) (Result, error) {
	each := math.MaxInt
	if amount.Calls > 0 {
		each = (amount.Calls + len(g.callers) - 1) / len(g.callers)
	}
	for _, c := range g.callers {
		c.calls, c.samples = 0, c.samples[:0]
	}
	runtime.GC() // what the one before has left is not this one's to clean up
	processor := g.processor()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	began := time.Now()
	group, ctx := errgroup.WithContext(ctx)
	for _, c := range g.callers {
		group.Go(func() error {
			return c.loop(ctx, g.burst, call, func(now time.Time) bool {
				return c.calls >= each || amount.Calls == 0 && now.Sub(began) >= amount.For
			})
		})
	}
	err := group.Wait()
	elapsed := time.Since(began)
	runtime.ReadMemStats(&after)
	processor = g.processor() - processor
	if err != nil {
		return Result{}, err
	}
	result := Result{Elapsed: elapsed, Allocations: after.Mallocs - before.Mallocs, Processor: processor}
	g.merged = g.merged[:0]
	for _, c := range g.callers {
		result.Calls += c.calls
		g.merged = append(g.merged, c.samples...)
	}
	slices.Sort(g.merged)
	result.P50, result.P99 = stats.Percentile(g.merged, 50), stats.Percentile(g.merged, 99)
	return result, nil
}

// processor returns what the meter says.
func (g *Group) processor() float64 {
	if g.Meter == nil {
		return math.NaN()
	}
	return g.Meter()
}

// loop calls until done says so at the end of a burst. It reads the clock once a burst: the end of one is
// the beginning of the next.
func (c *Caller) loop(ctx context.Context, burst int, call Call, done func(now time.Time) bool) error {
	for began := time.Now(); ; {
		for range burst {
			if err := call(ctx, c); err != nil {
				return fmt.Errorf("caller %d, call %d: %w", c.Number, c.calls, err)
			}
			c.calls++
		}
		now := time.Now()
		c.samples = append(c.samples, now.Sub(began)/time.Duration(burst))
		if done(now) {
			return nil
		}
		began = now
	}
}
