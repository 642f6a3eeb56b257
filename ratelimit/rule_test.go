package ratelimit_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

func TestNewRulingRefusesWhatCannotBe(t *testing.T) {
	t.Parallel()
	limit := ratelimit.Define("api", ratelimit.PerMinute(10))
	later := at.Add(time.Hour)
	rows := func(rate float64, shards int) ratelimit.Policy {
		return ratelimit.TokenBucket{Rate: rate, Period: time.Minute, Shards: shards}
	}
	for name, test := range map[string]struct {
		limit ratelimit.Limit
		eras  []ratelimit.Era
		says  string
	}{
		"ZeroLimit":     {ratelimit.Limit{}, nil, "make it with Define or NewLimit"},
		"Unsorted":      {limit, []ratelimit.Era{{}, {From: later}, {From: at}}, "era 2 is from"},
		"AtOnce":        {limit, []ratelimit.Era{{}, {From: at}, {From: at}}, "sort them"},
		"BeforeTheYear": {limit, []ratelimit.Era{{}, {}}, "era 1 is from"},
		"Policy":        {limit, []ratelimit.Era{{Policy: ratelimit.PerMinute(-1)}}, "era 0: ratelimit: invalid limit"},
		"Mode":          {limit, []ratelimit.Era{{Mode: "maybe"}}, "use on, shadow or off"},
		"Change":        {limit, []ratelimit.Era{{}, {From: at, OnChange: "double"}}, "use keep, scale, add or reset"},
		"MoreShards":    {limit, []ratelimit.Era{{}, {From: at, Policy: rows(10, 4), OnChange: ratelimit.AddTokens}}, "era 1: it changes Shards from 1 to 4; keep Shards as it is, or set OnChange to reset"},
		"FewerShards":   {limit, []ratelimit.Era{{Policy: rows(10, 4)}, {From: at}}, "era 1: it changes Shards from 4 to 1"},
		"KeepOnShards":  {limit, []ratelimit.Era{{Policy: rows(10, 4)}, {From: at, Policy: rows(20, 4)}}, "era 1: it has Shards and keeps the tokens under a larger capacity; set OnChange to scale, add or reset"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := ratelimit.NewRuling(test.limit, ratelimit.RulingConfig{Name: "a rule", Eras: test.eras})
			require.ErrorIs(t, err, ratelimit.ErrInvalidRule)
			require.ErrorContains(t, err, test.says)
			require.ErrorContains(t, err, "a rule")
		})
	}
}

// Resolve returns the policy in effect at an instant. A rule without eras leaves the definition in the code in effect.
func TestResolveFollowsTheEras(t *testing.T) {
	t.Parallel()
	limit := ratelimit.Define("api", ratelimit.PerMinute(10))
	for name, test := range map[string]struct {
		eras []ratelimit.Era
		want []float64 // the capacity before noon, at noon, and an hour later
	}{
		"None":     {nil, []float64{10, 10, 10}},
		"One":      {[]ratelimit.Era{{Policy: ratelimit.PerMinute(5)}}, []float64{5, 5, 5}},
		"Change":   {[]ratelimit.Era{{}, {From: at, Policy: ratelimit.PerMinute(5)}}, []float64{10, 5, 5}},
		"AndBack":  {[]ratelimit.Era{{}, {From: at, Policy: ratelimit.PerMinute(5)}, {From: at.Add(time.Hour)}}, []float64{10, 5, 10}},
		"FromLong": {[]ratelimit.Era{{From: at.Add(time.Hour), Policy: ratelimit.PerMinute(5)}}, []float64{5, 5, 5}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			rule, err := ratelimit.NewRuling(limit, ratelimit.RulingConfig{Eras: test.eras})
			require.NoError(t, err)
			now := at
			limiter, err := ratelimit.New(untouched{}, ratelimit.Config{Policies: modes{"api": rule}, AsOf: func() time.Time { return now }})
			require.NoError(t, err)
			for i, after := range []time.Duration{-time.Microsecond, 0, time.Hour} {
				now = at.Add(after)
				require.InDelta(t, test.want[i], limiter.Resolve(limit.For("ada")).Capacity(), 0)
			}
		})
	}
}

// A guard asks for the mode of a limit that it cannot ask, as for a request without a key.
func TestModeFollowsTheErasAndThePause(t *testing.T) {
	t.Parallel()
	limit, other := ratelimit.Define("api", ratelimit.PerSecond(1)), ratelimit.Define("other", ratelimit.PerSecond(1))
	at := time.Date(2026, time.March, 9, 10, 0, 0, 0, time.UTC)
	rule, err := ratelimit.NewRuling(limit, ratelimit.RulingConfig{
		Eras: []ratelimit.Era{{Mode: ratelimit.Shadow}, {From: at, Mode: ratelimit.Off}, {From: at.Add(time.Hour)}}, PausedUntil: at.Add(-time.Hour),
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

// A rule that makes tokens of slots makes Acquire fail before any SQL, also beside slots of other limits: a mutex must not allow
// two holders. A limit that is off needs no slot, under any policy.
func TestAcquireWhereARuleMakesTokensOfSlots(t *testing.T) {
	t.Parallel()
	mutex, other := ratelimit.Define("mutex", ratelimit.Concurrency{Most: 1}), ratelimit.Define("other", ratelimit.Concurrency{Most: 5})
	tokens := ratelimit.PerSecond(100)
	for name, test := range map[string]struct {
		era     ratelimit.Era
		allowed bool
	}{
		"Enforced": {ratelimit.Era{Policy: tokens}, false},
		"Shadow":   {ratelimit.Era{Policy: tokens, Mode: ratelimit.Shadow}, false},
		"Adaptive": {ratelimit.Era{Policy: ratelimit.Adaptive{Contract: tokens}}, false},
		"Sliding":  {ratelimit.Era{Policy: ratelimit.SlidingWindow{Rate: 1, Period: time.Minute}}, false},
		"Off":      {ratelimit.Era{Policy: tokens, Mode: ratelimit.Off}, true},
		"Slots":    {ratelimit.Era{Policy: ratelimit.Concurrency{Most: 2}}, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			rule, err := ratelimit.NewRuling(mutex, ratelimit.RulingConfig{Eras: []ratelimit.Era{test.era}})
			require.NoError(t, err)
			var pool ratelimit.Pool = untouched{t: t}
			if test.allowed {
				pool = ratelimittest.NewDB()
			}
			limiter := newLimiter(t, pool, ratelimit.Config{Policies: modes{"mutex": rule}})
			for _, requests := range [][]ratelimit.Request{{mutex.For("ada")}, {other.For("ada"), mutex.For("ada")}} {
				lease, err := limiter.Acquire(t.Context(), requests...)
				if test.allowed {
					require.NoError(t, err)
					require.True(t, lease.Allowed)
					continue
				}
				require.ErrorIs(t, err, ratelimit.ErrInvalidRequest)
				require.ErrorContains(t, err, `acquire of "mutex"`)
			}
		})
	}
}
