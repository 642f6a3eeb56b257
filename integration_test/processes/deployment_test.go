package processes_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// deployedPolicies are what an old and a new version of a program say of one limit, and what either allows in any span at most.
var deployedPolicies = map[string]struct {
	versions map[string]ratelimit.Policy
	most     func(span time.Duration) float64
}{
	"BucketRaised": {
		versions: map[string]ratelimit.Policy{
			"old": ratelimit.TokenBucket{Rate: 10, Period: time.Second, Capacity: 5},
			"new": ratelimit.TokenBucket{Rate: 20, Period: time.Second, Capacity: 15},
		},
		most: func(span time.Duration) float64 { return 15 + 20*span.Seconds() },
	},
	"BucketLowered": {
		versions: map[string]ratelimit.Policy{
			"old": ratelimit.TokenBucket{Rate: 20, Period: time.Second, Capacity: 15},
			"new": ratelimit.TokenBucket{Rate: 10, Period: time.Second, Capacity: 5},
		},
		most: func(span time.Duration) float64 { return 15 + 20*span.Seconds() },
	},
	"BucketFasterAndSmaller": {
		versions: map[string]ratelimit.Policy{
			"old": ratelimit.TokenBucket{Rate: 5, Period: time.Second, Capacity: 20},
			"new": ratelimit.TokenBucket{Rate: 30, Period: time.Second, Capacity: 2},
		},
		most: func(span time.Duration) float64 { return 20 + 30*span.Seconds() },
	},
	"WindowRaised": {
		versions: map[string]ratelimit.Policy{
			"old": ratelimit.FixedWindow{Rate: 4, Period: 200 * time.Millisecond, Start: noon},
			"new": ratelimit.FixedWindow{Rate: 7, Period: 200 * time.Millisecond, Start: noon},
		},
		most: func(span time.Duration) float64 { return 7 * float64(2+span/(200*time.Millisecond)) },
	},
	"SlidingWindowLowered": {
		versions: map[string]ratelimit.Policy{
			"old": ratelimit.SlidingWindow{Rate: 8, Period: 400 * time.Millisecond, Slices: 4},
			"new": ratelimit.SlidingWindow{Rate: 5, Period: 400 * time.Millisecond, Slices: 4},
		},
		most: func(span time.Duration) float64 { return 8 * float64(1+span/(400*time.Millisecond)) },
	},
}

// deployed is a process of a rolling deployment. Its arguments are the name of one of deployedPolicies, and "old" or "new". Its workers take by
// themselves and in transactions until its input ends. It writes a line for each token that it was given, and for each refusal.
func deployed(t *testing.T, url string, arguments []string) {
	t.Helper()
	w := world.Open(t, url, func(c *pgxpool.Config) { c.MaxConns = deployedWorkers + 1 })
	limiter := w.With(t, ratelimit.Config{RefusalCache: 100, MaxAttempts: 1000}) // many, because it runs at SERIALIZABLE beside others
	limit, beside := ratelimit.Define("deployed", deployedPolicies[arguments[0]].versions[arguments[1]]), ratelimit.Define("roomy", world.Hoard(1e6))
	over := inputEnded(t)
	var mu sync.Mutex
	require.NoError(t, atonce.Do(deployedWorkers, func(worker int) error {
		for over.Err() == nil {
			d, err := takeAs(t.Context(), worker, w.Pool, limiter, limit.For("hot"), beside.For("beside"))
			if err != nil {
				return err
			}
			mu.Lock()
			_, err = fmt.Printf("asked %d %t\n", d.At.UnixMicro(), d.Allowed)
			mu.Unlock()
			if err != nil {
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
	for name, test := range deployedPolicies {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url := world.New(t).URL()
			old := startDeployed(t, url, name, "old")
			old.awaitGiven(t, 12)
			after := startDeployed(t, url, name, "new")
			after.awaitAsked(t, 30) // nothing is promised to either: the other may always be quicker
			old.awaitAsked(t, 30)
			old.end(t)
			after.awaitGiven(t, 12)
			after.end(t)
			requireSpans(t, append(old.given, after.given...), test.most)
			t.Logf("old: %d given, %d refused; new: %d given, %d refused", len(old.given), old.refused, len(after.given), after.refused)
		})
	}
}

// requireSpans checks each span between two instants, in microseconds, at which a token was given. A call knows the instant at
// which its statement began, and may have waited for the row since then. So calls that wait when a span ends count for it, although
// their tokens arrived later.
func requireSpans(t *testing.T, given []int64, most func(time.Duration) float64) {
	t.Helper()
	const waiting = 2 * deployedWorkers
	slices.Sort(given)
	for from := range given {
		for to := from; to < len(given); to++ {
			span := time.Duration(given[to]-given[from]) * time.Microsecond
			if n := float64(to - from + 1); n > most(span)+waiting {
				require.LessOrEqual(t, n, most(span)+waiting, "tokens in %v", span)
			}
		}
	}
}

// deployedProcess is a process of a deployment and its output so far.
type deployedProcess struct {
	*process

	mu      sync.Mutex
	given   []int64 // microseconds since 1970
	refused int
}

func startDeployed(t *testing.T, url, policy, version string) *deployedProcess {
	t.Helper()
	p := &deployedProcess{}
	p.process = start(t, "deployed", url, p.heard, policy, version)
	return p
}

func (p *deployedProcess) heard(line string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	var at int64
	var allowed bool
	if _, err := fmt.Sscanf(line, "asked %d %t", &at, &allowed); err != nil {
		return false
	}
	if allowed {
		p.given = append(p.given, at)
	} else {
		p.refused++
	}
	return true
}

// awaitGiven returns when the process was given that many more.
func (p *deployedProcess) awaitGiven(t *testing.T, more int) {
	t.Helper()
	p.await(t, more, func() int { return len(p.given) })
}

// awaitAsked returns when the process has had that many more answers.
func (p *deployedProcess) awaitAsked(t *testing.T, more int) {
	t.Helper()
	p.await(t, more, func() int { return len(p.given) + p.refused })
}

func (p *deployedProcess) await(t *testing.T, more int, of func() int) {
	t.Helper()
	count := func() int {
		p.mu.Lock()
		defer p.mu.Unlock()
		return of()
	}
	want := count() + more
	world.Eventually(t, "the process has its answers", func() bool {
		select {
		case <-p.ended:
			require.Fail(t, "the process has ended", "%v", p.said())
		default:
		}
		return count() >= want
	})
}
