package ratelimit

import (
	"fmt"
	"math"
	"math/big"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// over returns the policy with its bucket spread over n rows.
func over(p Policy, n int) Policy {
	switch p := p.(type) {
	case TokenBucket:
		p.Shards = n
		return p
	case FixedWindow:
		p.Shards = n
		return p
	}
	panic("no such policy")
}

// evenly returns the rows of a bucket that hold and gain as much as row does.
func evenly(row bucket.State, n int32) []bucket.State {
	return slices.Repeat([]bucket.State{{Value: row.Value / float64(n), TS: row.TS}}, int(n))
}

func TestShardsAreAPowerOfTwoUpTo64(t *testing.T) {
	t.Parallel()
	for shards, valid := range map[int]bool{
		0: true, 1: true, 2: true, 4: true, 8: true, 16: true, 32: true, 64: true,
		-1: false, -8: false, 3: false, 6: false, 63: false, 65: false, 128: false, math.MaxInt: false, math.MinInt: false,
	} {
		for _, policy := range []Policy{PerSecond(10), FixedWindow{Rate: 10, Period: time.Second}} {
			limit, err := NewLimit("spread", over(policy, shards))
			if valid {
				require.NoError(t, err)
				require.EqualValues(t, max(shards, 1), limit.terms.Shards)
				continue
			}
			require.ErrorIs(t, err, ErrInvalidLimit)
			require.EqualError(t, err, fmt.Sprintf(`ratelimit: invalid limit "spread": its Shards is %d; it must be 1, 2, 4, 8, 16, 32 or 64, so that each row's part is exact`, shards))
		}
	}
}

func TestPartsAddUpToTheWhole(t *testing.T) {
	t.Parallel()
	for _, shards := range []int{1, 2, 8, 64} {
		for _, capacity := range []float64{1, 0.1, 0.8, 1.0 / 3, 7, 100, 1e8, bucket.MinTokens} {
			whole := Define("spread", TokenBucket{Rate: 0.7, Period: time.Second, Capacity: capacity, MaxReserved: 0.3, Shards: shards}).terms
			shard, n := whole.OfShard(), float64(shards)
			require.Equal(t, whole.Capacity, shard.Capacity*n)
			require.Equal(t, whole.Rate, shard.Rate*n)
			require.Equal(t, whole.MaxDebt, shard.MaxDebt*n)
			require.EqualValues(t, 1, shard.Shards)
			require.Equal(t, shard, shard.OfShard())

			now := opening.UnixMicro()
			parts := slices.Repeat([]bucket.State{shard.Full(now)}, shards)
			require.Equal(t, capacity, whole.TokensOf(parts, now), "full rows are a full bucket")
			require.Zero(t, whole.WaitOf(parts, now, capacity, 0))
			require.True(t, whole.TakeRows(parts, now, capacity, 0), "the largest cost is given")
			require.Zero(t, whole.TokensOf(parts, now))
			wait := whole.WaitOf(parts, now, capacity, 0)
			require.Equal(t, whole.Wait(bucket.State{TS: now}, now, capacity, 0), wait)
			require.True(t, whole.TakeRows(parts, now+wait.Microseconds(), capacity, 0), "and again, when it has come")
		}
	}
}

// partsStep is one call on all rows of a bucket, and what they hold after it.
type partsStep struct {
	at      time.Duration // since opening
	cost    float64
	lowest  float64
	refused bool
	wait    time.Duration // until it is allowed, when refused
	left    []float64     // each row, as of the step
}

func TestRowsTogetherGiveWhatNoneOfThemHas(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		policy Policy
		rows   []float64 // at the opening
		steps  []partsStep
	}{
		"FromUnevenRows": {
			TokenBucket{Rate: 4, Period: time.Second, Capacity: 8, Shards: 4},
			[]float64{2, 1, 0, 0},
			[]partsStep{
				{cost: 2.5, left: []float64{0.125, 0.125, 0.125, 0.125}},
				{cost: 1, refused: true, wait: 125 * time.Millisecond, left: []float64{0.125, 0.125, 0.125, 0.125}},
				{at: 125 * time.Millisecond, cost: 1, left: []float64{0, 0, 0, 0}},
			},
		},
		"WhatAFullRowDoesNotGainTheOthersDoNotEither": {
			TokenBucket{Rate: 4, Period: time.Second, Capacity: 8, Shards: 4},
			[]float64{2, 2, 2, 0},
			[]partsStep{
				{cost: 8, refused: true, wait: 2 * time.Second, left: []float64{2, 2, 2, 0}}, // alone on one row: half a second
				{at: 2*time.Second - time.Microsecond, cost: 8, refused: true, wait: time.Microsecond, left: []float64{2, 2, 2, 1.999999}},
				{at: 2 * time.Second, cost: 8, left: []float64{0, 0, 0, 0}},
			},
		},
		"RowsFillUpOneAfterTheOther": {
			TokenBucket{Rate: 4, Period: time.Second, Capacity: 8, Shards: 4},
			[]float64{1.5, 1, 0.5, 0},
			[]partsStep{
				// 3 tokens, and 4 a second for the first half, then 3, then 2, then 1.
				{cost: 7, refused: true, wait: 1250 * time.Millisecond, left: []float64{1.5, 1, 0.5, 0}},
				{at: 1250 * time.Millisecond, cost: 7, left: []float64{0, 0, 0, 0}},
			},
		},
		"DebtIsEven": {
			TokenBucket{Rate: 2, Period: time.Second, Capacity: 2, MaxReserved: 4, Shards: 2},
			[]float64{1, 0},
			[]partsStep{
				{cost: 5, lowest: -4, left: []float64{-2, -2}},
				{cost: 1, lowest: -4, refused: true, wait: 500 * time.Millisecond, left: []float64{-2, -2}},
				{cost: 1, refused: true, wait: 2500 * time.Millisecond, left: []float64{-2, -2}},
				{at: 2500 * time.Millisecond, cost: 1, left: []float64{0, 0}},
			},
		},
		"WindowsBeginForAllRowsAtOnce": {
			FixedWindow{Rate: 4, Period: time.Minute, Start: opening, Shards: 2},
			[]float64{2, 1},
			[]partsStep{
				{at: time.Second, cost: 3.5, refused: true, wait: 59 * time.Second, left: []float64{2, 1}},
				{at: time.Second, cost: 3, left: []float64{0, 0}},
				{at: time.Minute - time.Microsecond, cost: 1, refused: true, wait: time.Microsecond, left: []float64{0, 0}},
				{at: time.Minute, cost: 4, left: []float64{0, 0}},
			},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			terms := Define("spread", test.policy).terms
			parts := make([]bucket.State, len(test.rows))
			for i, value := range test.rows {
				parts[i] = bucket.State{Value: value, TS: opening.UnixMicro()}
			}
			for i, s := range test.steps {
				now := opening.Add(s.at).UnixMicro()
				require.Equal(t, s.wait, terms.WaitOf(parts, now, s.cost, s.lowest), "step %d", i)
				require.Equal(t, !s.refused, terms.TakeRows(parts, now, s.cost, s.lowest), "step %d", i)
				left := make([]float64, len(parts))
				for j, p := range parts {
					left[j] = terms.OfShard().Tokens(p, now)
				}
				require.Equal(t, s.left, left, "step %d", i)
			}
		})
	}
}

