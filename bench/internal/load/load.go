// Package load calls a function from many goroutines at once, and measures it.
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

// Call makes one measured call. An error ends the round.
type Call func(ctx context.Context, caller *Caller) error

// Caller is a goroutine that makes one call after the other.
type Caller struct {
	// Number is 0 for the first caller.
	Number int
	// Random belongs to this caller. Each Group seeds it again.
	Random *rand.Rand

	zipf    *rand.Zipf
	samples []time.Duration
}

// Zipf returns a number below n, always the same n. Of ten million, the first is drawn by about one call in nine.
func (c *Caller) Zipf(n uint64) uint64 {
	if c.zipf == nil {
		c.zipf = rand.NewZipf(c.Random, 1.1, 1, n-1)
	}
	return c.zipf.Uint64()
}

// Group holds the callers of one contender. It keeps its memory from round to round, so that measuring
// allocates almost nothing.
type Group struct {
	// Meter returns the processor time so far, in seconds. It may be nil.
	Meter func() float64

	callers []*Caller
	merged  []time.Duration
}

// NewGroup returns a group of callers.
func NewGroup(callers int) *Group {
	g := &Group{callers: make([]*Caller, callers)}
	for i := range g.callers {
		g.callers[i] = &Caller{Number: i, Random: rand.New(rand.NewPCG(uint64(i), 1))}
	}
	return g
}

// Result holds the figures of a round.
type Result struct {
	Calls       int
	Elapsed     time.Duration // until the last answer
	P50, P99    time.Duration // of one call
	Allocations uint64        // of this process
	Processor   float64       // processor seconds by the group's meter; NaN without one
}

// Run has each caller make calls for a time, at least one, and waits for all answers.
func (g *Group) Run(ctx context.Context, d time.Duration, call Call) (Result, error) {
	for _, c := range g.callers {
		c.samples = c.samples[:0]
	}
	runtime.GC() // collects the garbage of the contender before
	processor := g.processor()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	began := time.Now()
	group, ctx := errgroup.WithContext(ctx)
	for _, c := range g.callers {
		group.Go(func() error { return c.loop(ctx, began.Add(d), call) })
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
		result.Calls += len(c.samples)
		g.merged = append(g.merged, c.samples...)
	}
	slices.Sort(g.merged)
	result.P50, result.P99 = stats.Percentile(g.merged, 50), stats.Percentile(g.merged, 99)
	return result, nil
}

func (g *Group) processor() float64 {
	if g.Meter == nil {
		return math.NaN()
	}
	return g.Meter()
}

// loop calls until a time. The end of a call is the start of the next.
func (c *Caller) loop(ctx context.Context, until time.Time, call Call) error {
	for began := time.Now(); ; {
		if err := call(ctx, c); err != nil {
			return fmt.Errorf("caller %d, call %d: %w", c.Number, len(c.samples), err)
		}
		now := time.Now()
		c.samples = append(c.samples, now.Sub(began))
		if !now.Before(until) {
			return nil
		}
		began = now
	}
}
