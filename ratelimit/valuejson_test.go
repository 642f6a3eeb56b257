package ratelimit

import (
	"encoding/json"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

func TestValueMarshalJSON(t *testing.T) {
	t.Parallel()
	now := opening.UnixMicro()
	read := func(limit Limit, key string, s bucket.State) Value {
		b := ask{limit: limit, key: key, terms: limit.termsFor(key)}
		return b.reading(answer{state: s, now: now})
	}

	t.Run("HasWhatProjectingTakes", func(t *testing.T) {
		t.Parallel()
		tokens := Define("sendMessage", TokenBucket{Rate: 10, Period: time.Minute, Capacity: 3})
		text, err := json.Marshal(read(tokens, "alice", bucket.State{Value: -0.1, TS: now - 7}))
		require.NoError(t, err)
		require.JSONEq(t, `{"limit": "sendMessage", "algorithm": "token bucket", "rate": 10, "period_us": 60000000,
			"capacity": 3, "value": -0.1, "ts_us": 1772409599999993, "now_us": 1772409600000000}`, string(text))

		windows := Define("uploads", FixedWindow{Rate: 5, Period: time.Hour, Start: opening.Add(-20 * time.Minute)})
		text, err = json.Marshal(read(windows, "alice", bucket.State{Value: 1, TS: now - 1}))
		require.NoError(t, err)
		require.JSONEq(t, `{"limit": "uploads", "algorithm": "fixed window", "rate": 5, "period_us": 3600000000, "start_us": 2400000000,
			"capacity": 5, "value": 1, "ts_us": 1772409599999999, "now_us": 1772409600000000}`, string(text))
	})
	t.Run("BringsTheTSOfAWrongClockBack", func(t *testing.T) {
		t.Parallel()
		text, err := json.Marshal(read(Define("x", PerSecond(1)), "alice", bucket.State{Value: 0, TS: now + 1e9}))
		require.NoError(t, err)
		require.Contains(t, string(text), `"ts_us":1772409600000000`)
	})
	t.Run("IsNullWithoutALimit", func(t *testing.T) {
		t.Parallel()
		text, err := json.Marshal(Value{})
		require.NoError(t, err)
		require.Equal(t, "null", string(text))
	})
}

// TestValueMarshalJSONStart shows that the start_us that clients get, which a float64 holds, begins the same
// windows as the phase that the statements get, which it does not hold.
func TestValueMarshalJSONStart(t *testing.T) {
	t.Parallel()
	const exact = int64(1) << 53
	src := seeded{rand.New(rand.NewPCG(5, 9))}
	windows := 0
	for range 2000 {
		limit := Define("x", extreme(src))
		terms := limit.termsFor("alice")
		text, err := json.Marshal(Value{Limit: limit, AsOf: opening, terms: terms})
		require.NoError(t, err)
		var got valueJSON
		require.NoError(t, json.Unmarshal(text, &got))
		step := int64(1)
		if got.Algorithm == "fixed window" {
			step = got.Period
			windows++
		}
		require.GreaterOrEqual(t, got.Start, int64(0))
		require.Less(t, got.Start, step)
		for range 20 {
			now := src.Int64N(exact)
			into := ((now-got.Start)%step + step) % step // below 2^53 throughout
			require.Equal(t, terms.Begin(now), now-into, "%v at %d", limit, now)
		}
	}
	require.Greater(t, windows, 500)
}
