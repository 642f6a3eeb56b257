package bucket_test

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
	"github.com/pgratelimit/pgratelimit/internal/engine/bucket/buckettest"
)

// TestInvariants checks the invariants with random calls on random rows; FuzzTake checks them with hostile ones.
func TestInvariants(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		src := shrinking{t}
		terms := buckettest.One(src, buckettest.Everyday, buckettest.Extreme, buckettest.Dyadic)(src)
		begins(t, terms)
		empties(t, terms, opening)
		grows(t, terms, opening)
		for range 10 {
			row, now := rowOf(src, terms)
			lowest := -terms.MaxOwed * float64(src.Pick(2))
			most, room := terms.Capacity-lowest, buckettest.Tokens(terms, row, now)
			cost := max(0, buckettest.One(src, most, most*src.Unit(), most*src.Unit(), room, math.Nextafter(room, math.Inf(1))))
			if buckettest.Possible(terms, cost, lowest) {
				t.Logf("%v of %+v, at least %v to remain, on %+v at %d", cost, terms, lowest, row, now)
				holds(t, terms, row, now, now+int64(src.Unit()*5*float64(buckettest.Period(terms))))
				takes(t, terms, row, now, cost, lowest)
			}
		}
	})
}

// FuzzTake checks the invariants with one call, under any valid terms and any state of rows of two kinds.
func FuzzTake(f *testing.F) {
	const second, longest, now, one = int64(1e6), century, opening, uint8(0) // one row
	f.Add(false, 9.0, 60*second, 9.0, 1e12, int64(0), 0.0, now, now, int64(1), 3.0, false)
	f.Add(false, 10.0, second, 0.0, 5.0, int64(0), -5.0, now, now, int64(1e6), 0.5, true)
	f.Add(false, 1e12, int64(1), 1e12, 1e12, int64(0), -1e12, now, now, int64(1), 1e12, true)
	f.Add(false, 1e-9, longest, 1e-9, 1e-9, int64(0), -1e-9, bucket.MinInstant, now, int64(1e18), 1e-9, true)
	f.Add(false, 1e12, longest, 1.0, 0.0, int64(0), 1.0, bucket.MaxInstant, now, int64(60_000_001), 1.0, false)
	f.Add(false, 1.0, second, 3.0, 0.0, int64(0), math.MaxFloat64, bucket.MinInstant, bucket.MaxInstant, int64(0), 3.0, false)
	f.Add(true, 7.0, 3600*second, 21.0, 7.0, now+1, -7.0, now-1, now, int64(3_600_000_000), 7.0, true)
	f.Add(true, 7.0, longest, 7.0, 7.0, int64(-1), 5e-324, now+longest, now, int64(1), 7.0, false)
	f.Add(true, 1e-9, int64(1), 1e6, 0.0, int64(0), -math.MaxFloat64, now, now, int64(1), 1e-6, true)
	f.Add(false, 1.0, second, 0.1, 0.2, int64(0), -0.2, now, now, int64(1), 0.1+math.Nextafter(0.2, 1), true)
	f.Add(false, 1.0, second, 0.1, 0.2, int64(0), -1e300, bucket.MinInstant, now, int64(1), 0.1, false)
	f.Add(true, 7.0, 3600*second, 7.0, 0.0, int64(0), 3.0, bucket.MinInstant, bucket.MinInstant, int64(1), 2.0, false)
	f.Add(true, 7.0, longest, 7.0, 7.0, int64(-1), -91.0, int64(4928169600000060), now, int64(1), 0.875, true)
	f.Fuzz(func(t *testing.T, fixed bool, rate float64, period int64, capacity, maxOwed float64, start int64,
		value float64, ts, now, later int64, cost float64, reserve bool,
	) {
		terms, ok := fuzzed(fixed, rate, period, capacity, maxOwed, start)
		if !ok || math.IsNaN(value) || math.IsInf(value, 0) {
			return
		}
		lowest := 0.0
		if reserve {
			lowest = -maxOwed
		}
		if !buckettest.Possible(terms, cost, lowest) {
			return
		}
		row := bucket.State{Value: value, TS: min(max(ts, terms.Phase), bucket.MaxInstant), Capacity: terms.Capacity} // no step begins before the phase
		now = min(max(now, bucket.MinInstant), bucket.MaxInstant)
		empties(t, terms, now)
		grows(t, terms, now)
		holds(t, terms, row, now, min(now+max(later, 0), bucket.MaxInstant))
		takes(t, terms, row, now, cost, lowest)
	})
}

