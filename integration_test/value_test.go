package integration_test

import (
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// springNight is shortly before the day of 23 hours in Berlin.
var springNight = time.Date(2026, 3, 28, 20, 0, 0, 0, time.UTC)

// answerable are limits of every kind but slots, and rules that make one kind of another during a history.
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

// valued are limits of every kind.
func valued(t *testing.T) (limits map[string]ratelimit.Limit, rules eraRules) {
	t.Helper()
	all, rules := answerable(t)
	limits = map[string]ratelimit.Limit{}
	for _, limit := range all[:8] {
		limits[limit.Name()] = limit
	}
	for name, policy := range map[string]ratelimit.Policy{
		"slots":       ratelimit.Concurrency{Most: 7, Lease: 40 * time.Minute},
		"owing":       ratelimit.Adaptive{Contract: ratelimit.TokenBucket{Rate: 6, Period: time.Hour, Capacity: 8, MaxReserved: 9}, Apply: true},
		"owing-days":  ratelimit.CalendarWindow{Rate: 20, Resets: ratelimit.Daily, Zone: "Europe/Berlin", MaxReserved: 15},
		"owing-none":  ratelimit.TokenBucket{Rate: 7, Period: time.Hour, MaxReserved: ratelimit.None},
		"own-windows": ratelimit.FixedWindow{Rate: 9, Period: 50 * time.Minute, MaxReserved: 9},
		"rows":        ratelimit.TokenBucket{Rate: 16, Period: 3 * time.Hour, Shards: 8, MaxReserved: 8},
	} {
		limits[name] = ratelimit.Define(name, policy)
	}
	delete(rules, "shadows")
	return limits, rules
}

// changesWithin reports whether the rule of answerable makes another kind of its limit in a span of time.
func changesWithin(from, to time.Time) bool {
	return slices.ContainsFunc([]int{4, 9, 20, 30, 45}, func(hours int) bool {
		at := springNight.Add(time.Duration(hours) * time.Hour)
		return from.Before(at) && !to.Before(at)
	})
}

// takesOrAcquires takes, or acquires slots.
func takesOrAcquires(t *testing.T, l *ratelimit.Limiter, request ratelimit.Request) ratelimit.Decision {
	t.Helper()
	if _, holds := request.Limit().Policy().(ratelimit.Concurrency); holds {
		lease, err := l.Acquire(t.Context(), request)
		require.NoError(t, err)
		return lease.Decision
	}
	d, err := l.Take(t.Context(), request)
	require.NoError(t, err)
	return d
}

// The predictions of a Value come true if no call is made meanwhile: At, RetryAfter, Take and Reserve, for every kind, also for a
// limit that a rule makes another kind. A Value uses the policy of its instant, not later ones.
func TestAValueOfEveryKindForetells(t *testing.T) {
	t.Parallel()
	calls := testsize.Of(60, 250)
	b := setup(t)
	limits, rules := valued(t)
	for name, limit := range limits {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			now, random := &clock{}, testsize.Rand(t)
			now.set(springNight)
			l := b.with(t, ratelimit.Config{AsOf: now.now, Policies: rules, NoBatching: true})
			key, refused := limit.For("key"), 0
			for i := range calls {
				if i%50 == 0 { // and an unused bucket has the Value of Full
					require.NoError(t, l.Reset(t.Context(), key))
				}
				v, err := l.Value(t.Context(), key)
				require.NoError(t, err)
				at := now.now().Add(time.Duration(random.ExpFloat64() * float64(25*time.Minute)).Truncate(time.Microsecond))
				cost := float64(1 + random.IntN(7))
				if name == "changes" && changesWithin(now.now(), at) {
					now.set(at)
					takesOrAcquires(t, l, key.Cost(cost))
					continue
				}
				where := fmt.Sprintf("call %d for %v at %v, from %v", i, cost, at, now.now())
				holds, sharded := v.At(at), name == "rows" // whose answer is an estimate if a row had enough
				wait, err := v.RetryAfter(at, cost)
				require.NoError(t, err, where)
				after, foretold := v.Take(at, cost)
				owing, reserves := v.Reserve(at, cost)

				now.set(at)
				found, err := l.Value(t.Context(), key)
				require.NoError(t, err)
				require.InDelta(t, found.Tokens, holds, 1e-9, where)
				if looked, err := l.CheckReserve(t.Context(), key.Cost(cost)); err == nil {
					require.Equal(t, looked.Allowed, reserves.Allowed, where)
					require.Equal(t, looked.RetryAfter, reserves.RetryAfter, where)
					require.True(t, looked.ReadyAt.Equal(reserves.ReadyAt), where)
				}
				if random.IntN(3) == 0 {
					if r, err := l.Reserve(t.Context(), key.Cost(cost)); err == nil {
						require.Equal(t, r.Allowed, reserves.Allowed, where)
						require.True(t, r.ReadyAt.Equal(reserves.ReadyAt), where)
						require.InDelta(t, r.States[0].Value.At(at.Add(time.Hour)), owing.At(at.Add(time.Hour)), 1e-9, where)
						continue
					}
				}
				d := takesOrAcquires(t, l, key.Cost(cost))
				require.Equal(t, fmt.Sprint(d.Allowed, d.RetryAfter), fmt.Sprint(foretold.Allowed, foretold.RetryAfter), where)
				if !sharded || !d.Allowed {
					require.Equal(t, d.ResetAfter, foretold.ResetAfter, where)
					require.InDelta(t, d.Remaining, foretold.Remaining, 1e-9, where)
					require.InDelta(t, d.States[0].Value.At(at.Add(time.Hour)), after.At(at.Add(time.Hour)), 1e-9, where)
				}
				require.Equal(t, wait, d.RetryAfter, where)
				if d.Allowed {
					continue
				}
				refused++
				if random.IntN(3) == 0 && (name != "changes" || !changesWithin(at, at.Add(d.RetryAfter))) { // RetryAfter is true
					now.set(at.Add(d.RetryAfter - time.Microsecond))
					require.False(t, takesOrAcquires(t, l, key.Cost(cost)).Allowed, where)
					now.set(at.Add(d.RetryAfter))
					require.True(t, takesOrAcquires(t, l, key.Cost(cost)).Allowed, where)
				}
			}
			require.Greater(t, refused, calls/50)
		})
	}
}

