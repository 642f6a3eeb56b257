package httplimit_test

import (
	"fmt"
	"net/http"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

func drawPolicy(rt *rapid.T) ratelimit.Policy {
	rate := rapid.OneOf(rapid.Map(rapid.IntRange(1, 100_000), func(n int) float64 { return float64(n) }), rapid.Float64Range(0.01, 1000)).Draw(rt, "rate")
	period := time.Duration(rapid.OneOf(
		rapid.SampledFrom([]int64{1, 60, 3600, 86400, 604800}),
		rapid.Int64Range(1, 1_000_000),
	).Draw(rt, "seconds")) * time.Second
	if rapid.Bool().Draw(rt, "uneven") {
		period += time.Duration(rapid.Int64Range(1, 999_999).Draw(rt, "microseconds")) * time.Microsecond
	}
	capacity := rapid.Float64Range(1, 10).Draw(rt, "capacity") * max(rate, 1)
	if rapid.Bool().Draw(rt, "fixed") {
		return ratelimit.FixedWindow{Rate: rate, Period: period, Capacity: capacity}
	}
	return ratelimit.TokenBucket{Rate: rate, Period: period, Capacity: capacity}
}

// TestFieldsHoldForEveryPolicy promises, for any policy and any state of its bucket, fields that a parser of
// structured fields takes, whole and not negative; that a client which spreads what is left of a token bucket evenly over
// the window does not go faster than the rate; that RateLimit and Retry-After agree; and that a lone
// caller who waits as long as Retry-After says is let through.
func TestFieldsHoldForEveryPolicy(t *testing.T) {
	t.Parallel()
	b := setup(t)
	run := 0
	rapid.Check(t, func(rt *rapid.T) {
		run++
		policy := drawPolicy(rt)
		limit, err := ratelimit.NewLimit("any", policy)
		require.NoError(rt, err)
		cost := rapid.Float64Range(0.001, 1).Draw(rt, "cost") * limit.Capacity()
		handler := b.limited(t, rules(httplimit.Rule{Limit: limit, Key: user, Cost: httplimit.FixedCost(cost)}), respond())
		r := request(t, "X-User", fmt.Sprint("user ", run))
		now := ten
		for range rapid.IntRange(1, 5).Draw(rt, "requests") {
			now = now.Add(time.Duration(rapid.Int64Range(0, 2_000_000_000).Draw(rt, "pause")) * time.Microsecond)
			b.setClock(now)
			w := do(handler, r)
			policies, limits := requireDraftFields(t, w.Header())
			q, width, left, window := policies["any"]["q"], policies["any"]["w"], limits["any"]["r"], limits["any"]["t"]
			require.Positive(rt, window)
			require.LessOrEqual(rt, float64(left), limit.Capacity())
			if w.Code == http.StatusOK {
				if _, fixed := policy.(ratelimit.FixedWindow); !fixed && left > 0 {
					require.LessOrEqual(rt, float64(left)*float64(width), float64(q+1)*float64(window), "spread evenly it is no faster than the rate")
				}
				continue
			}
			require.Equal(rt, http.StatusTooManyRequests, w.Code)
			wait, err := strconv.ParseInt(w.Header().Get("Retry-After"), 10, 64)
			require.NoError(rt, err)
			require.GreaterOrEqual(rt, wait, window)
			now = now.Add(time.Duration(wait) * time.Second)
			b.setClock(now)
			require.Equal(rt, http.StatusOK, do(handler, r).Code, "who waits as told is let through")
		}
	})
}
