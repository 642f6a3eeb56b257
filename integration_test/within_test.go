package integration_test

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// TestWithin promises that a reservation is refused, and takes from no limit, if one of its limits could give its
// tokens only after its bound.
func TestWithin(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, on backend) {
		t.Helper()
		bundles := map[string]*bundle{"OverRows": on.setup(t)}
		if on.name == onPostgres.name {
			bundles["ForEachRow"] = setupRouted(t)
		}
		for name, b := range bundles {
			limiter := b.with(t, ratelimit.Config{AsOf: stoppedAt(clockNoon).now})
			for _, place := range callers() {
				t.Run(name+"/"+place.name, func(t *testing.T) {
					t.Parallel()
					key := t.Name()
					for _, others := range [][]ratelimit.Request{nil, {roomy.For(key)}, {wide.For(key)}} {
						require.NoError(t, limiter.Reset(t.Context(), append(slices.Clone(others), queued.For(key))...))
						takeAll(t, limiter, queued.For(key))
						reserve := func(within time.Duration) (r ratelimit.Reservation) {
							requests := append(slices.Clone(others), queued.For(key).MaxWait(within))
							var looked ratelimit.Reservation
							require.NoError(t, place.within(t.Context(), b.db(), limiter, func(l *ratelimit.Limiter) (err error) {
								if looked, err = l.CheckReserve(t.Context(), requests...); err == nil {
									r, err = l.Reserve(t.Context(), requests...)
								}
								return err
							}))
							require.Equal(t, []any{looked.Allowed, looked.RetryAfter, looked.ReadyAt}, []any{r.Allowed, r.RetryAfter, r.ReadyAt})
							return r
						}
						r := reserve(ratelimit.Day - time.Minute)
						require.Equal(t, []any{false, time.Minute, ""}, []any{r.Allowed, r.RetryAfter, r.ID})
						require.Zero(t, tokens(t, limiter, queued.For(key)))
						for _, other := range others {
							require.Equal(t, other.Limit().Capacity(), tokens(t, limiter, other))
						}
						r = reserve(ratelimit.Day)
						require.Equal(t, []any{true, ratelimit.Day}, []any{r.Allowed, r.Delay()})
						require.Equal(t, -1.0, tokens(t, limiter, queued.For(key)))
					}
				})
			}
		}
	}, onPostgres, inMemory)
}