func TestThePureStepRefusesWhatIsNoCost(t *testing.T) {
	t.Parallel()
	const longest = 250 * 365 * ratelimit.Day
	limiter, clock := setup(t).stopped(t)
	value, err := limiter.Value(t.Context(), ratelimit.Define("step", ratelimit.PerSecond(5)).For("key"))
	require.NoError(t, err)
	for _, cost := range []float64{-1, math.NaN(), math.Inf(1), 6, 1e-300} {
		after, d := value.Take(clock.now(), cost)
		require.False(t, d.Allowed)
		require.Equal(t, longest, d.RetryAfter, "%v", cost)
		require.Equal(t, longest, d.States[0].RetryAfter)
		require.InDelta(t, 5, d.Remaining, 0)
		require.Equal(t, value, after)
	}
	after, d := ratelimit.Value{}.Take(clock.now(), 1)
	require.Zero(t, after)
	require.False(t, d.Allowed)
	require.Equal(t, longest, d.RetryAfter)
	require.Len(t, d.States, 1)
	require.ErrorIs(t, d.Err(), ratelimit.ErrLimited)
}

// Costs for which Reserve returns an error are refused.
func TestThePureStepRefusesWhatCannotBeReserved(t *testing.T) {
	t.Parallel()
	const longest = 250 * 365 * ratelimit.Day
	now := clockNoon
	full := ratelimit.Define("step", ratelimit.TokenBucket{Rate: 5, Period: time.Second, MaxReserved: 4}).For("key").Full(now)
	for _, cost := range []float64{-1, math.NaN(), math.Inf(1), 9.001, 1e-300} {
		after, r := full.Reserve(now, cost)
		require.False(t, r.Allowed)
		require.Equal(t, longest, r.RetryAfter, "%v", cost)
		require.True(t, r.ReadyAt.IsZero())
		require.Equal(t, full, after)
	}
	after, r := full.Reserve(now, 9)
	require.True(t, r.Allowed)
	require.InDelta(t, -4, after.Tokens, 0)
	require.Equal(t, now.Add(800*time.Millisecond), r.ReadyAt.In(now.Location()))
	require.Empty(t, r.ID)

	forbidden := ratelimit.Define("step", ratelimit.TokenBucket{Rate: 5, Period: time.Second, MaxReserved: ratelimit.NoReservations})
	_, r = forbidden.For("key").Full(now).Reserve(now, 1)
	require.Equal(t, longest, r.RetryAfter)
	_, r = ratelimit.Value{}.Reserve(now, 1)
	require.False(t, r.Allowed)
	require.Equal(t, longest, r.RetryAfter)
}

// Full equals the database's answer for a bucket without a row, with and without Shards and windows of the key.
func TestFullIsABucketThatNobodyHasUsed(t *testing.T) {
	t.Parallel()
	limiter, clock := setup(t).stopped(t)
	for name, policy := range map[string]ratelimit.Policy{
		"bucket":  ratelimit.TokenBucket{Rate: 7, Period: 3 * time.Second, Capacity: 100. / 3},
		"shards":  ratelimit.TokenBucket{Rate: 7, Period: 3 * time.Second, Shards: 8},
		"windows": ratelimit.FixedWindow{Rate: 20, Period: 7 * time.Second},
	} {
		for _, request := range []ratelimit.Request{ratelimit.Define(name, policy).For("key"), ratelimit.Define(name, policy).Global()} {
			want, err := limiter.Value(t.Context(), request)
			require.NoError(t, err)
			require.Equal(t, want, request.Cost(9).Full(clock.now()))
		}
	}
	require.Zero(t, ratelimit.Request{}.Full(clock.now()))
}
