package docs_test

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/middleware/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/take"
)

// The functions below hold the right-hand sides of docs/migrating.md, and the tests run each of them.

var (
	Visits   = ratelimit.Define("visits", ratelimit.SlidingWindow{Rate: 100, Period: time.Minute})
	APICalls = ratelimit.Define("apiCalls", ratelimit.TokenBucket{Rate: 10, Period: time.Second, Capacity: 30})
	Hourly   = ratelimit.Define("hourly", ratelimit.FixedWindow{Rate: 1000, Period: time.Hour})
)

// migratedKeys are the keys that the tables name.
func migratedKeys(proxies httplimit.Proxies) (_, _, _, _ httplimit.Key) {
	address := httplimit.ClientIP(httplimit.Peer, httplimit.Bits{})
	behind := httplimit.ClientIP(httplimit.XForwardedFor(proxies), httplimit.Bits{})
	f := func(r *http.Request) (string, error) { return r.Header.Get("X-User"), nil }
	path := func(r *http.Request) (string, error) { return r.URL.Path, nil }
	return address, behind, f, path
}

// migratedLimits are the limits of the tables.
func migratedLimits(address, f, path httplimit.Key, isPost func(*http.Request) bool) []any {
	return []any{
		httplimit.Limit{Limit: Visits, Key: address},
		httplimit.Limit{Limit: Visits, Global: true},
		httplimit.Limit{Limit: Visits, Key: f},
		httplimit.Limit{Limit: Visits, Key: httplimit.Join(f, path)},
		httplimit.Limit{Limit: Visits, Key: f, Cost: httplimit.FixedCost(5)},
		httplimit.Limit{Limit: APICalls, Key: address, When: isPost},
	}
}

func migratedMiddleware(limiter *ratelimit.Limiter) (func(http.Handler) http.Handler, error) {
	limited, err := httplimit.New(limiter, httplimit.Config{
		Limits:  []httplimit.Limit{{Limit: Visits, Key: httplimit.ClientIP(httplimit.Peer, httplimit.Bits{})}},
		Headers: httplimit.EpochHeaders, // httprate's X-RateLimit fields; leave it out for the IETF draft's
	})
	return limited, err
}

// migratedPolicies are the policies of the tables, and what each says of itself.
func migratedPolicies() map[string]ratelimit.Policy {
	return map[string]ratelimit.Policy{
		"10 per second, capacity 30":   ratelimit.TokenBucket{Rate: 10, Period: time.Second, Capacity: 30},
		"1 per 30 seconds":             ratelimit.TokenBucket{Rate: 1, Period: 30 * time.Second},
		"1000 per hour (fixed window)": ratelimit.FixedWindow{Rate: 1000, Period: time.Hour},
		"10 per second":                ratelimit.PerSecond(10),
	}
}

// migratedCalls makes the calls of the tables, on a bucket of 30 each, and returns the remaining tokens.
func migratedCalls(ctx context.Context, limiter *ratelimit.Limiter, key string) (left float64, err error) {
	_, first := limiter.Take(ctx, APICalls.For(key))
	_, second := limiter.Take(ctx, APICalls.For(key).Cost(5))
	n, _, third := take.UpTo(ctx, limiter, 5, APICalls.For(key))
	d, fourth := limiter.Check(ctx, APICalls.For(key))
	err = errors.Join(first, second, third, fourth, limiter.Require(ctx, APICalls.For(key)))
	v, fifth := limiter.Value(ctx, APICalls.For(key))
	if err = errors.Join(err, fifth); err != nil || n != 5 || !d.Allowed {
		return 0, errors.Join(err, errors.New("not all was taken"))
	}
	return v.Tokens, limiter.Reset(ctx, APICalls.For(key))
}

