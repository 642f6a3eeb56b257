// Package contender has the ways to decide on a limit that are measured: the limiter's own, and what it is
// measured against.
package contender

import (
	"context"
	"errors"
	"fmt"
	"math"

	"github.com/pgratelimit/pgratelimit/bench/internal/load"
	"github.com/pgratelimit/pgratelimit/bench/internal/server"
)

// ErrUnavailable is returned by Open when this machine, or this version of the limiter, does not have
// what the contender needs.
var ErrUnavailable = errors.New("not available")

// Way is how a contender decides.
type Way interface {
	// Open prepares the contender. Its Runner is closed in the end.
	Open(ctx context.Context, b Bench) (Runner, error)
}

// Bench is what a contender is opened on.
type Bench struct {
	Database *server.Database
	Redis    map[server.Durability]*server.Redis // empty when there is none
	Meter    *server.Meter
	Name     string // of the contender's limits, which no other of the scenario has
	Callers  int
	Burst    int // calls for each reading of the clock; 0 is 1
}

// Runner is an open contender.
type Runner interface {
	// Run makes a round of calls.
	Run(ctx context.Context, amount load.Amount) (Round, error)
	// Check returns an error when the calls so far did not do what they answered.
	Check(ctx context.Context) error
	// Close gives up what Open took.
	Close() error
}

// Round is what a round of calls measured. What cannot be measured of a contender is NaN.
type Round struct {
	Throughput  float64 // calls a second
	P50, P99    float64 // seconds
	Trips       float64 // round trips for each call
	Attempts    float64 // transactions begun for each call
	WAL         float64 // bytes of write-ahead log for each call
	Allocations float64 // of this process, for each call
	Processor   float64 // seconds of this process and the servers, for each call
	Calls       int
}

// runner makes calls in this process.
type runner struct {
	group    *load.Group
	call     load.Call
	wire     *load.Wire   // nil when it needs no connection
	attempts func() int64 // nil when a call is one attempt by its nature
	database *server.Database
	before   func(ctx context.Context) (stop func() error, err error) // what goes on beside the calls of a round; nil: nothing
	check    func(ctx context.Context, calls int) error
	close    func() error
	calls    int
}

// newRunner returns a runner on b without anything to check or to close.
func newRunner(b Bench, call load.Call) *runner {
	group := load.NewGroup(b.Callers, b.Burst)
	group.Meter = b.Meter.Seconds
	return &runner{
		group:    group,
		call:     call,
		database: b.Database,
		check:    func(context.Context, int) error { return nil },
		close:    func() error { return nil },
	}
}

func (r *runner) Run(ctx context.Context, amount load.Amount) (_ Round, err error) {
	if r.before != nil {
		stop, err := r.before(ctx)
		if err != nil {
			return Round{}, err
		}
		defer func() { err = errors.Join(err, stop()) }()
	}
	before, err := r.counts(ctx)
	if err != nil {
		return Round{}, err
	}
	result, err := r.group.Run(ctx, amount, r.call)
	if err != nil {
		return Round{}, err
	}
	after, err := r.counts(ctx)
	if err != nil {
		return Round{}, err
	}
	r.calls += result.Calls
	perCall := func(n int64) float64 { return float64(n) / float64(result.Calls) }
	round := Round{
		Throughput:  float64(result.Calls) / result.Elapsed.Seconds(),
		P50:         result.P50.Seconds(),
		P99:         result.P99.Seconds(),
		Trips:       perCall(after.trips - before.trips),
		Attempts:    perCall(after.attempts - before.attempts),
		WAL:         perCall(after.wal - before.wal),
		Allocations: perCall(int64(result.Allocations)),
		Processor:   result.Processor / float64(result.Calls),
		Calls:       result.Calls,
	}
	if r.attempts == nil {
		round.Attempts = math.NaN()
	}
	return round, nil
}

func (r *runner) Check(ctx context.Context) error { return r.check(ctx, r.calls) }

func (r *runner) Close() error { return r.close() }

type counts struct{ trips, attempts, wal int64 }

func (r *runner) counts(ctx context.Context) (c counts, err error) {
	if r.wire != nil {
		c.trips = r.wire.Trips()
	}
	if r.attempts != nil {
		c.attempts = r.attempts()
	}
	c.wal, err = r.database.WAL(ctx)
	return c, err
}

// unavailable returns ErrUnavailable with the reason.
func unavailable(reason string) error { return fmt.Errorf("%w: %s", ErrUnavailable, reason) }

// connections returns the size of a pool for callers.
func connections(callers, most int) int { return min(callers, most) }

const (
	poolConnections  = 16 // at most, for each contender on Postgres outside of transactions
	redisConnections = 64
)
