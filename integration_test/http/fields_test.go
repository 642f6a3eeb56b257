package http_test

import (
	"fmt"
	"net/http"
	"strconv"
	"testing"
	"time"

	"github.com/dunglas/httpsfv"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

// requireDraftFields checks that both fields are what the draft says, by a parser of structured fields, and returns the numbers of each policy.
func requireDraftFields(t *testing.T, header http.Header) (policies, limits map[string]map[string]int64) {
	t.Helper()
	parse := func(field string, required []string, optional string) map[string]map[string]int64 {
		list, err := httpsfv.UnmarshalList(header.Values(field))
		require.NoError(t, err, "%s: %q", field, header.Values(field))
		require.NotEmpty(t, list)
		all := make(map[string]map[string]int64)
		for _, member := range list {
			item, ok := member.(httpsfv.Item)
			require.True(t, ok)
			require.IsType(t, "", item.Value, "the name of a policy is a String")
			numbers := make(map[string]int64)
			for _, parameter := range append(required, optional) {
				value, found := item.Params.Get(parameter)
				if !found && parameter == optional {
					continue
				}
				require.True(t, found, "%s has no %s", field, parameter)
				require.IsType(t, int64(0), value, "%s is an Integer", parameter)
				numbers[parameter], _ = value.(int64)
				require.GreaterOrEqual(t, numbers[parameter], int64(0))
			}
			name, _ := item.Value.(string)
			require.NotContains(t, all, name, "each policy is stated once")
			all[name] = numbers
		}
		return all
	}
	policies, limits = parse("RateLimit-Policy", []string{"q"}, "w"), parse("RateLimit", []string{"r"}, "t")
	for name, p := range policies {
		require.Positive(t, p["q"], name)
		if w, found := p["w"]; found {
			require.Positive(t, w, name)
		}
	}
	for name, l := range limits {
		require.Contains(t, policies, name)
		require.LessOrEqual(t, l["r"], policies[name]["q"], "no more than the quota is left of %s", name)
	}
	return policies, limits
}

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

// TestFieldsHoldForEveryPolicy checks the fields for any policy and any state of its bucket. A parser of structured fields reads
// them, and their numbers are whole and not negative. A client that spreads the remaining tokens of a token bucket evenly over the
// window does not exceed the rate. RateLimit and Retry-After agree, and a lone caller is allowed after Retry-After.
func TestFieldsHoldForEveryPolicy(t *testing.T) {
	t.Parallel()
	clock := ratelimittest.NewClock()
	limiter := ratelimittest.New(t, clock)
	run := 0
	rapid.Check(t, func(rt *rapid.T) {
		run++
		policy := drawPolicy(rt)
		limit, err := ratelimit.NewLimit(rapid.StringMatching(`[A-Za-z0-9_.:/-]{1,64}`).Draw(rt, "limit"), policy)
		require.NoError(rt, err)
		cost := rapid.Float64Range(0.001, 1).Draw(rt, "cost") * limit.Capacity()
		unit := rapid.StringMatching(`[a-z0-9-]{0,32}`).Draw(rt, "unit")
		name := fmt.Sprint("user ", run)
		key := func(*http.Request) (string, error) { return name, nil }
		handler := limited(t, limiter, httplimit.Limit{Limit: limit, Key: key, Cost: httplimit.FixedCost(cost), Unit: unit})(http.HandlerFunc(home))
		for range rapid.IntRange(1, 5).Draw(rt, "requests") {
			clock.Advance(time.Duration(rapid.Int64Range(0, 2_000_000_000).Draw(rt, "pause")) * time.Microsecond)
			w := get(t, handler, "/")
			policies, limits := requireDraftFields(t, w.Header())
			q, width, left, window := policies[limit.Name()]["q"], policies[limit.Name()]["w"], limits[limit.Name()]["r"], limits[limit.Name()]["t"]
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
			clock.Advance(time.Duration(wait) * time.Second)
			require.Equal(rt, http.StatusOK, get(t, handler, "/").Code, "a caller that waits for Retry-After is allowed")
		}
	})
}