// migratedGlobals makes the calls on one bucket for everybody, and returns the tokens left before the last call was
// undone.
func migratedGlobals(ctx context.Context, limiter *ratelimit.Limiter) (left float64, err error) {
	first := limiter.Require(ctx, APICalls.Global())
	second := limiter.Require(ctx, APICalls.Global().Cost(5))
	_, third := take.Wait(ctx, limiter, APICalls.Global())
	r, fourth := limiter.Reserve(ctx, APICalls.Global())
	v, fifth := limiter.Value(ctx, APICalls.Global())
	if err := errors.Join(first, second, third, fourth, fifth); err != nil || r.Delay() > 0 {
		return 0, errors.Join(err, errors.New("it has to wait"))
	}
	return v.Tokens, limiter.Cancel(ctx, r.ID)
}

// migratedTransaction makes the calls of a mutation.
func migratedTransaction(ctx context.Context, limiter *ratelimit.Limiter, key string) error {
	return limiter.InTx(ctx, func(tx pgx.Tx) error {
		first := limiter.WithTx(tx).Require(ctx, APICalls.For(key))
		_, second := limiter.WithTx(tx).Take(ctx, APICalls.For(key).Cost(5))
		_, third := limiter.WithTx(tx).Reserve(ctx, APICalls.For(key))
		return errors.Join(first, second, third)
	})
}

// TestMigratedCalls runs the calls of the tables.
func TestMigratedCalls(t *testing.T) {
	t.Parallel()
	testkit.Long(t, documents)
	f := newFrozen(t)
	for name, policy := range migratedPolicies() {
		require.Equal(t, name, policy.String())
	}
	left, err := migratedCalls(t.Context(), f.Limiter, "ada")
	require.NoError(t, err)
	require.Equal(t, 18.0, left)
	require.NoError(t, migratedTransaction(t.Context(), f.Limiter, "ada"))
	require.Equal(t, 23.0, f.tokens(t, APICalls.For("ada")))
	left, err = migratedGlobals(t.Context(), f.Limiter)
	require.NoError(t, err)
	require.Equal(t, 22.0, left)
	require.Equal(t, 23.0, f.tokens(t, APICalls.Global()))
}

// TestMigratedMiddleware makes the middlewares of the tables. What each limits is tested in httplimit.
func TestMigratedMiddleware(t *testing.T) {
	t.Parallel()
	testkit.Long(t, documents)
	proxies, err := httplimit.ParseProxies("192.0.2.0/24")
	require.NoError(t, err)
	address, behind, byUser, path := migratedKeys(proxies)
	f := newFrozen(t)
	refuse := func(w http.ResponseWriter, _ *http.Request, refusal httplimit.Refusal) { w.WriteHeader(refusal.Status) }
	for _, limit := range migratedLimits(address, byUser, path, func(*http.Request) bool { return true }) {
		config := httplimit.Config{Refuse: refuse}
		config.Limits = []httplimit.Limit{limit.(httplimit.Limit)}
		_, err = httplimit.New(f.Limiter, config)
		require.NoError(t, err)
	}
	limits := []httplimit.Limit{{Limit: Hourly, Key: behind}}
	_, err = httplimit.New(f.Limiter, httplimit.Config{Limits: limits, Headers: httplimit.EpochHeaders})
	require.NoError(t, err)
	limited, err := migratedMiddleware(f.Limiter)
	require.NoError(t, err)
	w := httptest.NewRecorder()
	limited(http.NotFoundHandler()).ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", http.NoBody))
	require.Equal(t, "99", w.Header().Get("X-RateLimit-Remaining"))
}

// TestTheMigratingPageRuns finds each right-hand side of docs/migrating.md in the tests above.
func TestTheMigratingPageRuns(t *testing.T) {
	t.Parallel()
	testkit.Long(t, documents)
	source, err := os.ReadFile("migrating_test.go")
	require.NoError(t, err)
	page, err := os.ReadFile("../../docs/migrating.md")
	require.NoError(t, err)
	rows := regexp.MustCompile(`(?m)^\|.*\|(.*)\|$`).FindAllStringSubmatch(string(page), -1)
	found := 0
	for _, row := range rows {
		for _, code := range regexp.MustCompile("`([^`]*)`").FindAllStringSubmatch(row[1], -1) {
			require.Contains(t, string(source), code[1])
			found++
		}
	}
	require.Greater(t, found, 25)
}
