//go:build !generalpath

package store

import (
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
)

// spent returns the tokens taken from the rows of a limit.
func spent(t *testing.T, db Conn, l limit) float64 {
	t.Helper()
	found, err := db.Query(t.Context(), `SELECT coalesce(sum($2 - value), 0) FROM ratelimit.buckets WHERE name = $1`, l.name, l.terms.Capacity)
	require.NoError(t, err)
	tokens, err := pgx.CollectExactlyOneRow(found, pgx.RowTo[float64])
	require.NoError(t, err)
	return tokens
}

// If a statement of a batch fails, the takes of its other statements are rolled back, and no call is answered with them.
func TestWhatWasUndoneIsNotGiven(t *testing.T) {
	t.Parallel()
	const keys = 40
	pool := postgrestest.New(t)
	s := newSession(pool, standing)
	first, second := tokenBucket("a", 10, time.Hour, 10, 0), tokenBucket("b", 10, time.Hour, 10, 0)
	for round := range 3 {
		tx := begin(t, pool)
		made := second.ask(fmt.Sprint("being made ", round), 1)
		_, err := tx.Exec(t.Context(), `INSERT INTO ratelimit.buckets VALUES ($1, $2, 0, 9, $3)`, made.Key.Name, made.Key.Key, opening)
		require.NoError(t, err)
		before := spent(t, pool, first)
		calls := []*Call{taking(made)}
		for key := range keys {
			calls = append(calls, taking(first.ask(fmt.Sprint(round, " ", key), 1)))
		}
		waiting := runBatch(t, s, calls...)
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
		require.Equal(t, float64(allowed), spent(t, pool, first)-before)
		require.NoError(t, tx.Rollback(t.Context()))
	}
}

// A batch that meets a held row takes nothing. If its next attempt fails, its calls get that error, and nothing was taken.
func TestAFailureOfASecondAttemptTakesNothing(t *testing.T) {
	t.Parallel()
	pool, batches := spyOn(postgrestest.New(t)), 0
	pool.change = func(batch *pgx.Batch) {
		if batches++; batches > 1 {
			*batch = pgx.Batch{}
			batch.Queue("DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = 'deadlock_detected'; END $$")
		}
	}
	s := newSession(pool, standing)
	plain, sharded := tokenBucket("plain", 100, time.Hour, 100, 0), tokenBucket("sharded", 100, time.Hour, 100, 0).over(2)
	_, err := pool.Exec(t.Context(), `INSERT INTO ratelimit.buckets SELECT 'sharded', 'key', shard, 50, $1 FROM generate_series(0, 1) AS shard`, opening)
	require.NoError(t, err)
	_, err = begin(t, pool).Exec(t.Context(), `SELECT FROM ratelimit.buckets WHERE name = 'sharded' FOR UPDATE`)
	require.NoError(t, err)
	alone, other := taking(plain.ask("key", 10)), taking(sharded.ask("key", 1))
	require.Empty(t, runBatch(t, s, alone, other))
	require.True(t, IsRetryable(alone.Result()))
	require.True(t, IsRetryable(other.Result()))
	require.Zero(t, spent(t, pool, plain))
}

// What a second attempt gave before it failed is undone with the rest, and asked for again.
func TestWhatASecondAttemptGaveBeforeItFailedIsNotGiven(t *testing.T) {
	t.Parallel()
	pool, batches := spyOn(postgrestest.New(t)), 0
	s := newSession(pool, standing)
	var calls []*Call
	for _, name := range []string{"a", "b"} {
		_, err := pool.Exec(t.Context(), `INSERT INTO ratelimit.buckets SELECT $1, 'key', shard, 50, $2 FROM generate_series(0, 1) AS shard`, name, opening)
		require.NoError(t, err)
		calls = append(calls, taking(tokenBucket(name, 100, time.Hour, 100, 0).over(2).ask("key", 1)))
	}
	holder := begin(t, pool)
	pool.change = func(batch *pgx.Batch) {
		if batches++; batches == 2 { // the rows are free, and the last statement fails
			require.NoError(t, holder.Rollback(t.Context()))
			last := batch.QueuedQueries[len(batch.QueuedQueries)-1]
			last.SQL, last.Arguments = "SELECT 1/0", nil
		}
	}
	_, err := holder.Exec(t.Context(), `SELECT FROM ratelimit.buckets FOR UPDATE`)
	require.NoError(t, err)
	require.Empty(t, runBatch(t, s, calls...))
	for _, c := range calls {
		require.True(t, c.isAllowed(t))
		require.Equal(t, 1.0, spent(t, pool, limit{name: c.Asks[0].Key.Name, terms: c.Asks[0].Terms.OfShard()}))
	}
}

// The keys of one limit may be on different plans. A batch decides on each by its own terms, as quickly as for one plan, unless
// there are too many plans.
func TestABatchDecidesOnKeysOnDifferentPlans(t *testing.T) {
	t.Parallel()
	for name, plans := range map[string]int{"two": 2, "as many as there are keys": 100} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSession(postgrestest.New(t), standing)
			var calls []*Call
			for key := range 100 {
				capacity := float64(1 + key%plans)
				plan := tokenBucket("api", 1, time.Hour, capacity, 0)
				calls = append(calls, taking(plan.ask(fmt.Sprint(key), capacity)), taking(plan.ask(fmt.Sprint(key), 1)))
			}
			p := planOf(calls, false)
			require.Len(t, p.policies, min(plans, maxStatements))
			require.Equal(t, plans <= maxStatements, len(p.others) == 0)
			require.Empty(t, runBatch(t, s, calls...))
			for i, c := range calls {
				require.Equal(t, i%2 == 0, c.isAllowed(t), "call %d: the capacity of its plan, and no more", i)
			}
		})
	}
}
