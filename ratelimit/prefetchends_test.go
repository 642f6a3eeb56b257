package ratelimit

import (
	"cmp"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// What is kept for too long is not used any more, however much of it is left.
func TestPrefetchEnds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		row := &ledger{}
		limiter := row.on(t, Config{})
		fast := Define("fast", TokenBucket{Rate: 100, Period: time.Second, Capacity: 10_000, Prefetch: time.Second})
		warm(t, limiter, fast.For("hot"), 100)
		limiter.prefetched.timer.Stop() // as in a process that stood still
		pass(time.Second)
		row.change(func() { row.asked = nil })
		_, err := limiter.Take(t.Context(), fast.For("hot"))
		require.NoError(t, err)
		require.Len(t, row.asked, 1)
		require.NoError(t, limiter.Close(t.Context()))
		// Close gives back the old tokens and the new ones concurrently, in any order.
		slices.SortFunc(row.given, func(a, b bucket.Ahead) int { return cmp.Compare(a.TS, b.TS) })
		require.InDelta(t, 100, row.given[0].Left, 0)
	})
}

// A limit that a rule names is answered from memory only until another policy holds.
func TestPrefetchEndsWithItsPolicy(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		row := &ledger{}
		change := time.Now().Add(3 * time.Second)
		less := TokenBucket{Rate: 1, Period: Day, Capacity: 100, Prefetch: 10 * time.Second}
		rule, err := NewRule(still, RuleConfig{Name: "less", Eras: []Era{{}, {From: change, Policy: less}}})
		require.NoError(t, err)
		limiter := row.on(t, Config{Policies: oneRule{rule}})
		warm(t, limiter, still.For("hot"), 100)
		pass(time.Until(change) - time.Millisecond)
		d, err := limiter.Take(t.Context(), still.For("hot"))
		require.NoError(t, err)
		require.True(t, d.States[0].Prefetched)
		pass(time.Millisecond)
		row.change(func() { row.row = nil }) // as the row is then
		d, err = limiter.Take(t.Context(), still.For("hot"))
		require.NoError(t, err)
		require.False(t, d.States[0].Prefetched)
		require.NoError(t, limiter.Close(t.Context()))
	})
}

func TestPrefetchAndTheDenyCache(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		row := &ledger{}
		limiter := row.on(t, Config{DenyCache: 10})
		warm(t, limiter, still.For("hot"), 100)
		d, err := limiter.Take(t.Context(), still.For("hot").Cost(9_999))
		require.NoError(t, err)
		require.False(t, d.Allowed)
		asked := len(row.asked)
		d, err = limiter.Take(t.Context(), still.For("hot").Cost(9_999))
		require.NoError(t, err)
		require.False(t, d.Allowed)
		require.Len(t, row.asked, asked, "it was refused from memory")
		d, err = limiter.Take(t.Context(), still.For("hot"))
		require.NoError(t, err)
		require.True(t, d.Allowed)
		require.NoError(t, limiter.Close(t.Context()))
	})
}

// In a process with too many keys those that are new go to the database.
func TestPrefetchIsBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		row := &ledger{}
		limiter := row.on(t, Config{})
		limiter.prefetched.count.Store(maxHoldings)
		for range 20 {
			d, err := limiter.Take(t.Context(), still.For("hot"))
			require.NoError(t, err)
			require.False(t, d.States[0].Prefetched)
		}
		require.NoError(t, limiter.Close(t.Context()))
	})
}