// A row that a wrong clock left in the future counts with what it holds, and from the present.
func TestTakingTogetherMendsAWrongClock(t *testing.T) {
	t.Parallel()
	for _, policy := range []Policy{
		TokenBucket{Rate: 4, Period: time.Minute, Shards: 2},
		FixedWindow{Rate: 4, Period: time.Minute, Start: opening, Shards: 2},
	} {
		terms, now := Define("spread", policy).terms, opening.UnixMicro()
		parts := []bucket.State{{Value: 1, TS: now}, {Value: 2, TS: now + Day.Microseconds()}}
		require.Equal(t, 3.0, terms.TokensOf(parts, now))
		require.Equal(t, time.Minute, terms.WaitOf([]bucket.State{{Value: 2, TS: now}, {Value: 0, TS: now + Day.Microseconds()}}, now, 4, 0))
		require.True(t, terms.TakeRows(parts, now, 2, 0))
		require.Equal(t, evenly(bucket.State{Value: 1, TS: now}, 2), parts)
	}
}

// spread draws a bucket over several rows, with rows as they may be found, and a time.
func spread(src source, draw func(source) Policy) (b ask, parts []bucket.State, now int64) {
	limit := Define("spread", over(draw(src), one(src, 2, 4, 8, 64)))
	b = ask{limit: limit, terms: limit.termsFor("key")}
	shard, period := b.terms.OfShard(), int64(b.terms.Steps)*b.terms.Step
	now = opening.UnixMicro() + int64(src.unit()*float64(century))
	parts = make([]bucket.State, b.terms.Shards)
	for i := range parts {
		parts[i] = bucket.State{
			Value: one(src, 0, shard.Capacity, shard.Capacity*src.unit(), shard.Capacity*src.unit(), -shard.MaxDebt, -shard.MaxDebt*src.unit()),
			TS:    now - int64(src.unit()*2*float64(period)/max(b.terms.Rate, 1)) + one(src, 0, 0, 0, minute, 2*minute+period),
		}
	}
	return b, parts, now
}

