package ratelimit

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
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
		part, period := b.terms.part(), int64(b.terms.steps)*b.terms.step
		now := opening.UnixMicro() + int64(src.unit()*float64(century))
		rows := make([]state, b.terms.shards)
		for i := range rows {
			rows[i] = state{
				value: one(src, 0, part.capacity, part.capacity*src.unit(), -part.maxDebt*src.unit()),
				ts:    part.begin(now - int64(src.unit()*2*float64(period)) + one(src, 0, 0, 0, minute, 2*minute+period)),
			}
		}
		before, amount := slices.Clone(rows), src.unit()*one(src, 1, 0.1, 2)*(b.terms.capacity+1)
		b.terms.creditParts(rows, now, amount, 0)

		tolerance := 1e-9 * (b.terms.capacity + b.terms.maxDebt + amount + 1)
		require.InDelta(t, min(b.terms.capacity, b.terms.tokensOf(before, now)+amount), b.terms.tokensOf(rows, now), tolerance)
		for i, s := range rows {
			mended := part.mend(before[i], now)
			require.Equal(t, mended.ts, s.ts, "no time is credited")
			require.GreaterOrEqual(t, s.value, before[i].value)
			require.LessOrEqual(t, s.value, max(part.capacity, before[i].value))
			given := s.value - before[i].value
			present := state{value: min(part.capacity, part.tokens(mended, now)+given), ts: max(mended.ts, part.begin(now))}
			later := now + int64(src.unit()*3*float64(period))
			require.InDelta(t, part.tokens(present, later), part.tokens(s, later), tolerance)

			then := over(draw(src), 1).(interface{ compile() (terms, error) })
			changed, err := then.compile()
			require.NoError(t, err)
			changed = Limit{name: "credited", terms: changed}.termsFor("key")
			want := min(changed.capacity, changed.tokens(mended, later)+given)
			require.LessOrEqual(t, changed.tokens(s, later), want+tolerance+1e-9*changed.capacity, "no more than a credit at that moment")
		}
	})
}

func TestACreditGoesToTheRowsThatHaveRoom(t *testing.T) {
	t.Parallel()
	now := opening.UnixMicro()
	spread := Define("spread", TokenBucket{Rate: 4, Period: time.Second, Capacity: 8, Shards: 4}).terms
	for name, test := range map[string]struct {
		rows         []state
		amount, most float64
		values       []float64
	}{
		"EvenlyWhereAllHaveRoom":      {[]state{{0, now}, {-1, now}, {0.5, now}, {1, now}}, 2, 0, []float64{0.5, -0.5, 1, 1.5}},
		"TheRestWhereThereIsMore":     {[]state{{2, now}, {1.75, now}, {0, now}, {2, now}}, 2, 0, []float64{2, 2, 1.75, 2}},
		"FullIsFullWithWhatArrived":   {[]state{{0, now - 60e6}, {0, now}, {2, now}, {2, now}}, 2, 0, []float64{0, 2, 2, 2}},
		"NoMoreThanTheCapacity":       {[]state{{2, now}, {1, now}, {2, now}, {2, now}}, 8, 0, []float64{2, 2, 2, 2}},
		"AsFarAsItWasWhenItWasTaken":  {[]state{{2, now}, {1, now}, {2, now}, {2, now}}, 4, 12, []float64{2.75, 2.75, 2.75, 2.75}},
		"WhatIsAboveTheCapacityStays": {[]state{{5, now}, {1, now}, {2, now}, {2, now}}, 1, 0, []float64{5, 2, 2, 2}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			before := slices.Clone(test.rows)
			spread.creditParts(test.rows, now, test.amount, test.most)
			for i, s := range test.rows {
				require.Equal(t, state{value: test.values[i], ts: before[i].ts}, s, "row %d of %v", i, test.rows)
			}
		})
	}
}
