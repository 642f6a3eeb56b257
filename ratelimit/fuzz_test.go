package ratelimit

import (
	"math"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// fuzzed returns the policy with those numbers; a start of 0 is none.
func fuzzed(windows bool, rate float64, period int64, capacity, maxReserved float64, start int64) Policy {
	if !windows {
		return TokenBucket{Rate: rate, Period: time.Duration(period), Capacity: capacity, MaxReserved: maxReserved}
	}
	policy := FixedWindow{Rate: rate, Period: time.Duration(period), Capacity: capacity, MaxReserved: maxReserved}
	if start != 0 {
		policy.Start = time.UnixMicro(start)
	}
	return policy
}

// FuzzNewLimit holds every policy that NewLimit accepts to what a limit must be able to do.
func FuzzNewLimit(f *testing.F) {
	f.Add("sendMessage", false, 10.0, int64(time.Minute), 3.0, 0.0, int64(0))
	f.Add("a.b/c:d_e-f", true, 100.0, int64(time.Hour), 0.0, NoReservations, int64(1))
	f.Add("tiny", false, 1e-9, int64(time.Microsecond), 1e-9, 1e-9, int64(0))
	f.Add("huge", false, 1e12, int64(bucket.MaxSpan), 1e12, 1e12, int64(0))
	f.Add("slow", true, 1.0, int64(bucket.MaxSpan), 1.0, 1.0, bucket.MaxInstant)
	f.Add("late", true, 1.0, int64(7*time.Hour), 1.0, 1.0, int64(7*time.Hour/time.Microsecond)-1)
	f.Add("none", false, 1.0, int64(time.Second), NoCapacity, 0.0, int64(0))
	f.Add("neither", false, 1.0, int64(time.Second), NoCapacity, NoReservations, int64(0))
	f.Add("not\x00a name", true, math.NaN(), int64(-1), math.Inf(1), math.Inf(-1), bucket.MinInstant-1)
	f.Fuzz(func(t *testing.T, name string, windows bool, rate float64, period int64, capacity, maxReserved float64, start int64) {
		limit, err := NewLimit(name, fuzzed(windows, rate, period, capacity, maxReserved, start))
		if err != nil {
			require.ErrorIs(t, err, ErrInvalidLimit)
			require.Equal(t, Limit{}, limit)
			return
		}
		terms, now := limit.termsFor("key"), opening.UnixMicro()
		require.True(t, strings.HasPrefix(limit.String(), name+": "))
		require.LessOrEqual(t, limit.Capacity(), bucket.MaxTokens)
		require.GreaterOrEqual(t, limit.Capacity(), 0.0)
		begins(t, terms)
		empties(t, limit, terms, now)
		grows(t, terms, now)
	})
}

// begins checks that every instant a row may hold lies in the step that is said to hold it, and the instants before
// the first step in that one.
func begins(t require.TestingT, terms bucket.Terms) {
	require.GreaterOrEqual(t, terms.Phase, bucket.MinInstant)
	require.Less(t, terms.Phase, bucket.MinInstant+terms.Step)
	for _, now := range []int64{terms.Phase, terms.Phase + 1, -1, 0, opening.UnixMicro(), bucket.MaxInstant} {
		require.LessOrEqual(t, terms.Begin(now), now)
		require.Greater(t, terms.Begin(now), now-terms.Step)
	}
	require.Equal(t, terms.Phase, terms.Begin(bucket.MinInstant))
}

// empties checks that a limit gives all it holds, or all it may owe, and is full again within a century,
// or with the window that begins next.
func empties(t *testing.T, limit Limit, terms bucket.Terms, now int64) {
	t.Helper()
	longest := bucket.MaxSpan + time.Duration(terms.Step)*time.Microsecond
	if capacity := terms.Capacity; capacity > 0 {
		require.NoError(t, checkCost(limit, capacity, capacity))
		smallest := max(capacity*bucket.MinCostShare, bucket.MinTokens)
		require.Less(t, capacity-smallest, capacity, "the smallest cost takes something")
		empty, allowed := terms.Take(terms.Full(now), now, capacity, 0)
		require.True(t, allowed)
		require.Zero(t, empty.Value)
		require.LessOrEqual(t, terms.UntilFull(empty, now), longest)
	}
	if terms.Reserves {
		owing, allowed := terms.Take(bucket.State{TS: terms.Begin(now)}, now, terms.MaxDebt, -terms.MaxDebt)
		require.True(t, allowed)
		require.LessOrEqual(t, terms.Wait(owing, now, 0, 0), longest)
	}
}

// grows checks that no bucket is so slow beside what it holds or owes that rounding keeps it from growing.
func grows(t *testing.T, terms bucket.Terms, now int64) {
	t.Helper()
	for _, value := range []float64{0, terms.Capacity / 2, terms.Capacity * 0.99, -terms.MaxDebt} {
		if value < terms.Capacity {
			row := bucket.State{Value: value, TS: terms.Begin(now)}
			require.Greater(t, terms.Tokens(row, row.TS+terms.Step), value, "a step adds something to %v", value)
		}
	}
}

// FuzzCost holds every cost that is accepted to what a full bucket can give.
func FuzzCost(f *testing.F) {
	f.Add(false, 9.0, int64(time.Minute), 0.0, 0.0, 3.0, false)
	f.Add(false, 10.0, int64(time.Second), NoCapacity, 5.0, 0.5, true)
	f.Add(false, 1e12, int64(bucket.MaxSpan), 1.0, NoReservations, 1.0, false)
	f.Add(false, 1.0, int64(time.Second), 0.1, 0.2, 0.1+math.Nextafter(0.2, 1), true)
	f.Add(true, 7.0, int64(time.Hour), 21.0, 7.0, 28.0, true)
	f.Fuzz(func(t *testing.T, windows bool, rate float64, period int64, capacity, maxReserved, cost float64, reserve bool) {
		limit, err := NewLimit("fuzz", fuzzed(windows, rate, period, capacity, maxReserved, 0))
		if err != nil {
			return
		}
		b := ask{limit: limit, terms: limit.termsFor("key"), cost: cost}
		if checkCost(limit, cost, math.Inf(1)) != nil || b.bound(reserve) != nil {
			return
		}
		now := opening.UnixMicro()
		_, allowed := b.terms.Take(b.terms.Full(now), now, cost, b.lowest)
		require.True(t, allowed, "what is no error is allowed at least when the bucket is full")
	})
}

// FuzzKey holds every key that is accepted to what the table can store.
func FuzzKey(f *testing.F) {
	for _, key := range []string{"", "a", " a ", "A", "\x00", "a\x00b", "\xff", "é", strings.Repeat("x", 256), strings.Repeat("x", 257), strings.Repeat("é", 128)} {
		f.Add(key)
	}
	f.Fuzz(func(t *testing.T, key string) {
		request := Define("fuzz", PerSecond(1)).For(key)
		plain, err := new(Limiter).storedKey(request)
		if err != nil {
			require.ErrorIs(t, err, ErrInvalidKey)
		} else {
			require.Equal(t, key, plain)
			require.True(t, len(plain) >= 1 && len(plain) <= 256 && utf8.ValidString(plain) && !strings.Contains(plain, "\x00"))
		}
		hashing := &Limiter{config: Config{HashKey: []byte("0123456789abcdef")}}
		hashed, err := hashing.storedKey(request)
		if err != nil {
			require.ErrorIs(t, err, ErrInvalidKey)
			require.True(t, key == "" || len(key) > maxSecretBytes)
			return
		}
		require.Regexp(t, `^[A-Za-z0-9_-]{43}$`, hashed)
		require.NotEqual(t, key, hashed)
	})
}
