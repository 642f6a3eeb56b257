package ratelimit

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// shrinking makes rapid a source, so that what fails is shrunk to something short.
type shrinking struct{ *rapid.T }

func (s shrinking) pick(n int) int { return rapid.IntRange(0, n-1).Draw(s.T, "pick") }
func (s shrinking) unit() float64 {
	return float64(rapid.IntRange(0, 1<<20).Draw(s.T, "unit")) / (1 << 20)
}

// TestAlgebraAgreesWithTheExactModel holds the decisions, values and waits of random histories, with
// clocks that step back and policies that change, to the model in rational numbers. A decision may differ
// only where the exact value lies within the rounding of its bound, and a value by no more than that.
func TestAlgebraAgreesWithTheExactModel(t *testing.T) {
	t.Parallel()
	for name, draw := range map[string]func(source) Policy{"Everyday": everyday, "Extreme": extreme} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			rapid.Check(t, func(t *rapid.T) { short(t, draw).run(40) })
		})
	}
	t.Run("DyadicToTheLastBit", func(t *testing.T) {
		t.Parallel()
		rapid.Check(t, func(t *rapid.T) {
			h := short(t, dyadic)
			h.exact = true
			h.run(40)
			require.Zero(t, h.open)
		})
	})
}

// FuzzHistory is TestAlgebraAgreesWithTheExactModel for as long as one likes.
func FuzzHistory(f *testing.F) {
	f.Fuzz(rapid.MakeFuzz(func(t *rapid.T) {
		short(t, one(shrinking{t}, everyday, extreme)).run(20)
	}))
}

// short returns a history of two buckets that is sent to no server.
func short(t *rapid.T, draw func(source) Policy) *history {
	return newHistory(t, shrinking{t}, draw, &Limiter{statements: newStatements(defaultSchema), boxes: &boxes{}}, "a", "b")
}

// TestInvariants holds random calls on random rows to what is always true; FuzzTake holds hostile ones to it.
func TestInvariants(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		src := shrinking{t}
		limit := Define("drawn", one(src, everyday, extreme)(src))
		b := ask{limit: limit, terms: limit.termsFor("key")}
		begins(t, b.terms)
		for range 20 {
			reserve, most := b.terms.Reserves && src.pick(2) == 0, b.terms.Capacity
			if reserve {
				most += b.terms.MaxDebt
			}
			b.cost = most * src.unit()
			if checkCost(limit, b.cost, most) != nil || b.bound(reserve) != nil {
				continue
			}
			now := opening.UnixMicro() + int64(src.unit()*float64(century))
			period := int64(b.terms.Steps) * b.terms.Step
			row := bucket.State{
				Value: one(src, 0, b.terms.Capacity, b.terms.Capacity*src.unit(), -b.terms.MaxDebt, -b.terms.MaxDebt*src.unit()),
				TS:    now - int64(src.unit()*3*float64(period)) + one(src, 0, 0, minute, 2*minute),
			}
			t.Logf("%v of %#v, at least %v to remain, on %+v at %d", b.cost, limit.policy, b.lowest, row, now)
			holds(t, b, row, now, now+int64(src.unit()*5*float64(period)))
			takes(t, b, row, now)
			waits(t, b, row, now)
		}
	})
}

// TestAdmissionBound promises what a limit is for: in any span t, however the requests fall, no more than
// capacity + rate * t / period is taken.
func TestAdmissionBound(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		src := shrinking{t}
		rate, period := float64(1+src.pick(50)), time.Duration(1+src.pick(100))*time.Millisecond
		policy := TokenBucket{Rate: rate, Period: period, Capacity: 1 + float64(src.pick(100))}
		terms := Define("bound", policy).terms
		now := opening.UnixMicro()
		row := terms.Full(now)
		type taken struct {
			at   int64
			cost float64
		}
		var all []taken
		for range 60 {
			now += int64(src.unit() * src.unit() * 2 * float64(period.Microseconds()))
			cost := policy.Capacity * math.Pow(src.unit(), 3)
			next, allowed := terms.Take(row, now, cost, 0)
			if row = next; allowed {
				all = append(all, taken{now, cost})
			}
		}
		for i := range all {
			sum := 0.0
			for _, last := range all[i:] {
				sum += last.cost
				bound := policy.Capacity + rate*float64(last.at-all[i].at)/float64(period.Microseconds())
				require.LessOrEqual(t, sum, bound*(1+1e-12))
			}
		}
	})
}
