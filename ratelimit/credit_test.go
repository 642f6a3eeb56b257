package ratelimit

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// TestACreditIsWorthTheSameLater holds a credit, which leaves ts as it is, to one that first brings the bucket to
// the present: at every later instant both give the same, and do under a rate, a capacity and a kind that the
// limit has only then, where the older one would have had them from the start.
func TestACreditIsWorthTheSameLater(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		src := shrinking{t}
		draw := one(src, everyday, dyadic)
		limit := Define("credited", over(draw(src), one(src, 1, 1, 2, 8)))
		b := ask{limit: limit, terms: limit.termsFor("key")}
		shard, period := b.terms.OfShard(), int64(b.terms.Steps)*b.terms.Step
		now := opening.UnixMicro() + int64(src.unit()*float64(century))
		rows := make([]bucket.State, b.terms.Shards)
		for i := range rows {
			rows[i] = bucket.State{
				Value: one(src, 0, shard.Capacity, shard.Capacity*src.unit(), -shard.MaxDebt*src.unit()),
				TS:    shard.Begin(now - int64(src.unit()*2*float64(period)) + one(src, 0, 0, 0, minute, 2*minute+period)),
			}
		}
		before, amount := slices.Clone(rows), src.unit()*one(src, 1, 0.1, 2)*(b.terms.Capacity+1)
		b.terms.CreditRows(rows, now, amount, 0)

		tolerance := 1e-9 * (b.terms.Capacity + b.terms.MaxDebt + amount + 1)
		require.InDelta(t, min(b.terms.Capacity, b.terms.TokensOf(before, now)+amount), b.terms.TokensOf(rows, now), tolerance)
		for i, s := range rows {
			mended := shard.FixClock(before[i], now)
			require.Equal(t, mended.TS, s.TS, "no time is credited")
			require.GreaterOrEqual(t, s.Value, before[i].Value)
			require.LessOrEqual(t, s.Value, max(shard.Capacity, before[i].Value))
			given := s.Value - before[i].Value
			present := bucket.State{Value: min(shard.Capacity, shard.Tokens(mended, now)+given), TS: max(mended.TS, shard.Begin(now))}
			later := now + int64(src.unit()*3*float64(period))
			require.InDelta(t, shard.Tokens(present, later), shard.Tokens(s, later), tolerance)

			then := over(draw(src), 1).(interface{ compile() (bucket.Terms, error) })
			changed, err := then.compile()
			require.NoError(t, err)
			changed = Limit{name: "credited", terms: changed}.termsFor("key")
			want := min(changed.Capacity, changed.Tokens(mended, later)+given)
			require.LessOrEqual(t, changed.Tokens(s, later), want+tolerance+1e-9*changed.Capacity, "no more than a credit at that moment")
		}
	})
}

func TestACreditGoesToTheRowsThatHaveRoom(t *testing.T) {
	t.Parallel()
	now := opening.UnixMicro()
	spread := Define("spread", TokenBucket{Rate: 4, Period: time.Second, Capacity: 8, Shards: 4}).terms
	for name, test := range map[string]struct {
		rows         []bucket.State
		amount, most float64
		values       []float64
	}{
		"EvenlyWhereAllHaveRoom":      {[]bucket.State{{Value: 0, TS: now}, {Value: -1, TS: now}, {Value: 0.5, TS: now}, {Value: 1, TS: now}}, 2, 0, []float64{0.5, -0.5, 1, 1.5}},
		"TheRestWhereThereIsMore":     {[]bucket.State{{Value: 2, TS: now}, {Value: 1.75, TS: now}, {Value: 0, TS: now}, {Value: 2, TS: now}}, 2, 0, []float64{2, 2, 1.75, 2}},
		"FullIsFullWithWhatArrived":   {[]bucket.State{{Value: 0, TS: now - 60e6}, {Value: 0, TS: now}, {Value: 2, TS: now}, {Value: 2, TS: now}}, 2, 0, []float64{0, 2, 2, 2}},
		"NoMoreThanTheCapacity":       {[]bucket.State{{Value: 2, TS: now}, {Value: 1, TS: now}, {Value: 2, TS: now}, {Value: 2, TS: now}}, 8, 0, []float64{2, 2, 2, 2}},
		"AsFarAsItWasWhenItWasTaken":  {[]bucket.State{{Value: 2, TS: now}, {Value: 1, TS: now}, {Value: 2, TS: now}, {Value: 2, TS: now}}, 4, 12, []float64{2.75, 2.75, 2.75, 2.75}},
		"WhatIsAboveTheCapacityStays": {[]bucket.State{{Value: 5, TS: now}, {Value: 1, TS: now}, {Value: 2, TS: now}, {Value: 2, TS: now}}, 1, 0, []float64{5, 2, 2, 2}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			before := slices.Clone(test.rows)
			spread.CreditRows(test.rows, now, test.amount, test.most)
			for i, s := range test.rows {
				require.Equal(t, bucket.State{Value: test.values[i], TS: before[i].TS}, s, "row %d of %v", i, test.rows)
			}
		})
	}
}
