package integration_test

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// springNight is shortly before the day of 23 hours in Berlin.
var springNight = time.Date(2026, 3, 28, 20, 0, 0, 0, time.UTC)

// answerable are limits of every kind that a Simulation decides on, and rules that make one kind of another during a history.
func answerable(t *testing.T) (limits []ratelimit.Limit, rules eraRules) {
	t.Helper()
	bucket := ratelimit.TokenBucket{Rate: 7, Period: 90 * time.Minute, Capacity: 9}
	fixed := ratelimit.FixedWindow{Rate: 5, Period: time.Hour, Capacity: 8, Start: clockNoon}
	sliding := ratelimit.SlidingWindow{Rate: 8, Period: 2 * time.Hour, Slices: 8}
	daily := ratelimit.CalendarWindow{Rate: 30, Resets: ratelimit.Daily, Zone: "Europe/Berlin"}
	weekly := ratelimit.CalendarWindow{Rate: 60, Resets: ratelimit.Weekly, Zone: "America/New_York"}
	limits = []ratelimit.Limit{
		ratelimit.Define("bucket", bucket),
		ratelimit.Define("fixed", fixed),
		ratelimit.Define("sliding", sliding),
		ratelimit.Define("daily", daily),
		ratelimit.Define("weekly", weekly),
		ratelimit.Define("adaptive", ratelimit.Adaptive{Contract: bucket, Apply: true}),
		ratelimit.Define("adaptive-daily", ratelimit.Adaptive{Contract: daily}),
		ratelimit.Define("changes", hoard(5)),
		ratelimit.Define("shadows", hoard(5)),
	}
	at := func(hours int, policy ratelimit.Policy, change ratelimit.OnChange) ratelimit.Era {
		return ratelimit.Era{From: springNight.Add(time.Duration(hours) * time.Hour), Policy: policy, OnChange: change}
	}
	changes, err := ratelimit.NewRuling(limits[7], ratelimit.RulingConfig{Eras: []ratelimit.Era{
		{Policy: bucket},
		at(4, sliding, ratelimit.KeepTokens), at(9, daily, ratelimit.AddTokens), at(20, fixed, ratelimit.ScaleTokens),
		at(30, ratelimit.Adaptive{Contract: weekly}, ratelimit.KeepTokens), at(45, ratelimit.TokenBucket{Rate: 8, Period: time.Hour}, ratelimit.ResetTokens),
	}})
	require.NoError(t, err)
	shadows, err := ratelimit.NewRuling(limits[8], ratelimit.RulingConfig{Eras: []ratelimit.Era{
		{Policy: daily, Mode: ratelimit.Shadow}, at(12, sliding, ratelimit.KeepTokens),
	}})
	require.NoError(t, err)
	return limits, eraRules{"changes": changes, "shadows": shadows}
}

// told is what callers see of a decision.
func told(d ratelimit.Decision) (text string) {
	text = fmt.Sprintln(d.Allowed, d.RetryAfter, d.Remaining, d.ResetAfter, d.At.UnixMicro())
	for i := range d.States {
		s := &d.States[i]
		text += fmt.Sprintln(s.Allowed, s.RetryAfter, s.Remaining, s.ResetAfter, s.Mode, s.Rule, s.Price, s.NotAsked, s.Borrowed, s.Value.Tokens)
	}
	return text
}

// A Simulation, a Limiter, and a Limiter with a refusal cache give the same answers to the same calls at the same instants. The
// calls are for every kind, for several limits, and for limits that a rule makes another kind.
func TestEveryKindIsSimulatedAsItDecides(t *testing.T) {
	t.Parallel()
	calls := testsize.Of(200, 600)
	testsize.EachSeed(t, func(t *testing.T, seed uint64) {
		b, now := setup(t), &clock{}
		now.set(springNight)
		limits, rules := answerable(t)
		plain := b.with(t, ratelimit.Config{AsOf: now.now, Policies: rules, NoBatching: seed == 1})
		cached := b.with(t, ratelimit.Config{AsOf: now.now, Policies: rules, RefusalCache: 64})
		simulation, err := ratelimit.NewSimulation(ratelimit.Config{Policies: rules})
		require.NoError(t, err)
		random, refused := rand.New(rand.NewPCG(seed, 31)), 0
		for i := range calls {
			step := time.Duration(random.ExpFloat64() * float64(150*time.Second)).Truncate(time.Microsecond)
			switch random.IntN(60) {
			case 0:
				step = -time.Duration(random.IntN(59)) * time.Second
			case 1:
				step = 3 * time.Hour
			}
			now.set(now.now().Add(step))
			ask := func(prefix string) (requests []ratelimit.Request) {
				same := rand.New(rand.NewPCG(seed, uint64(i)))
				for _, j := range same.Perm(len(limits))[:1+same.IntN(3)] {
					requests = append(requests, limits[j].For(fmt.Sprint(prefix, same.IntN(2))).Cost(float64(same.IntN(5))))
				}
				if same.IntN(10) == 0 { // a tenant with days of its own, and a pool of weeks
					requests = []ratelimit.Request{ratelimit.Borrow(limits[3].For(prefix+"tenant").Cost(float64(1+same.IntN(9))), limits[4].For(prefix+"pool"))}
				}
				return requests
			}
			want, err := plain.Take(t.Context(), ask("a")...)
			require.NoError(t, err)
			got, err := simulation.Take(t.Context(), now.now(), ask("a")...)
			require.NoError(t, err)
			require.Equal(t, told(want), told(got), "call %d at %v: %v", i, now.now(), ask("a"))
			remembered, err := cached.Take(t.Context(), ask("b")...)
			require.NoError(t, err)
			requireSameAnswer(t, want, remembered, fmt.Sprintf("call %d at %v: %v", i, now.now(), ask("a")))
			if !want.Allowed {
				refused++
			}
		}
		require.Greater(t, refused, calls/40)
		require.Less(t, refused, calls*9/10)
	})
}

// requireSameAnswer checks that a decision, perhaps from the cache, equals the decision of the table. For a limit that did not
// refuse, the cache has the older value.
func requireSameAnswer(t *testing.T, want, got ratelimit.Decision, where string) {
	t.Helper()
	require.Equal(t, want.Allowed, got.Allowed, where)
	for i := range want.States {
		w, g := &want.States[i], &got.States[i]
		if !w.Allowed || want.Allowed {
			require.Equal(t, w.Allowed, g.Allowed, where)
			require.Equal(t, w.RetryAfter, g.RetryAfter, where)
			require.InDelta(t, w.Remaining, g.Remaining, 1e-9, where)
		}
	}
}
