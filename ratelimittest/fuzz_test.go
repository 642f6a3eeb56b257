package ratelimittest_test

import (
	"context"
	"errors"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

// numbers are what policies of any kind are made of.
type numbers struct {
	rate, capacity, maxReserved float64
	period, span                int64 // nanoseconds
	whole, month                int
	word, zone                  string
}

// policyKinds is how many policies numbers make.
const policyKinds = 8

// policy returns the policy of a kind with those numbers.
func (n numbers) policy(kind uint8) ratelimit.Policy {
	period, span := time.Duration(n.period), time.Duration(n.span)
	switch kind % policyKinds {
	case 0:
		return ratelimit.TokenBucket{Rate: n.rate, Period: period, Capacity: n.capacity, MaxReserved: n.maxReserved, Shards: n.whole}
	case 1:
		return ratelimit.TokenBucket{Rate: n.rate, Period: period, Capacity: n.capacity, MaxReserved: n.maxReserved}
	case 2:
		return ratelimit.FixedWindow{Rate: n.rate, Period: period, Capacity: n.capacity, MaxReserved: n.maxReserved, Shards: n.whole}
	case 3:
		return ratelimit.FixedWindow{Rate: n.rate, Period: period, Capacity: n.capacity, Start: time.UnixMicro(n.span)}
	case 4:
		return ratelimit.SlidingWindow{Rate: n.rate, Period: period, Slices: n.whole}
	case 5:
		return ratelimit.CalendarWindow{
			Rate: n.rate, Resets: ratelimit.Calendar(n.word), Zone: n.zone, FirstWeekday: time.Weekday(n.whole), FirstDay: n.whole,
			FirstMonth: time.Month(n.month), MaxReserved: n.maxReserved,
		}
	case 6:
		return ratelimit.Concurrency{Slots: n.whole, Lease: span}
	default:
		return []ratelimit.Policy{nil, (*ratelimit.TokenBucket)(nil), (*ratelimit.CalendarWindow)(nil)}[kind/policyKinds%3]
	}
}

// isRefusalOfInput reports whether err rejects a request, with a documented type of error.
func isRefusalOfInput(err error) bool {
	for _, known := range []error{
		ratelimit.ErrInvalidLimit, ratelimit.ErrInvalidKey, ratelimit.ErrInvalidCost, ratelimit.ErrCostExceedsCapacity, ratelimit.ErrInvalidRequest,
		ratelimit.ErrNoReservations, ratelimit.ErrNotReserved, ratelimit.ErrReservationEnded, ratelimit.ErrLeaseLost, ratelimit.ErrInvalidLease,
	} {
		if errors.Is(err, known) {
			return true
		}
	}
	return false
}

// FuzzPolicies checks the promise of every policy, of any kind with any numbers. NewLimit returns an error, or a limit
// whose full bucket gives the tokens that Check reports, refuses with a wait when it is empty, and gives again after
// that wait.
func FuzzPolicies(f *testing.F) {
	minute, century := int64(time.Minute), int64(36525*ratelimit.Day)
	for kind := range uint8(5 * policyKinds) {
		f.Add(kind, 10.0, 10.0, 0.0, minute, int64(time.Second), 2, 3, "month", "Europe/Berlin", 3.0)
	}
	f.Add(uint8(0), 1e12, 1e12, 1e12, int64(1000), int64(0), 64, 0, "", "", 1e12)
	f.Add(uint8(1), 1e-9, ratelimit.None, ratelimit.NoReservations, century, int64(0), 0, 0, "", "", 1e-9)
	f.Add(uint8(1), math.NaN(), math.Inf(1), math.Inf(-1), int64(math.MinInt64), int64(math.MaxInt64), math.MinInt, -1, "day", "", math.NaN())
	f.Add(uint8(2), 100.0, 250.0, 7.0, minute, int64(0), 8, 0, "", "", 40.0)
	f.Add(uint8(3), 0x1p63, -1.0, 0.0, century+1, int64(math.MinInt64), -1, 0, "", "", math.Inf(1))
	f.Add(uint8(4), 7.0, 0.0, 0.0, int64(12*time.Second), int64(0), 128, 0, "", "", 0.25)
	f.Add(uint8(5), 1000.0, 0.0, 0.0, int64(0), int64(0), 31, 12, "year", "America/Santiago", 1000.0)
	f.Add(uint8(5), 1000.0, 0.0, ratelimit.None, int64(0), int64(0), 6, 0, "week", "Nowhere/Land", 1.0)
	f.Add(uint8(6), 0.0, 0.0, 0.0, int64(0), int64(time.Millisecond), 1000, 0, "", "", 1000.0)
	f.Add(uint8(6), 0.0, 0.0, 0.0, int64(0), int64(time.Millisecond), 1000, 0, "", "", 0.0)
	f.Fuzz(func(t *testing.T, kind uint8, rate, capacity, maxReserved float64, period, span int64, whole, month int, word, zone string, cost float64) {
		n := numbers{rate, capacity, maxReserved, period, span, whole, month, word, zone}
		policy := n.policy(kind)
		limit, err := ratelimit.NewLimit("fuzz", policy)
		if err != nil {
			require.ErrorIs(t, err, ratelimit.ErrInvalidLimit)
			require.Equal(t, ratelimit.Limit{}, limit)
			return
		}
		require.NotEmpty(t, limit.String())
		require.True(t, limit.Capacity() >= 0 && limit.Capacity() <= 1e12, "%v", limit.Capacity())
		clock := ratelimittest.NewClock()
		limiter := ratelimittest.New(t, clock)
		request := limit.For("key").Cost(cost)
		_, holds := policy.(ratelimit.Concurrency)
		take := func(ctx context.Context) (ratelimit.Decision, error) {
			if holds {
				lease, err := limiter.Acquire(ctx, request)
				return lease.Decision, err
			}
			return limiter.Take(ctx, request)
		}
		said, err := limiter.Check(t.Context(), request)
		told, takeErr := take(t.Context())
		if holds && cost == 0 && err == nil { // which is a look, and no lease
			require.ErrorIs(t, takeErr, ratelimit.ErrInvalidCost)
			return
		}
		require.Equal(t, err == nil, takeErr == nil, "%v and %v", err, takeErr)
		if err != nil {
			require.True(t, isRefusalOfInput(err), "%v", err)
			require.True(t, isRefusalOfInput(takeErr), "%v", takeErr)
			return
		}
		require.True(t, said.Allowed && told.Allowed, "a full bucket gives what is no error: %v", told)
		for range 3 {
			require.True(t, told.Remaining >= 0 && told.Remaining <= limit.Capacity(), "%v remain", told.Remaining)
			require.GreaterOrEqual(t, told.ResetAfter, time.Duration(0))
			require.Equal(t, told.Allowed, told.RetryAfter == 0, "%v", told.RetryAfter)
			if told, err = take(t.Context()); !told.Allowed {
				break
			}
		}
		require.NoError(t, err)
		if told.Allowed || whole > 1 && !holds || told.RetryAfter > 200*365*ratelimit.Day {
			return // no tokens arrive in full rows, so the wait over several rows is only a lower bound
		}
		clock.Advance(told.RetryAfter)
		again, err := take(t.Context())
		require.NoError(t, err)
		require.True(t, again.Allowed, "who waits %v is let through, and not told %v", told.RetryAfter, again.RetryAfter)
	})
}
