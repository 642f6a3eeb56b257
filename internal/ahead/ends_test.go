package ahead

import (
	"cmp"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// Prefetched tokens expire after a while, however many are left.
func TestPrefetchEnds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		row := &ledger{}
		limiter := row.on(Options{})
		fast := tokenBucket("fast", 100, time.Second, 10_000, time.Second)
		warm(t, limiter, fast.ask("hot", 1), 100)
		limiter.timer.Stop() // as in a process that stood still
		pass(time.Second)
		row.change(func() { row.asked = nil })
		_, err := limiter.take(t.Context(), fast.ask("hot", 1))
		require.NoError(t, err)
		require.Len(t, row.asked, 1)
		limiter.end(t)
		// Close gives back the old tokens and the new ones concurrently, in any order.
		slices.SortFunc(row.given, func(a, b bucket.Ahead) int { return cmp.Compare(a.TS, b.TS) })
		require.InDelta(t, 100, row.given[0].Left, 0)
	})
}

// If a process has too many keys, calls for new keys go to the database.
func TestPrefetchIsBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		row := &ledger{}
		limiter := row.on(Options{})
		limiter.count.Store(maxHoldings)
		for range 20 {
			d, err := limiter.take(t.Context(), still.ask("hot", 1))
			require.NoError(t, err)
			require.False(t, d.Prefetched)
		}
		limiter.end(t)
	})
}

// A call over several limits that finds too few prefetched tokens of one limit puts the tokens of the others back.
func TestACallThatIsNotAnsweredFromMemoryPutsTokensBack(t *testing.T) {
	t.Parallel()
	k := New(nil, Options{})
	asks := []bucket.Ask{still.ask("plenty", 2), still.ask("scarce", 2)}
	kept := func(i int) *holding { return k.stripe(&asks[i].Key).of[asks[i].Key] }
	for i, left := range []float64{5, 1} {
		stripe := k.stripe(&asks[i].Key)
		h := k.holding(stripe, &asks[i])
		h.kept, h.ends = bucket.Ahead{Taken: 5, Left: left, TS: 1}, time.Hour
	}
	k.timer.Stop()
	takes := func() bool {
		_, taken := k.Take(asks, nil)
		return taken
	}
	require.False(t, takes())
	require.Equal(t, []float64{5, 1}, []float64{kept(0).kept.Left, kept(1).kept.Left})
	kept(1).kept.Left = 5
	require.True(t, takes())
	require.Equal(t, []float64{3, 3}, []float64{kept(0).kept.Left, kept(1).kept.Left})
}

// Prefetched tokens are used until the end of their time, and given back from then on.
func TestPrefetchedTokensEndOnTime(t *testing.T) {
	t.Parallel()
	h := &holding{kept: bucket.Ahead{Taken: 10, Left: 1}, ends: time.Second, usedAt: time.Second}
	require.True(t, h.has(1, time.Second-1))
	require.False(t, h.has(1, time.Second))
	require.False(t, h.isLeft(time.Second-1, time.Hour))
	require.True(t, h.isLeft(time.Second, time.Hour))
}

func TestPace(t *testing.T) {
	t.Parallel()
	terms := bucket.Terms{Kind: bucket.Steps{}, Capacity: 800, Rate: 1, Steps: 1e6, Step: 1, Prefetch: 8000}
	var p pace
	for _, step := range []struct {
		gap  int64
		size pace
	}{{5000, 0}, {999, 2}, {999, 4}, {1000, 4}, {4000, 4}, {4001, 2}, {0, 4}, {0, 8}, {0, 16}, {0, 32}, {0, 64}, {0, 100}, {0, 100}} {
		p.next(&terms, step.gap, 2)
		require.Equal(t, step.size, p, "after %d", step.gap)
	}
	require.InDelta(t, 100, p.ahead(800, 2, 2), 0)
	require.InDelta(t, 25, p.ahead(102, 2, 2), 0, "a share of what there is")
	require.Zero(t, p.ahead(9, 2, 2), "no more than asked")
	require.Zero(t, p.ahead(-50, 2, 2))
}
