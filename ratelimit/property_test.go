package ratelimit

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
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