// fuzzed returns the terms with those numbers, periods in microseconds, and whether there are such.
func fuzzed(fixed bool, rate float64, period int64, capacity, maxOwed float64, start int64) (bucket.Terms, bool) {
	if period < 1 || period > century {
		return bucket.Terms{}, false
	}
	terms := buckettest.TokenBucket(rate, time.Duration(period)*time.Microsecond, capacity)
	if fixed {
		terms = buckettest.FixedWindow(rate, time.Duration(period)*time.Microsecond, capacity, min(max(start, bucket.MinInstant), bucket.MaxInstant))
	}
	terms.MaxOwed = maxOwed
	return terms, buckettest.Valid(terms)
}

// begins checks that each possible instant of a row lies in the step that Begin returns, and that instants before the
// first step count to the first.
func begins(t require.TestingT, terms bucket.Terms) {
	require.GreaterOrEqual(t, terms.Phase, bucket.MinInstant)
	require.Less(t, terms.Phase, bucket.MinInstant+terms.Step)
	for _, now := range []int64{terms.Phase, terms.Phase + 1, -1, 0, opening, bucket.MaxInstant} {
		require.LessOrEqual(t, terms.Begin(now), now)
		require.Greater(t, terms.Begin(now), now-terms.Step)
	}
	require.Equal(t, terms.Phase, terms.Begin(bucket.MinInstant))
}

// empties checks that a bucket gives all it holds, or all it may owe, and is full again within a century, or with the
// window that begins next.
func empties(t require.TestingT, terms bucket.Terms, now int64) {
	longest := bucket.MaxSpan + time.Duration(terms.Step)*time.Microsecond
	smallest := max(terms.Capacity*bucket.MinCostShare, bucket.MinTokens)
	require.Less(t, terms.Capacity-smallest, terms.Capacity, "the smallest cost takes something")
	empty, allowed := buckettest.Take(terms, terms.Full(now), now, terms.Capacity, 0)
	require.True(t, allowed)
	require.Zero(t, empty.Value)
	require.LessOrEqual(t, buckettest.UntilFull(terms, empty, now), longest)
	owing, allowed := buckettest.Take(terms, empty, now, terms.MaxOwed, -terms.MaxOwed)
	require.True(t, allowed)
	require.LessOrEqual(t, buckettest.Wait(terms, owing, now, 0, 0), longest)
}

// grows checks that rounding never keeps a bucket from growing, however slow its rate is beside its value.
func grows(t require.TestingT, terms bucket.Terms, now int64) {
	begin := terms.Begin(now)
	for _, value := range []float64{0, terms.Capacity / 2, terms.Capacity * 0.99, -terms.MaxOwed} {
		if value < terms.Capacity {
			row := bucket.State{Value: value, TS: begin}
			require.Greater(t, buckettest.Tokens(terms, row, begin+terms.Step), value, "a step adds something to %v", value)
		}
	}
}

// holds checks what a row holds at now and later.
func holds(t require.TestingT, terms bucket.Terms, row bucket.State, now, later int64) {
	fixed := terms.FixClock(row, now)
	tokens := buckettest.Tokens(terms, fixed, now)
	require.LessOrEqual(t, tokens, terms.Capacity, "never more than the capacity")
	require.GreaterOrEqual(t, tokens, min(row.Value, terms.Capacity), "time takes nothing away")
	require.GreaterOrEqual(t, buckettest.Tokens(terms, fixed, later), tokens, "time takes nothing away")
	require.LessOrEqual(t, buckettest.Tokens(terms, fixed, later), terms.Capacity, "never more than the capacity")
	full := buckettest.UntilFull(terms, fixed, now)
	require.GreaterOrEqual(t, full, time.Duration(0))
	if at := now + full.Microseconds(); full.Microseconds() < bucket.Horizon && at <= bucket.MaxInstant {
		require.Equal(t, terms.Capacity, buckettest.Tokens(terms, fixed, at), "full when it is said to be")
	}
}

