package inspect_test

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/inspect"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

func TestLifeOfAReservation(t *testing.T) {
	t.Parallel()
	now := time.Date(2030, 1, 1, 12, 0, 0, 0, time.UTC)
	before, after := now.Add(-time.Minute), now.Add(time.Minute)
	for want, r := range map[string]inspect.Reservation{
		"waiting until 12:01": {State: "open", ReadyAt: after},
		"ready since 11:59":   {State: "open", ReadyAt: before, StaleAt: after},
		"turn lost 12:00":     {State: "open", ReadyAt: before, StaleAt: now},
		"started 11:59":       {State: "open", ReadyAt: before, StaleAt: now, StartedAt: before},
		"settled 00:00":       {State: "settled", ReadyAt: before, StartedAt: before},
	} {
		stage, at := r.Life(now)
		require.Equal(t, want, stage+at.Format(" 15:04"))
	}
}

func TestDecidedBy(t *testing.T) {
	t.Parallel()
	for rule, want := range map[string]string{"": "the code", "calls": "rule", "calls, plan pro": "plan pro", "calls, override": "override", "x": ""} {
		require.Equal(t, want, inspect.DecidedBy("calls", rule, "the code"))
	}
}

// TestViews promises that buckets of a known limit have their levels, and other buckets only the stored values.
func TestViews(t *testing.T) {
	t.Parallel()
	noon := time.Date(2030, 1, 1, 12, 0, 0, 0, time.UTC)
	limiter, err := ratelimit.New(ratelimittest.NewDB(), ratelimit.Config{AsOf: func() time.Time { return noon }})
	require.NoError(t, err)
	calls := ratelimit.Define("calls", ratelimit.TokenBucket{Rate: 10, Period: time.Hour, Capacity: 20})
	_, err = limiter.Reserve(t.Context(), calls.For("ada").Cost(30))
	require.NoError(t, err)
	bucketOf := func(limit string) inspect.Bucket {
		return inspect.Bucket{Limit: limit, Key: "ada", Rows: []inspect.Row{{Tokens: -4, At: noon}, {Shard: 1, Tokens: -6, At: noon.Add(-time.Hour)}}}
	}
	views, err := inspect.Views(t.Context(), limiter, []inspect.Bucket{bucketOf("calls"), bucketOf("unknown")}, func(b inspect.Bucket) ratelimit.Limit {
		if b.Limit == "calls" {
			return calls
		}
		return ratelimit.Limit{}
	})
	require.NoError(t, err)
	for i, v := range views {
		require.Equal(t, -10.0, v.Stored)
		require.Equal(t, noon, v.Changed)
		require.Equal(t, 10.0, v.Owed(), i)
	}
	require.Nil(t, views[1].Level)
	level := views[0].Level
	require.Equal(t, []any{-10.0, 20.0, 0.0, "10 per hour, capacity 20"}, []any{level.Tokens, level.Capacity, level.Percent(), level.Words()})
	require.Equal(t, []time.Time{noon.Add(time.Hour), noon.Add(3 * time.Hour)}, []time.Time{level.FreeAt, level.FullAt})
	text, err := json.Marshal(views[0])
	require.NoError(t, err)
	require.JSONEq(t, `{"limit":"calls","key":"ada","at":"2030-01-01T12:00:00Z","tokens":-10,"capacity":20,
		"policy":{"kind":"token bucket","rate":10,"period":"1h","capacity":20},"full_at":"2030-01-01T15:00:00Z","free_at":"2030-01-01T13:00:00Z",
		"changed":"2030-01-01T12:00:00Z","rows":[{"shard":0,"tokens":-4,"at":"2030-01-01T12:00:00Z"},{"shard":1,"tokens":-6,"at":"2030-01-01T11:00:00Z"}]}`, string(text))
	_, err = inspect.Views(t.Context(), limiter, []inspect.Bucket{{Limit: "calls", Key: "\xff"}}, func(inspect.Bucket) ratelimit.Limit { return calls })
	require.ErrorIs(t, err, ratelimit.ErrInvalidKey)
}