// ask draws a cost for b, and sets how low it may go. It returns false when that can never be met.
func (b *ask) ask(src source, parts []bucket.State, now int64) bool {
	reserve, most := b.terms.Reserves && src.pick(3) == 0, b.terms.Capacity
	if reserve {
		most += b.terms.MaxDebt
	}
	room := b.terms.TokensOf(parts, now)
	b.cost, b.lowest = one(src, most, most*src.unit(), most*src.unit(), room, math.Nextafter(room, math.Inf(1))), 0
	return checkCost(b.limit, b.cost, most) == nil && b.bound(reserve) == nil
}

// TestPartsKeepTheirPromises holds calls on random rows to what is always true; FuzzTakeParts holds hostile ones to it.
func TestPartsKeepTheirPromises(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		src := shrinking{t}
		b, parts, now := spread(src, one(src, everyday, extreme, dyadic))
		if b.ask(src, parts, now) {
			t.Logf("%v of %#v, at least %v to remain, on %+v at %d", b.cost, b.limit.policy, b.lowest, parts, now)
			partsKeep(t, b, parts, now)
			matchesTheExactModel(t, b, parts, now)
		}
		likeOneRow(t, b, parts[0], now)
	})
}

// partsKeep checks what is always true of rows that are taken from together.
func partsKeep(t require.TestingT, b ask, parts []bucket.State, now int64) {
	sum := b.terms.TokensOf(parts, now)
	require.LessOrEqual(t, sum, b.terms.Capacity, "together no more than the capacity")
	require.LessOrEqual(t, sum, b.terms.TokensOf(parts, now+b.terms.Step), "time takes nothing away")

	wait := b.terms.WaitOf(parts, now, b.cost, b.lowest).Microseconds()
	require.GreaterOrEqual(t, wait, int64(0))
	require.LessOrEqual(t, wait, bucket.Horizon)
	mended := slices.Clone(parts) // as they will be by then
	for i := range mended {
		mended[i] = b.terms.OfShard().FixClock(parts[i], now)
	}
	if at := now + wait; wait > 0 && wait < bucket.Horizon && at <= bucket.MaxInstant {
		require.True(t, b.terms.TakeRows(slices.Clone(mended), at, b.cost, b.lowest), "allowed after the wait")
		require.False(t, b.terms.TakeRows(slices.Clone(mended), at-1, b.cost, b.lowest), "not before it")
	}

	next := slices.Clone(parts)
	allowed := b.terms.TakeRows(next, now, b.cost, b.lowest)
	require.Equal(t, sum-b.cost >= b.lowest, allowed, "refused only when they are short together")
	require.Equal(t, allowed, wait == 0)
	if !allowed {
		require.Equal(t, parts, next, "a refusal changes nothing")
		return
	}
	require.Equal(t, sum-b.cost, b.terms.TokensOf(next, now), "nothing is lost, and nothing made")
	for i := range next {
		require.Equal(t, next[0].Value, next[i].Value, "the rows are even")
		require.GreaterOrEqual(t, next[i].TS, mended[i].TS, "no instant is credited twice")
		require.False(t, b.terms.OfShard().FromFuture(next[i], now), "a wrong clock is put right")
	}
}

