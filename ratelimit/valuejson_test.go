package ratelimit_test

import (
	"encoding/json"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

func TestValueMarshalJSON(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	limiter := newLimiter(t, pool, ratelimit.Config{})
	read := func(t *testing.T, limit ratelimit.Limit, value float64, after time.Duration) string {
		t.Helper()
		plant(t, pool, planted{name: limit.Name(), key: "alice", value: value, after: after})
		v, err := limiter.Value(t.Context(), limit.For("alice"))
		require.NoError(t, err)
		text, err := json.Marshal(v)
		require.NoError(t, err)
		return string(text)
	}

	t.Run("HasWhatProjectingTakes", func(t *testing.T) {
		t.Parallel()
		tokens := ratelimit.Define("sendMessage", ratelimit.TokenBucket{Rate: 10, Period: time.Minute, Capacity: 3})
		require.JSONEq(t, `{"limit": "sendMessage", "kind": "token bucket", "rate": 10, "period_us": 60000000,
			"capacity": 3, "value": -0.1, "ts_us": 1772409599999993, "now_us": 1772409600000000}`, read(t, tokens, -0.1, -7*time.Microsecond))

		windows := ratelimit.Define("uploads", ratelimit.FixedWindow{Rate: 5, Period: time.Hour, Start: opening.Add(-20 * time.Minute)})
		require.JSONEq(t, `{"limit": "uploads", "kind": "fixed window", "rate": 5, "period_us": 3600000000, "start_us": 2400000000,
			"capacity": 5, "value": 1, "ts_us": 1772409599999999, "now_us": 1772409600000000}`, read(t, windows, 1, -time.Microsecond))
	})
	t.Run("BringsTheTSOfAWrongClockBack", func(t *testing.T) {
		t.Parallel()
		require.Contains(t, read(t, ratelimit.Define("ahead", ratelimit.PerSecond(1)), 0, 1000*time.Second), `"ts_us":1772409600000000`)
	})
	t.Run("IsNullWithoutALimit", func(t *testing.T) {
		t.Parallel()
		text, err := json.Marshal(ratelimit.Value{})
		require.NoError(t, err)
		require.Equal(t, "null", string(text))
	})
}

// TestValueMarshalJSONStart shows that the start_us that clients get, which a float64 holds, begins the same
// windows as the limit does.
func TestValueMarshalJSONStart(t *testing.T) {
	t.Parallel()
	const exact = int64(1) << 53
	random := testsize.Rand(t)
	for range 500 {
		period := time.Duration(math.Pow(float64(century/time.Microsecond), random.Float64())) * time.Microsecond
		start := opening.Add(time.Duration((random.Float64()*2 - 1) * float64(century)))
		if random.IntN(3) == 0 {
			start = time.Time{}
		}
		rate := max(1, float64(period)/float64(century)*10) // which fills within a century
		limit, err := ratelimit.NewLimit("x", ratelimit.FixedWindow{Rate: rate, Period: period, Start: start})
		require.NoError(t, err)
		for range 20 {
			now := random.Int64N(exact)
			text, err := json.Marshal(limit.For("alice").Full(time.UnixMicro(now)))
			require.NoError(t, err)
			var got struct {
				Kind   string `json:"kind"`
				Period int64  `json:"period_us"`
				Start  int64  `json:"start_us"`
				TS     int64  `json:"ts_us"` // when the window of now began
			}
			require.NoError(t, json.Unmarshal(text, &got))
			require.Equal(t, period.Microseconds(), got.Period)
			require.Equal(t, got.Kind == "fixed window", period > time.Microsecond)
			require.GreaterOrEqual(t, got.Start, int64(0))
			require.Less(t, got.Start, got.Period)
			into := ((now-got.Start)%got.Period + got.Period) % got.Period // below 2^53 throughout
			require.Equal(t, got.TS, now-into, "%v at %d", limit, now)
		}
	}
}
