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
		"Change":        {limit, []ratelimit.Era{{}, {From: at, OnChange: "double"}}, "use carry, keep, scale, add or reset"},
		"MoreShards":    {limit, []ratelimit.Era{{}, {From: at, Policy: rows(10, 4), OnChange: ratelimit.AddTokens}}, "era 1: it changes Shards from 1 to 4; keep Shards as it is, or set OnChange to reset"},
		"FewerShards":   {limit, []ratelimit.Era{{Policy: rows(10, 4)}, {From: at}}, "era 1: it changes Shards from 4 to 1"},
		"KeepOnShards":  {limit, []ratelimit.Era{{Policy: rows(10, 4)}, {From: at, Policy: rows(20, 4)}}, "era 1: it has Shards and keeps the tokens under a larger capacity; set OnChange to carry, scale, add or reset"},
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

// Mode and Resolve follow the eras and the pause. Mode also answers for a request without a key.
func TestModeFollowsTheErasAndThePause(t *testing.T) {
	t.Parallel()
	limit, other := ratelimit.Define("api", ratelimit.PerSecond(1)), ratelimit.Define("other", ratelimit.PerSecond(1))
	at := time.Date(2026, time.March, 9, 10, 0, 0, 0, time.UTC)
	rule, err := ratelimit.NewRuling(limit, ratelimit.RulingConfig{
		Eras:        []ratelimit.Era{{Mode: ratelimit.Shadow}, {From: at, Mode: ratelimit.Off}, {From: at.Add(time.Hour), Policy: ratelimit.PerSecond(5)}},
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

// The clock of the database chooses the mode of a rule, where it differs from the clock of the process. A call that is impossible in
// this mode fails.
func TestTheModeByTheDatabasesClock(t *testing.T) {
	t.Parallel()
	limit := ratelimit.Define("limit", ratelimit.PerDay(10))
	smaller := ratelimit.TokenBucket{Rate: 3, Period: ratelimit.Day, MaxReserved: ratelimit.None}
	for name, c := range map[string]struct {
		byProcess, byDatabase ratelimit.Era
		want                  error
	}{
		"On":        {ratelimit.Era{Mode: ratelimit.Shadow}, ratelimit.Era{Mode: ratelimit.On}, nil},
		"Off":       {ratelimit.Era{}, ratelimit.Era{Mode: ratelimit.Off}, nil},
		"TooCostly": {ratelimit.Era{Mode: ratelimit.Shadow}, ratelimit.Era{Policy: smaller}, ratelimit.ErrCostExceedsCapacity},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c.byDatabase.From = at
			rule, err := ratelimit.NewRuling(limit, ratelimit.RulingConfig{Eras: []ratelimit.Era{c.byProcess, c.byDatabase}})
			require.NoError(t, err)
			reads := 0 // of the clock, the first by the process
			limiter, err := ratelimit.New(ratelimittest.NewDB(), ratelimit.Config{Policies: modes{"limit": rule}, NoBatching: true, AsOf: func() time.Time {
				if reads++; reads == 1 {
					return at.Add(-time.Second)
				}
				return at
			}})
			require.NoError(t, err)
			taking := func(ctx context.Context, requests ...ratelimit.Request) (r ratelimit.Reservation, err error) {
				r.Decision, err = limiter.Take(ctx, requests...)
				return r, err
			}
			for i, call := range []func(context.Context, ...ratelimit.Request) (ratelimit.Reservation, error){taking, limiter.Reserve, limiter.CheckReserve} {
				reads = 0
				r, err := call(t.Context(), limit.For("ada").Cost(4))
				require.ErrorIs(t, err, c.want, "call %d", i)
				if err == nil {
					require.True(t, r.Allowed, "call %d", i)
					require.Equal(t, c.byDatabase.Mode, r.States[0].Mode, "call %d", i)
				}
			}
		})
	}
}

// rulings are the answers of a source to its requests, one after the other.
type rulings []*ratelimit.Ruling

func (r *rulings) RulingFor(ratelimit.Limit, string, string) *ratelimit.Ruling {
	next := (*r)[0]
	*r = (*r)[1:]
	return next
}
func (*rulings) RulingsOf(string) []*ratelimit.Ruling { return nil }

// A call that asks the database for its time, because its limit is about to be off no more, goes by the rule of after the answer.
func TestARuleThatChangesWhileTheClockIsRead(t *testing.T) {
	t.Parallel()
	limit := ratelimit.Define("limit", ratelimit.PerDay(10))
	soon := time.Now().Add(30 * time.Second)
	off, err := ratelimit.NewRuling(limit, ratelimit.RulingConfig{Eras: []ratelimit.Era{{Mode: ratelimit.Off}, {From: soon}}})
	require.NoError(t, err)
	smaller, err := ratelimit.NewRuling(limit, ratelimit.RulingConfig{Eras: []ratelimit.Era{{Policy: ratelimit.PerDay(3)}}})
	require.NoError(t, err)
	limiter, err := ratelimit.New(ratelimittest.NewDB(), ratelimit.Config{Policies: &rulings{off, smaller}})
	require.NoError(t, err)
	_, err = limiter.Take(t.Context(), limit.For("ada").Cost(4))
	require.ErrorIs(t, err, ratelimit.ErrCostExceedsCapacity)
}
