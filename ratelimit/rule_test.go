package ratelimit_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

func TestNewRulingRejectsInvalidEras(t *testing.T) {
	t.Parallel()
	limit := ratelimit.Define("api", ratelimit.PerMinute(10))
	later := at.Add(time.Hour)
	rows := func(rate float64, shards int) ratelimit.Policy {
		return ratelimit.TokenBucket{Rate: rate, Period: time.Minute, Shards: shards}
	}
	for name, test := range map[string]struct {
		limit     ratelimit.Limit
		revisions []ratelimit.Revision
		says      string
	}{
		"ZeroLimit":     {ratelimit.Limit{}, nil, "make it with Define or NewLimit"},
		"Unsorted":      {limit, []ratelimit.Revision{{}, {EffectiveAt: later}, {EffectiveAt: at}}, "revision 2 takes effect at"},
		"AtOnce":        {limit, []ratelimit.Revision{{}, {EffectiveAt: at}, {EffectiveAt: at}}, "sort them"},
		"BeforeTheYear": {limit, []ratelimit.Revision{{}, {}}, "revision 1 takes effect at"},
		"Policy":        {limit, []ratelimit.Revision{{Policy: ratelimit.PerMinute(-1)}}, "revision 0: ratelimit: invalid limit"},
		"Mode":          {limit, []ratelimit.Revision{{Mode: "maybe"}}, "use on, shadow or off"},
		"Change":        {limit, []ratelimit.Revision{{}, {EffectiveAt: at, OnChange: "double"}}, "use carry, keep, scale, add or reset"},
		"AnotherKind":   {limit, []ratelimit.Revision{{}, {EffectiveAt: at, Policy: ratelimit.SlidingWindow{Rate: 10, Period: time.Minute}}}, "revision 1: it changes the kind from token bucket to sliding window; set OnChange to reset"},
		"CarriedKind":   {limit, []ratelimit.Revision{{Policy: ratelimit.FixedWindow{Rate: 10, Period: time.Hour}}, {EffectiveAt: at, OnChange: ratelimit.CarryUsage}}, "from fixed window to token bucket"},
		"MoreShards":    {limit, []ratelimit.Revision{{}, {EffectiveAt: at, Policy: rows(10, 4), OnChange: ratelimit.AddTokens}}, "revision 1: it changes Shards from 1 to 4; keep Shards as it is, or set OnChange to reset"},
		"FewerShards":   {limit, []ratelimit.Revision{{Policy: rows(10, 4)}, {EffectiveAt: at}}, "revision 1: it changes Shards from 4 to 1"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := ratelimit.NewRuling(test.limit, ratelimit.RulingConfig{Name: "a rule", Revisions: test.revisions})
			require.ErrorIs(t, err, ratelimit.ErrInvalidRule)
			require.ErrorContains(t, err, test.says)
			require.ErrorContains(t, err, "a rule")
		})
	}
}

// Mode and Resolve follow the revisions and the pause. Mode also answers for a request without a key.
func TestModeFollowsTheErasAndThePause(t *testing.T) {
	t.Parallel()
	limit, other := ratelimit.Define("api", ratelimit.PerSecond(1)), ratelimit.Define("other", ratelimit.PerSecond(1))
	at := time.Date(2026, time.March, 9, 10, 0, 0, 0, time.UTC)
	rule, err := ratelimit.NewRuling(limit, ratelimit.RulingConfig{
		Revisions:   []ratelimit.Revision{{Mode: ratelimit.Shadow}, {EffectiveAt: at, Mode: ratelimit.Off}, {EffectiveAt: at.Add(time.Hour), Policy: ratelimit.PerSecond(5)}},
		PausedUntil: at.Add(-time.Hour),
	})
	require.NoError(t, err)
	now := at
	limiter, err := ratelimit.New(untouched{}, ratelimit.Config{Policies: modes{"api": rule}, AsOf: func() time.Time { return now }})
	require.NoError(t, err)
	for after, want := range map[time.Duration]ratelimit.Mode{
		-2 * time.Hour: ratelimit.On, -time.Minute: ratelimit.Shadow, 0: ratelimit.Off, time.Hour: ratelimit.On,
	} {
		now = at.Add(after)
		require.Equal(t, want, limiter.Mode(limit.For("ada")), after)
		require.Equal(t, map[bool]float64{true: 1, false: 5}[after < time.Hour], limiter.Resolve(limit.For("ada")).Capacity(), after)
	}
	shadows, err := ratelimit.New(untouched{}, ratelimit.Config{Policies: ratelimit.ShadowLimits(limit)})
	require.NoError(t, err)
	for _, c := range []struct {
		request ratelimit.Request
		want    ratelimit.Mode
	}{
		{limit.Global(), ratelimit.Shadow},
		{limit.For("ada").Plan("pro"), ratelimit.Shadow},
		{limit.For(""), ratelimit.Shadow},
		{other.Global(), ratelimit.On},
		{ratelimit.Limit{}.Global(), ratelimit.On},
	} {
		require.Equal(t, c.want, shadows.Mode(c.request), c.request)
	}
	require.Panics(t, func() { ratelimit.ShadowLimits(ratelimit.Limit{}) })
}

// The clock of the process chooses the mode of a rule, and the clock of the database its policy.
func TestTheModeByTheClockOfTheProcess(t *testing.T) {
	t.Parallel()
	limit := ratelimit.Define("limit", ratelimit.PerDay(10))
	smaller := ratelimit.TokenBucket{Rate: 3, Period: ratelimit.Day}
	for mode, allowed := range map[ratelimit.Mode]bool{ratelimit.On: false, ratelimit.Shadow: true, ratelimit.Off: true} {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			rule, err := ratelimit.NewRuling(limit, ratelimit.RulingConfig{Revisions: []ratelimit.Revision{{Mode: mode}, {EffectiveAt: at, Policy: smaller, Mode: ratelimit.On}}})
			require.NoError(t, err)
			reads := 0 // of the clock, the first by the process
			limiter, err := ratelimit.New(ratelimittest.NewDB(), ratelimit.Config{Policies: modes{"limit": rule}, NoBatching: true, AsOf: func() time.Time {
				if reads++; reads == 1 {
					return at.Add(-time.Second)
				}
				return at
			}})
			require.NoError(t, err)
			for _, call := range []func(context.Context, ...ratelimit.Request) (ratelimit.Decision, error){limiter.Check, limiter.Take} {
				reads = 0
				d, err := call(t.Context(), limit.For("ada").Cost(4))
				require.NoError(t, err)
				require.Equal(t, allowed, d.Allowed)
				require.Equal(t, mode, d.States[0].Mode)
				require.Equal(t, mode == ratelimit.Off, d.States[0].NotAsked)
				if mode != ratelimit.Off {
					require.False(t, d.States[0].Allowed)
					require.InDelta(t, 3, d.States[0].Remaining, 1e-9)
				}
			}
		})
	}
}
