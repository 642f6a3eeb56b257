// Package contender has the measured contenders: calls of the Limiter, and other limiters.
package contender

import (
	"context"
	"errors"
	"math"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/bench/internal/load"
	"github.com/pgratelimit/pgratelimit/bench/internal/server"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// ErrUnavailable is returned by Open if this machine lacks a program that the contender needs.
var ErrUnavailable = errors.New("not available")

// Way opens a contender.
type Way interface {
	// Open prepares the contender. The caller closes its Runner.
	Open(ctx context.Context, b Bench) (*Runner, error)
}

// Bench holds the servers and settings of a contender.
type Bench struct {
	Database *server.Database
	Redis    map[server.Durability]*server.Redis // empty without a redis-server
	Meter    *server.Meter
	Name     string // of the contender's limits, unique in the scenario
	Callers  int
	Disk     time.Duration // extra time of each commit's flush
}

// Round holds the figures of a round of calls. A figure that cannot be measured is NaN.
type Round struct {
	Throughput  float64 // calls a second
	P50, P99    float64 // seconds
	Trips       float64 // round trips for each call
	Attempts    float64 // transactions begun for each call
	WAL         float64 // bytes of write-ahead log for each call
	Allocations float64 // of this process, for each call
	Processor   float64 // seconds of this process and the servers, for each call
}

const (
	poolConnections  = 16 // the largest pool of a contender outside transactions
	redisConnections = 64
)

// Runner is an open contender.
type Runner struct {
	bench    Bench
	group    *load.Group
	call     load.Call
	wire     testkit.RoundTrips
	attempts func() int64 // nil: one attempt a call
	// starts work that runs beside the calls of a round; may be nil
	before  func(ctx context.Context) (stop func() error, err error)
	check   func(ctx context.Context, calls int) error // may be nil
	closers []func() error                             // called in reverse order
	calls   int
}

// open returns a runner on b. prepare completes it.
func open(b Bench, prepare func(r *Runner) error) (*Runner, error) {
	r := &Runner{bench: b, group: load.NewGroup(b.Callers)}
	r.group.Meter = b.Meter.Seconds
	if err := prepare(r); err != nil {
		return nil, errors.Join(err, r.Close())
	}
	return r, nil
}

// sessions returns the size of a pool: a session for each caller, or else as many as an application has.
func (b Bench) sessions(ofCallers bool) int {
	if ofCallers {
		return b.Callers
	}
	return min(b.Callers, poolConnections)
}

// pool returns a pool whose round trips are counted. The runner closes it.
func (r *Runner) pool(ctx context.Context, connections int, configure ...func(*pgxpool.Config)) (*pgxpool.Pool, error) {
	if r.bench.Disk > 0 {
		configure = append(configure, func(config *pgxpool.Config) {
			config.ConnConfig.RuntimeParams["commit_delay"] = strconv.FormatInt(r.bench.Disk.Microseconds(), 10)
			config.ConnConfig.RuntimeParams["commit_siblings"] = "0"
		})
	}
	pool, err := r.bench.Database.Pool(ctx, connections, &r.wire, configure...)
	if err == nil {
		r.closers = append(r.closers, func() error { pool.Close(); return nil })
	}
	return pool, err
}

// standalone returns a Limiter for calls outside transactions. The runner closes it.
func (r *Runner) standalone(ctx context.Context) (*ratelimit.Limiter, error) {
	pool, err := r.pool(ctx, r.bench.sessions(false))
	if err != nil {
		return nil, err
	}
	return r.limiter(pool, ratelimit.Config{})
}

// limiter returns a Limiter on pool. The runner closes it.
func (r *Runner) limiter(pool *pgxpool.Pool, config ratelimit.Config) (*ratelimit.Limiter, error) {
	limiter, err := ratelimit.New(pool, config)
	if err == nil {
		r.closers = append(r.closers, func() error {
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			return limiter.Close(ctx)
		})
	}
	return limiter, err
}

// Run makes calls for a time.
func (r *Runner) Run(ctx context.Context, d time.Duration) (_ Round, err error) {
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
	result, err := r.group.Run(ctx, d, r.call)
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
	}
	if r.attempts == nil {
		round.Attempts = math.NaN()
	}
	return round, nil
}

type counts struct{ trips, attempts, wal int64 }

func (r *Runner) counts(ctx context.Context) (c counts, err error) {
	c.trips = r.wire.Trips()
	if r.attempts != nil {
		c.attempts = r.attempts()
	}
	c.wal, err = r.bench.Database.WAL(ctx)
	return c, err
}

// Check returns an error if any answer was wrong.
func (r *Runner) Check(ctx context.Context) error {
	if r.check == nil {
		return nil
	}
	return r.check(ctx, r.calls)
}

// Close releases the resources of Open.
func (r *Runner) Close() (err error) {
	for len(r.closers) > 0 {
		last := len(r.closers) - 1
		err = errors.Join(err, r.closers[last]())
		r.closers = r.closers[:last]
	}
	return err
}
