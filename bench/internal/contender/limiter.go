package contender

import (
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// limiterOptions are how a contender's Limiter differs from the default.
type limiterOptions struct {
	unbatched bool // one statement for each call
	denyCache int  // entries
	attempts  int  // at most for each call; 0: the default
}

// newLimiter returns a Limiter on pool. What the limiter does not have yet is ErrUnavailable.
func newLimiter(pool *pgxpool.Pool, o limiterOptions) (*ratelimit.Limiter, error) {
	if o.denyCache > 0 {
		return nil, unavailable("the limiter has no deny cache yet")
	}
	return ratelimit.New(pool, ratelimit.Config{MaxAttempts: o.attempts})
}

// newLimit returns the limit called name over so many rows for each bucket.
func newLimit(name string, policy ratelimit.TokenBucket, shards int) (ratelimit.Limit, error) {
	if shards > 1 {
		return ratelimit.Limit{}, unavailable("the limiter has no shards yet")
	}
	return ratelimit.NewLimit(name, policy)
}

// closeLimiters closes what a contender opened; a Limiter may be there more than once.
func closeLimiters(_ []*ratelimit.Limiter, pool *pgxpool.Pool) error {
	pool.Close()
	return nil
}
