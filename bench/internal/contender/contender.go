// Package contender has the ways to decide on a limit that are measured: the Limiter's calls, and other limiters.
package contender

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/bench/internal/load"
	"github.com/pgratelimit/pgratelimit/bench/internal/server"
	"github.com/pgratelimit/pgratelimit/internal/roundtrips"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// ErrUnavailable is returned by Open when this machine does not have what the contender needs.
var ErrUnavailable = errors.New("not available")

// Way is how a contender decides.
type Way interface {
	// Open prepares the contender. The caller closes its Runner.
	Open(ctx context.Context, b Bench) (Runner, error)
}

// Bench is what a contender is opened on.
type Bench struct {
	Database *server.Database
	Redis    map[server.Durability]*server.Redis // empty without a redis-server
	Meter    *server.Meter
	Name     string // of the contender's limits, unique in the scenario
	Callers  int
	Burst    int           // calls for each reading of the clock; 0 is 1
	Disk     time.Duration // by which each flush of a commit takes longer
}

// Runner is an open contender.
type Runner interface {
	// Run makes a round of calls.
	Run(ctx context.Context, amount load.Amount) (Round, error)
	// Check returns an error if an answer so far was wrong.
	Check(ctx context.Context) error
	// Close releases what Open took.
	Close() error
}

// Round is what a round of calls measured. A figure that cannot be measured is NaN.
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

const (
	poolConnections  = 16 // at most, for each contender on Postgres outside of transactions
	redisConnections = 64
)

// runner makes calls in this process.
type runner struct {
	bench    Bench
	group    *load.Group
	call     load.Call
	wire     roundtrips.Counter
	attempts func() int64                                             // nil: a call is one attempt
	before   func(ctx context.Context) (stop func() error, err error) // runs beside the calls of a round; nil: nothing
	check    func(ctx context.Context, calls int) error               // nil: there is nothing to check
	closers  []func() error                                           // called in reverse order
	calls    int
}

// open returns a runner on b that prepare has completed.
func open(b Bench, prepare func(r *runner) error) (Runner, error) {
	r := &runner{bench: b, group: load.NewGroup(b.Callers, b.Burst)}
	r.group.Meter = b.Meter.Seconds
	if err := prepare(r); err != nil {
		return nil, errors.Join(err, r.Close())
	}
	return r, nil
}

// pool returns a pool whose round trips count, and which the runner closes.
func (r *runner) pool(ctx context.Context, connections int, configure ...func(*pgxpool.Config)) (*pgxpool.Pool, error) {
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

// standalone returns a Limiter for calls outside of transactions, which the runner closes.
func (r *runner) standalone(ctx context.Context, config ratelimit.Config) (*ratelimit.Limiter, error) {
	pool, err := r.pool(ctx, min(r.bench.Callers, poolConnections))
	if err != nil {
		return nil, err
	}
	return r.limiter(pool, config)
}

// limiter returns a Limiter on pool, which the runner closes.
func (r *runner) limiter(pool *pgxpool.Pool, config ratelimit.Config) (*ratelimit.Limiter, error) {
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

type counts struct{ trips, attempts, wal int64 }

func (r *runner) counts(ctx context.Context) (c counts, err error) {
	c.trips = r.wire.Trips()
	if r.attempts != nil {
		c.attempts = r.attempts()
	}
	c.wal, err = r.bench.Database.WAL(ctx)
	return c, err
}

func (r *runner) Check(ctx context.Context) error {
	if r.check == nil {
		return nil
	}
	return r.check(ctx, r.calls)
}

func (r *runner) Close() (err error) {
	for len(r.closers) > 0 {
		last := len(r.closers) - 1
		err = errors.Join(err, r.closers[last]())
		r.closers = r.closers[:last]
	}
	return err
}

// unavailable returns ErrUnavailable with the reason.
func unavailable(reason string) error { return fmt.Errorf("%w: %s", ErrUnavailable, reason) }
