package integration_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// valued are limits of every kind whose Value is held to what calls do, and whether each has reservations.
func valued(t *testing.T) (limits map[string]ratelimit.Limit, rules eraRules) {
	t.Helper()
	all, rules := answerable(t)
	limits = map[string]ratelimit.Limit{}
	for _, limit := range all[:8] {
		limits[limit.Name()] = limit
	}
	limits["slots"] = ratelimit.Define("slots", ratelimit.Concurrency{Most: 7, Lease: 40 * time.Minute})
	limits["owing"] = ratelimit.Define("owing", ratelimit.Adaptive{Contract: ratelimit.TokenBucket{Rate: 6, Period: time.Hour, Capacity: 8, MaxReserved: 9}, Apply: true})
	limits["owing-days"] = ratelimit.Define("owing-days", ratelimit.CalendarWindow{Rate: 20, Resets: ratelimit.Daily, Zone: "Europe/Berlin", MaxReserved: 15})
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
				holds := v.At(at)
				wait, err := v.RetryAfter(at, cost)
				require.NoError(t, err, where)
				_, foretold := v.Take(at, cost)
				_, reserves := v.Reserve(at, cost)

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
						continue
					}
				}
				d := takesOrAcquires(t, l, key.Cost(cost))
				require.Equal(t, fmt.Sprint(d.Allowed, d.RetryAfter, d.ResetAfter), fmt.Sprint(foretold.Allowed, foretold.RetryAfter, foretold.ResetAfter), where)
				require.InDelta(t, d.Remaining, foretold.Remaining, 1e-9, where)
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
			require.Greater(t, refused, calls/20)
		})
	}
}
