package ratelimit

import (
	"fmt"
	"math"
	"math/big"
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

// TestRowsAgreeWithTheExactModel compares what random rows hold together with the sum of as many exact buckets.
func TestRowsAgreeWithTheExactModel(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		src := shrinking{t}
		limit := Define("spread", over(one(src, everyday, extreme, dyadic)(src), one(src, 2, 4, 8, 64)))
		terms := limit.termsFor("key")
		shard, period := terms.OfShard(), int64(terms.Steps)*terms.Step
		now := opening.UnixMicro() + int64(src.unit()*float64(century))
		n := big.NewRat(int64(terms.Shards), 1)
		e := exactly(limit.policy, terms.Phase)
		e.rate, e.capacity = quotient(e.rate, n), quotient(e.capacity, n)

		rows := make([]bucket.State, terms.Shards)
		sum, rounding := new(big.Rat), 0.0
		for i := range rows {
			rows[i] = bucket.State{
				Value: one(src, 0, shard.Capacity, shard.Capacity*src.unit(), -shard.MaxDebt, -shard.MaxDebt*src.unit()),
				TS:    now - int64(src.unit()*2*float64(period)/max(terms.Rate, 1)) + one(src, 0, 0, 0, minute, 2*minute+period),
			}
			row := exactBucket{value: rational(rows[i].Value), ts: rows[i].TS}
			if e.wrong(row.ts, now) {
				row.ts = e.floor(now)
			}
			row = e.settle(row, now)
			sum, rounding = total(sum, row.value), rounding+row.rounding
			rounding += 7 * left * size(row.value) // of adding up 64 rows, pair by pair
		}
		require.LessOrEqual(t, size(total(sum, negative(rational(terms.TokensOf(rows, now))))), rounding, "%v over %+v at %d", limit, rows, now)
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