// matchesTheExactModel compares what the rows hold with the sum of as many exact buckets.
func matchesTheExactModel(t require.TestingT, b ask, parts []bucket.State, now int64) {
	n := int64(b.terms.Shards)
	e := exactly(b.limit.policy, b.terms.Phase)
	e.rate, e.capacity = quotient(e.rate, big.NewRat(n, 1)), quotient(e.capacity, big.NewRat(n, 1))
	sum, rounding := new(big.Rat), 0.0
	for _, s := range parts {
		row := exactBucket{value: rational(s.Value), ts: s.TS}
		if e.wrong(row.ts, now) {
			row.ts = e.floor(now)
		}
		row = e.settle(row, now)
		sum, rounding = total(sum, row.value), rounding+row.rounding
		rounding += 7 * left * size(row.value) // of adding up 64 rows, pair by pair
	}
	require.LessOrEqual(t, size(total(sum, negative(rational(b.terms.TokensOf(parts, now))))), rounding)
}

// likeOneRow checks that rows which are even decide as one does, to the last bit and the last microsecond.
func likeOneRow(t require.TestingT, b ask, row bucket.State, now int64) {
	row.Value *= float64(b.terms.Shards)
	parts := evenly(row, b.terms.Shards)
	require.Equal(t, b.terms.Tokens(b.terms.FixClock(row, now), now), b.terms.TokensOf(parts, now))
	for _, cost := range []float64{b.terms.Capacity, b.terms.Capacity / 3, b.cost} {
		require.Equal(t, b.terms.Wait(row, now, cost, b.lowest), b.terms.WaitOf(parts, now, cost, b.lowest))
		next, taken := b.terms.Take(row, now, cost, b.lowest)
		parts := slices.Clone(parts)
		require.Equal(t, taken, b.terms.TakeRows(parts, now, cost, b.lowest))
		require.Equal(t, evenly(next, b.terms.Shards), parts)
	}
}

// FuzzTakeParts holds one call on rows of two kinds to what is always true.
func FuzzTakeParts(f *testing.F) {
	const second, now = int64(time.Second), int64(1_772_409_600_000_000)
	f.Add(false, 9.0, 60*second, 0.0, 0.0, int64(0), uint8(3), 1.0, now, 0.0, now-5, now, 3.0, false)
	f.Add(false, 1.0, second, 0.8, 0.0, int64(0), uint8(3), 0.1, now, 0.1, now, now, 0.8, false)
	f.Add(false, 1.0, second, 0.1, 0.7, int64(0), uint8(6), -0.01, now, 0.001, now-60, now, 0.3, true)
	f.Add(true, 7.0, 3600*second, 21.0, 7.0, now+1, uint8(1), -3.5, now-1, 10.5, now-1, now, 7.0, true)
	f.Add(true, 1e-9, int64(1000), 1e6, 0.0, int64(0), uint8(6), 0.0, now, 1e6, bucket.MinInstant, now, 1e6, false)
	f.Add(false, 1e12, int64(bucket.MaxSpan), 1e12, 1e12, int64(0), uint8(5), -1e12, bucket.MaxInstant, 1e12, now, now, 1e12, true)
	f.Fuzz(func(t *testing.T, windows bool, rate float64, period int64, capacity, maxReserved float64, start int64, exponent uint8,
		value float64, ts int64, otherValue float64, otherTS, now int64, cost float64, reserve bool,
	) {
		const widest = 1e300 // the rows of a bucket have to add up
		limit, err := NewLimit("fuzz", over(fuzzed(windows, rate, period, capacity, maxReserved, start), 1<<(exponent%7)))
		if err != nil || !(math.Abs(value) < widest && math.Abs(otherValue) < widest) {
			return
		}
		b := ask{limit: limit, terms: limit.termsFor("key"), cost: cost}
		if checkCost(limit, cost, math.Inf(1)) != nil || b.bound(reserve) != nil {
			return
		}
		parts := make([]bucket.State, b.terms.Shards)
		for i := range parts {
			parts[i] = bucket.State{Value: value, TS: min(max(ts, bucket.MinInstant), bucket.MaxInstant)}
			if i%3 == 1 {
				parts[i] = bucket.State{Value: otherValue, TS: min(max(otherTS, bucket.MinInstant), bucket.MaxInstant)}
			}
		}
		now = min(max(now, b.terms.Phase), bucket.MaxInstant)
		if len(parts) > 1 {
			partsKeep(t, b, parts, now)
		}
		if math.Abs(parts[0].Value) > 1e-200 { // whose parts are exact
			likeOneRow(t, b, parts[0], now)
		}
	})
}

