package contender

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/bench/internal/load"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// limiterOptions are how a contender's Limiter differs from the default.
type limiterOptions struct {
	unbatched    bool // one statement for each call
	refusalCache int  // entries
	attempts     int  // at most for each call; 0: the default
	relaxed      bool // commits are relaxed
}

// newLimiter returns a Limiter on pool.
func newLimiter(pool *pgxpool.Pool, o limiterOptions) (*ratelimit.Limiter, error) {
	return ratelimit.New(pool, ratelimit.Config{NoBatching: o.unbatched, RefusalCache: o.refusalCache, MaxAttempts: o.attempts, RelaxedCommit: o.relaxed})
}

// openLimiter returns a runner for calls outside of a transaction, on a new Limiter with a pool of its own. prepare creates
// the buckets and sets the runner's call and check.
func openLimiter(ctx context.Context, b Bench, o limiterOptions, prepare func(limiter *ratelimit.Limiter, r *runner) error) (Runner, error) {
	wire := &load.Wire{}
	pool, err := b.Database.Pool(ctx, connections(b.Callers, poolConnections), wire)
	if err != nil {
		return nil, err
	}
	limiter, err := newLimiter(pool, o)
	if err != nil {
		pool.Close()
		return nil, err
	}
	r := newRunner(b, nil)
	r.wire = wire
	r.close = func() error { return closeLimiters([]*ratelimit.Limiter{limiter}, pool) }
	if err := prepare(limiter, r); err != nil {
		return nil, errors.Join(err, r.close())
	}
	return r, nil
}

// newLimit returns the limit called name over so many rows for each bucket.
func newLimit(name string, policy ratelimit.TokenBucket, shards int) (ratelimit.Limit, error) {
	policy.Shards = shards
	return ratelimit.NewLimit(name, policy)
}

// closeLimiters closes what a contender opened; a Limiter may be there more than once.
func closeLimiters(limiters []*ratelimit.Limiter, pool *pgxpool.Pool) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var errs []error
	for _, limiter := range limiters {
		errs = append(errs, limiter.Close(ctx))
	}
	pool.Close()
	return errors.Join(errs...)
}