// takes checks a take from a row, and the wait for it, which is sufficient and not a microsecond too long.
func takes(t require.TestingT, terms bucket.Terms, row bucket.State, now int64, cost, lowest float64) {
	_, allowed := buckettest.Take(terms, terms.Full(now), now, cost, lowest)
	require.True(t, allowed, "what is possible is allowed at least when the bucket is full")
	tokens := buckettest.Tokens(terms, row, now)
	require.LessOrEqual(t, tokens, terms.Capacity, "no more than the capacity")
	require.LessOrEqual(t, tokens, buckettest.Tokens(terms, row, now+terms.Step), "time takes nothing away")

	wait := buckettest.Wait(terms, row, now, cost, lowest).Microseconds()
	require.GreaterOrEqual(t, wait, int64(0))
	require.LessOrEqual(t, wait, bucket.Horizon)
	if terms.Step < bucket.Horizon/25 && row.Value >= -terms.MaxOwed && !terms.FromFuture(row, now) {
		require.Less(t, wait, bucket.Horizon, "what the policy itself can lead to ends before the horizon")
	}
	fixed := terms.FixClock(row, now) // as it will be by then
	if at := now + wait; wait > 0 && wait < bucket.Horizon && at <= bucket.MaxInstant {
		_, allowed = buckettest.Take(terms, fixed, at, cost, lowest)
		require.True(t, allowed, "allowed after the wait")
		_, allowed = buckettest.Take(terms, fixed, at-1, cost, lowest)
		require.False(t, allowed, "not before it")
	}

	next, allowed := buckettest.Take(terms, row, now, cost, lowest)
	require.Equal(t, tokens-cost >= lowest, allowed, "refused only when it is short")
	require.Equal(t, allowed, wait == 0)
	if !allowed {
		require.Equal(t, row, next, "a refusal changes nothing")
		return
	}
	require.Equal(t, tokens-cost, buckettest.Tokens(terms, next, now), "nothing is lost, and nothing made")
	require.GreaterOrEqual(t, next.TS, fixed.TS, "no instant is credited twice")
	require.False(t, terms.FromFuture(next, now), "a wrong clock is put right")
	require.LessOrEqual(t, next.TS, bucket.MaxInstant, "a row can hold the ts")
	require.GreaterOrEqual(t, next.TS, bucket.MinInstant, "a row can hold the ts")
}

// TestAdmissionBound promises the purpose of a limit: in any span t, for any requests, no more than capacity + rate * t
// / period is taken.
func TestAdmissionBound(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		src := shrinking{t}
		terms := buckettest.TokenBucket(float64(1+src.Pick(50)), time.Duration(1+src.Pick(100))*time.Millisecond, 1+float64(src.Pick(100)))
		now := opening
		row := terms.Full(now)
		type taken struct {
			at   int64
			cost float64
		}
		var all []taken
		for range 60 {
			now += int64(src.Unit() * src.Unit() * 2 * terms.Steps)
			cost := terms.Capacity * math.Pow(src.Unit(), 3)
			next, allowed := buckettest.Take(terms, row, now, cost, 0)
			if row = next; allowed {
				all = append(all, taken{now, cost})
			}
		}
		for i := range all {
			sum := 0.0
			for _, last := range all[i:] {
				sum += last.cost
				bound := terms.Capacity + terms.Rate*float64(last.at-all[i].at)/terms.Steps
				require.LessOrEqual(t, sum, bound*(1+1e-12))
			}
		}
	})
}

const (
	opening = buckettest.Opening
	minute  = buckettest.Minute
	day     = buckettest.Day
	century = buckettest.Century
)

// shrinking makes rapid a source, so that what fails is shrunk to something short.
type shrinking struct{ *rapid.T }

// Pick returns a number from 0 up to n-1.
func (s shrinking) Pick(n int) int { return rapid.IntRange(0, n-1).Draw(s.T, "pick") }

// Unit returns a number from 0 to 1.
func (s shrinking) Unit() float64 {
	return float64(rapid.IntRange(0, 1<<20).Draw(s.T, "unit")) / (1 << 20)
}

// rowOf draws a row as it may be found, and a time.
func rowOf(src shrinking, terms bucket.Terms) (row bucket.State, now int64) {
	period := buckettest.Period(terms)
	now = opening + int64(src.Unit()*float64(century))
	return bucket.State{
		Value:    buckettest.One(src, 0, terms.Capacity, terms.Capacity*src.Unit(), terms.Capacity*src.Unit(), -terms.MaxOwed, -terms.MaxOwed*src.Unit()),
		Capacity: terms.Capacity,
		TS:       now - int64(src.Unit()*2*float64(period)/max(terms.Rate, 1)) + buckettest.One(src, 0, 0, 0, minute, 2*minute+period),
	}, now
}
