package processes_test

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/integration_test/internal/child"
	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// noon is an instant at which windows begin.
var noon = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// deployedPolicies are what an old and a new version of a program say of one limit, and what either allows in any span at most.
var deployedPolicies = map[string]struct {
	before, after ratelimit.Policy
	most          func(span time.Duration) float64
}{
	"BucketRaised": {
		before: ratelimit.TokenBucket{Rate: 10, Period: time.Second, Capacity: 5},
		after:  ratelimit.TokenBucket{Rate: 20, Period: time.Second, Capacity: 15},
		most:   func(span time.Duration) float64 { return 15 + 20*span.Seconds() },
	},
	"BucketLowered": {
		before: ratelimit.TokenBucket{Rate: 20, Period: time.Second, Capacity: 15},
		after:  ratelimit.TokenBucket{Rate: 10, Period: time.Second, Capacity: 5},
		most:   func(span time.Duration) float64 { return 15 + 20*span.Seconds() },
	},
	"BucketFasterAndSmaller": {
		before: ratelimit.TokenBucket{Rate: 5, Period: time.Second, Capacity: 20},
		after:  ratelimit.TokenBucket{Rate: 30, Period: time.Second, Capacity: 2},
		most:   func(span time.Duration) float64 { return 20 + 30*span.Seconds() },
	},
	"WindowRaised": {
		before: ratelimit.FixedWindow{Rate: 4, Period: 200 * time.Millisecond, Start: noon},
		after:  ratelimit.FixedWindow{Rate: 7, Period: 200 * time.Millisecond, Start: noon},
		most:   func(span time.Duration) float64 { return 7 * float64(2+span/(200*time.Millisecond)) },
	},
	"SlidingWindowLowered": {
		before: ratelimit.SlidingWindow{Rate: 8, Period: 400 * time.Millisecond, Slices: 4},
		after:  ratelimit.SlidingWindow{Rate: 5, Period: 400 * time.Millisecond, Slices: 4},
		most:   func(span time.Duration) float64 { return 8 * float64(1+span/(400*time.Millisecond)) },
	},
}

// deployed is a process of a rolling deployment. Its arguments are the name of one of deployedPolicies, and "new" for the new version.
// Its workers take by themselves and in transactions until its input ends.
func deployed(t *testing.T, url string, arguments []string) {
	t.Helper()
	w := world.Open(t, url, func(c *pgxpool.Config) { c.MaxConns = deployedWorkers + 1 })
	limiter := w.With(t, ratelimit.Config{RefusalCache: 100, MaxAttempts: 1000}) // many, because it runs at SERIALIZABLE beside others
	policy := deployedPolicies[arguments[0]].before
	if arguments[1] == "new" {
		policy = deployedPolicies[arguments[0]].after
	}
	limit, beside := ratelimit.Define("deployed", policy), ratelimit.Define("roomy", world.Hoard(1e6))
	over := child.InputEnded(t.Context())
	require.NoError(t, atonce.Do(deployedWorkers, func(worker int) error {
		for over.Err() == nil {
			d, err := takeAs(t.Context(), worker, w.Pool, limiter, limit.For("hot"), beside.For("beside"))
			if err != nil {
				return err
			}
			if err := report(d, 0); err != nil {
				return err
			}
		}
		return nil
	}))
	require.NoError(t, limiter.Close(t.Context()))
}

// deployedWorkers is how many workers a process of a deployment has.
const deployedWorkers = 5

// takeAs takes in the way of a worker: alone, in InTx, and in a transaction of the caller's at each isolation level.
func takeAs(ctx context.Context, worker int, pool ratelimit.Pool, limiter *ratelimit.Limiter, requests ...ratelimit.Request) (d ratelimit.Decision, err error) {
	inTx := func(tx pgx.Tx) (err error) {
		d, err = limiter.WithTx(tx).Take(ctx, requests...)
		return err
	}
	switch levels := []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable}; {
	case worker < len(levels):
		_, err = atonce.Tx(ctx, pool, levels[worker], inTx)
	case worker == len(levels):
		err = limiter.InTx(ctx, inTx)
	default:
		d, err = limiter.Take(ctx, requests...)
	}
	return d, err
}

// A new version of a program takes over from an old one, each in processes of its own, and their limits differ. While both run, no
// span has more than the larger capacity and the higher rate allow, no call fails, and both get answers.
func TestARollingDeploymentOfTwoProcesses(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "ten processes")
	allowed, asked := func(d decided) bool { return d.Allowed }, func(decided) bool { return true }
	for name, test := range deployedPolicies {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url := world.New(t).URL()
			before := start(t, "deployed", url, name, "old")
			before.await(t, 12, allowed)
			after := start(t, "deployed", url, name, "new")
			after.await(t, 30, asked) // nothing is promised to either: the other may always be quicker
			before.await(t, 30, asked)
			require.NoError(t, before.End())
			after.await(t, 12, allowed)
			require.NoError(t, after.End())
			requireSpans(t, append(before.decisions, after.decisions...), test.most)
		})
	}
}

// requireSpans checks each span between two instants at which a token was given. A call knows the instant at which its statement
// began, and may have waited for the row since then. So calls that wait when a span ends count for it, although their tokens arrived later.
func requireSpans(t *testing.T, decisions []decided, most func(time.Duration) float64) {
	t.Helper()
	const waiting = 2 * deployedWorkers
	given := allowedAt(decisions)
	for from := range given {
		for to := from; to < len(given); to++ {
			span := time.Duration(given[to]-given[from]) * time.Microsecond
			if n := float64(to - from + 1); n > most(span)+waiting {
				require.LessOrEqual(t, n, most(span)+waiting, "tokens in %v", span)
			}
		}
	}
}

// allowedAt returns the instants of the allowed decisions, in order.
func allowedAt(decisions []decided) (at []int64) {
	for _, d := range decisions {
		if d.Allowed {
			at = append(at, d.At)
		}
	}
	slices.Sort(at)
	return at
}
