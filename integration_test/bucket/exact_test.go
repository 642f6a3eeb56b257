package bucket_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/bucket/buckettest"
)

// TestAlgebraAgreesWithTheExactModel holds the decisions, values and waits of random histories, with clocks that step back and
// policies that change, to the model in rational numbers. A decision may differ only if the exact value lies within the rounding
// error of its bound, and a value only by that error.
func TestAlgebraAgreesWithTheExactModel(t *testing.T) {
	t.Parallel()
	for name, draw := range map[string]func(buckettest.Source) bucket.Terms{"Everyday": buckettest.Everyday, "Extreme": buckettest.Extreme} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			rapid.Check(t, func(t *rapid.T) { short(t, draw).Run(40) })
		})
	}
	t.Run("DyadicToTheLastBit", func(t *testing.T) {
		t.Parallel()
		rapid.Check(t, func(t *rapid.T) {
			h := short(t, buckettest.Dyadic)
			h.Exact = true
			h.Run(40)
			require.Zero(t, h.Open)
		})
	})
}

// FuzzHistory is TestAlgebraAgreesWithTheExactModel for as long as one likes.
func FuzzHistory(f *testing.F) {
	f.Fuzz(rapid.MakeFuzz(func(t *rapid.T) {
		short(t, buckettest.One(shrinking{t}, buckettest.Everyday, buckettest.Extreme)).Run(20)
	}))
}

// short returns a history of two buckets.
func short(t *rapid.T, draw func(buckettest.Source) bucket.Terms) *buckettest.History {
	h := &buckettest.History{T: t, Src: shrinking{t}, Draw: draw}
	h.Begin("a", "b")
	return h
}

// TestRowsAgreeWithTheExactModel compares what random rows hold together with the sum of as many exact buckets.
func TestRowsAgreeWithTheExactModel(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		src := shrinking{t}
		draw := buckettest.One(src, buckettest.Everyday, buckettest.Extreme, buckettest.Dyadic)
		terms := buckettest.Over(draw(src), buckettest.One[int32](src, 2, 4, 8, 64))
		rows, now := rowsOf(src, terms)
		off, mayBe := buckettest.RowsOff(terms, rows, now)
		require.LessOrEqual(t, off, mayBe, "%+v over %+v at %d", terms, rows, now)
	})
}