// TestShardsNeverGiveMoreThanOneRow takes from single rows and from all of them as callers do, and charges
// what they give to a bucket on one row, which must have had it.
func TestShardsNeverGiveMoreThanOneRow(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		src := shrinking{t}
		limit := Define("bound", over(valid(src, 1+float64(src.pick(50)), time.Duration(1+src.pick(100))*time.Millisecond, 1+float64(src.pick(100)), 0, everyday), one(src, 2, 8, 64)))
		terms, now := limit.termsFor("key"), opening.UnixMicro()
		shard, whole := terms.OfShard(), terms.Full(now)
		parts := evenly(whole, terms.Shards)
		for range 60 {
			now += int64(src.unit() * src.unit() * 2 * terms.Steps * float64(terms.Step))
			cost := terms.Capacity * math.Pow(src.unit(), 3)
			allowed := false
			if i := src.pick(len(parts)); cost <= shard.Capacity {
				parts[i], allowed = shard.Take(parts[i], now, cost, 0)
			}
			if !allowed {
				allowed = terms.TakeRows(parts, now, cost, 0)
			}
			if allowed {
				next, had := terms.Take(whole, now, cost, -terms.Capacity*1e-12)
				require.True(t, had, "%v of %v at %d", cost, terms.Tokens(whole, now), now)
				whole = next
			}
			require.LessOrEqual(t, terms.TokensOf(parts, now), terms.Tokens(whole, now)+terms.Capacity*1e-12)
		}
	})
}

// TestChargeParts holds what is charged to even rows to what buckets_charge.sql charges to one row.
func TestChargeParts(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		src := shrinking{t}
		b, parts, now := spread(src, one(src, everyday, extreme, dyadic))
		row := parts[0]
		row.Value *= float64(b.terms.Shards) * one(src, 1.0, 1, 3)
		parts = evenly(row, b.terms.Shards)
		amount := one(src, b.terms.Capacity, b.terms.MaxDebt) * src.unit()

		held := b.terms.Tokens(b.terms.FixClock(row, now), now)
		expected := bucket.State{Value: held - amount, TS: max(b.terms.FixClock(row, now).TS, b.terms.Begin(now))}

		b.terms.ChargeRows(parts, now, amount)
		require.Equal(t, evenly(expected, b.terms.Shards), parts)
	})
	t.Run("EvensTheRowsOut", func(t *testing.T) {
		t.Parallel()
		terms, now := Define("spread", TokenBucket{Rate: 4, Period: time.Second, Capacity: 8, Shards: 4}).terms, opening.UnixMicro()
		parts := []bucket.State{{Value: 2, TS: now}, {Value: -3, TS: now}, {Value: 0, TS: now}, {Value: 1, TS: now}}
		terms.ChargeRows(parts, now, 4)
		require.Equal(t, evenly(bucket.State{Value: -4, TS: now}, 4), parts)
	})
}

func TestValueOfAShardedBucket(t *testing.T) {
	t.Parallel()
	limit := Define("spread", TokenBucket{Rate: 4, Period: time.Second, Capacity: 8, Shards: 4})
	b, now := ask{limit: limit, terms: limit.terms}, opening.UnixMicro()
	a := answer{now: now}
	a.of(&b, []bucket.State{{Value: 2, TS: now}, {Value: 0, TS: now + Day.Microseconds()}, {Value: 2, TS: now}, {Value: 1, TS: now}})
	v := b.reading(a)
	require.Equal(t, 5.0, v.Tokens)
	require.Equal(t, 5.0, v.At(opening.Add(-time.Hour)), "instants before the reading count as it")
	require.Equal(t, 7.0, v.At(opening.Add(time.Second)), "the row with a wrong clock gains, too")
	require.Equal(t, 8.0, v.At(opening.Add(time.Hour)))
	wait, err := v.RetryAfter(opening, 7)
	require.NoError(t, err)
	require.Equal(t, time.Second, wait)
	_, err = v.RetryAfter(opening, 9)
	require.ErrorIs(t, err, ErrCostExceedsCapacity)
	require.Equal(t, 2*time.Second, b.decide(a).ResetAfter)
}
