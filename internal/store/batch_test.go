//go:build !generalpath

package store

import (
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

// If a statement of a batch fails, the takes of its other statements are rolled back, and no call is answered with them.
func TestWhatWasUndoneIsNotGiven(t *testing.T) {
	t.Parallel()
	const keys = 40
	s := newStand(t)
	first, second := tokenBucket("a", 10, time.Hour, 10, 0), tokenBucket("b", 10, time.Hour, 10, 0)
	for round := range 3 {
		made := second.ask(fmt.Sprint("being made ", round), 1)
		tx := s.tx(fmt.Sprintf(`INSERT INTO ratelimit.buckets VALUES ('%s', '%s', 0, 9, %d)`, made.Key.Name, made.Key.Key, opening))
		before := spent(t, s.pool, first)
		calls := []*Call{taking(made)}
		for key := range keys {
			calls = append(calls, taking(first.ask(fmt.Sprint(round, " ", key), 1)))
		}
		waiting := runBatch(t, s.Session, calls...)
		waits := make(map[*Call]bool)
		for _, w := range waiting {
			waits[w.Call.Of] = true
		}
		require.True(t, waits[calls[0]], "its row is being made")
		require.LessOrEqual(t, len(waiting), 4, "one row stops the calls that need it, and few that were last beside them")
		allowed := 0
		for _, c := range calls {
			if !waits[c] {
				require.True(t, c.isAllowed(t))
				allowed++
			}
		}
		require.Equal(t, float64(allowed), spent(t, s.pool, first)-before)
		require.NoError(t, tx.Rollback(t.Context()))
	}
}

// A batch that meets a held row takes nothing. If its next attempt fails, its calls get that error, and nothing was taken.
func TestAFailureOfASecondAttemptTakesNothing(t *testing.T) {
	t.Parallel()
	s, batches := newStand(t), 0
	s.pool.change = func(batch *pgx.Batch) {
		if batches++; batches > 1 {
			*batch = pgx.Batch{}
			batch.Queue("DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = 'deadlock_detected'; END $$")
		}
	}
	plain, sharded := tokenBucket("plain", 100, time.Hour, 100, 0), tokenBucket("sharded", 100, time.Hour, 100, 0).over(2)
	s.makeRows("key", sharded)
	s.tx(`SELECT FROM ratelimit.buckets WHERE name = 'sharded' FOR UPDATE`)
	alone, other := taking(plain.ask("key", 10)), taking(sharded.ask("key", 1))
	s.batch(alone, other)
	require.True(t, IsRetryable(alone.Result()))
	require.True(t, IsRetryable(other.Result()))
	require.Zero(t, spent(t, s.pool, plain))
}

// What a second attempt gave before it failed is undone with the rest, and asked for again.
func TestWhatASecondAttemptGaveBeforeItFailedIsNotGiven(t *testing.T) {
	t.Parallel()
	s, batches := newStand(t), 0
	var calls []*Call
	for _, name := range []string{"a", "b"} {
		l := tokenBucket(name, 100, time.Hour, 100, 0).over(2)
		s.makeRows("key", l)
		calls = append(calls, taking(l.ask("key", 1)))
	}
	holder := s.tx(`SELECT FROM ratelimit.buckets FOR UPDATE`)
	s.pool.change = func(batch *pgx.Batch) {
		if batches++; batches == 2 { // the rows are free, and the last statement fails
			require.NoError(t, holder.Rollback(t.Context()))
			last := batch.QueuedQueries[len(batch.QueuedQueries)-1]
			last.SQL, last.Arguments = "SELECT 1/0", nil
		}
	}
	s.allows(calls...)
	for _, c := range calls {
		require.Equal(t, 1.0, spent(t, s.pool, limit{name: c.Asks[0].Key.Name, terms: c.Asks[0].Terms.OfShard()}))
	}
}

// The keys of one limit may be on different plans. A batch decides on each by its own terms, as quickly as for one plan, unless
// there are too many plans.
func TestABatchDecidesOnKeysOnDifferentPlans(t *testing.T) {
	t.Parallel()
	for name, plans := range map[string]int{"two": 2, "as many as there are keys": 100} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newStand(t)
			var calls []*Call
			for key := range 100 {
				capacity := float64(1 + key%plans)
				plan := tokenBucket("api", 1, time.Hour, capacity, 0)
				calls = append(calls, taking(plan.ask(fmt.Sprint(key), capacity)), taking(plan.ask(fmt.Sprint(key), 1)))
			}
			p := planOf(calls, false)
			require.Len(t, p.policies, min(plans, maxStatements))
			require.Equal(t, plans <= maxStatements, len(p.others) == 0)
			s.batch(calls...)
			for i, c := range calls {
				require.Equal(t, i%2 == 0, c.isAllowed(t), "call %d: the capacity of its plan, and no more", i)
			}
		})
	}
}
