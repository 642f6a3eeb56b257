package store

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
)

// spending is a limit. Some of its keys have a row.
var spending = tokenBucket("spending", 1, time.Hour, 100, 0)

// spendingKey returns the n-th key in the order of locking.
func spendingKey(n int) string { return fmt.Sprintf("key %06d", n) }

// fillSpending inserts rows, but not in the order of their keys, into a table that is never analyzed.
func (s *stand) fillSpending(rows int) {
	s.Helper()
	s.exec(`ALTER TABLE ratelimit.buckets SET (autovacuum_enabled = false)`)
	s.exec(`INSERT INTO ratelimit.buckets SELECT 'spending', 'key ' || lpad(n::text, 6, '0'), 0, 50, $2, 50 FROM generate_series($1, 1, -1) AS n`, rows, opening)
}

// takeSpending returns calls for the first keys.
func takeSpending(keys int) (calls []*Call) {
	for n := 1; n <= keys; n++ {
		calls = append(calls, taking(spending.ask(spendingKey(n), 1)))
	}
	return calls
}

// with returns a stand on the same database, on which something is set as it may be for the database.
func (s *stand) with(settings string, mode pgx.QueryExecMode) *stand {
	s.Helper()
	config := s.pool.Config().Copy()
	config.ConnConfig.DefaultQueryExecMode = mode
	config.ConnConfig.RuntimeParams["jit"] = "off" // ways that are off have a cost at which each plan would be compiled
	for setting := range strings.SplitSeq(settings, ";") {
		if name, value, found := strings.Cut(setting, "="); found {
			config.ConnConfig.RuntimeParams[name] = value
		}
	}
	other, err := pgxpool.NewWithConfig(s.Context(), config)
	require.NoError(s, err)
	s.Cleanup(other.Close)
	return standOn(s.T, other)
}

// set sets only these things in each later statement of a stand of with, which plans them anew. It is quicker than
// with, because a new session has to read the catalog.
func (s *stand) set(settings string) {
	s.Helper()
	statements := "RESET ALL; DISCARD PLANS"
	for setting := range strings.SplitSeq(settings, ";") {
		if name, value, found := strings.Cut(setting, "="); found {
			statements += fmt.Sprintf("; SET %s = '%s'", name, value)
		}
	}
	_, err := s.pool.Exec(s.Context(), statements, pgx.QueryExecModeSimpleProtocol)
	require.NoError(s, err)
	require.EqualValues(s, 1, s.pool.Stat().TotalConns())
}

// plans are settings of a database that change the planner's choices for a batch.
var plans = []string{
	"", "enable_nestloop=off", "enable_nestloop=off;enable_hashjoin=off", "enable_indexscan=off", "enable_indexscan=off;enable_bitmapscan=off",
	"enable_nestloop=off;enable_seqscan=off", "enable_material=off;enable_seqscan=off", "plan_cache_mode=force_custom_plan",
	"default_transaction_isolation=repeatable read", "default_transaction_isolation=serializable",
}

// A batch has the same answers, in one round trip, for each plan, isolation level and protocol mode. A row with enough
// gives, a row without refuses, and a missing row is inserted.
func TestABatchAnswersTheSameUnderAnyQueryPlan(t *testing.T) {
	t.Parallel()
	for _, table := range []struct {
		name     string
		rows     int
		analyzed bool
	}{{"empty", 0, false}, {"tiny", 20, false}, {"tiny and analyzed", 20, true}, {"large", 20_000, false}, {"large and analyzed", 20_000, true}} {
		t.Run(table.name, func(t *testing.T) {
			t.Parallel()
			outside := newStand(t)
			outside.fillSpending(table.rows)
			if table.analyzed {
				outside.exec("VACUUM ANALYZE ratelimit.buckets")
			}
			prepared := outside.with("", pgx.QueryExecModeCacheStatement)
			for i, settings := range append([]string{"simple", "exec"}, plans...) {
				s := prepared
				switch settings {
				case "simple":
					s = outside.with("", pgx.QueryExecModeSimpleProtocol)
				case "exec":
					s = outside.with("", pgx.QueryExecModeExec)
				case "plan_cache_mode=force_custom_plan":
					s.set(settings)
				default:
					s.set(settings + ";plan_cache_mode=force_generic_plan")
				}
				calls := append(takeSpending(8), taking(spending.ask(spendingKey(9), 80)))
				s.batch(calls...)
				for _, c := range calls[:8] {
					require.True(t, c.isAllowed(t), settings)
				}
				if table.rows == 0 {
					require.Equal(t, i == 0, calls[8].isAllowed(t), settings)
					continue
				}
				require.False(t, calls[8].isAllowed(t), settings)
				require.Equal(t, []float64{50}, calls[8].tokens(), settings)
				require.Equal(t, []float64{49 - float64(2*i)}, calls[0].tokens(), settings)
				s.requireSent(1, settings)

				missing := taking(spending.ask(fmt.Sprint("missing ", i), 1))
				s.allows(append(takeSpending(8), missing)...)
				require.Equal(t, []float64{99}, missing.tokens(), settings)
				s.requireSent(1, settings)
			}
		})
	}
}

// Another transaction holds a row: calls for other rows are decided, and calls for that row wait for it.
func TestAHeldRowDelaysNoOtherCallOfABatch(t *testing.T) {
	t.Parallel()
	const keys, row = 40, `WHERE name = 'spending' AND key = 'key 000005'`
	tests := map[string]struct {
		statements []string
		held       bool
		alone      bool // otherwise another transaction has a weak lock on the row, which stops no call
	}{
		"Locked":           {[]string{`SELECT FROM ratelimit.buckets ` + row + ` FOR UPDATE`}, true, true},
		"Changed":          {[]string{`UPDATE ratelimit.buckets SET value = value - 1 ` + row}, true, false},
		"Deleted":          {[]string{`DELETE FROM ratelimit.buckets ` + row}, true, true},
		"Shared":           {[]string{`SELECT FROM ratelimit.buckets ` + row + ` FOR SHARE`}, true, false},
		"InASavepoint":     {[]string{`SAVEPOINT s`, `SELECT FROM ratelimit.buckets ` + row + ` FOR NO KEY UPDATE`}, true, false},
		"LockedAndChanged": {[]string{`SELECT FROM ratelimit.buckets ` + row + ` FOR SHARE`, `SAVEPOINT s`, `UPDATE ratelimit.buckets SET value = value - 1 ` + row}, true, false},
		"LockedAndUndone":  {[]string{`SELECT FROM ratelimit.buckets ` + row + ` FOR KEY SHARE`, `SAVEPOINT s`, `UPDATE ratelimit.buckets SET value = value - 1 ` + row, `ROLLBACK TO SAVEPOINT s`}, false, false},
		"KeyShared":        {[]string{`SELECT FROM ratelimit.buckets ` + row + ` FOR KEY SHARE`}, false, false},
	}
	for _, settings := range []string{"", "enable_nestloop=off", "default_transaction_isolation=serializable"} {
		t.Run(settings, func(t *testing.T) {
			t.Parallel()
			outside := newStand(t)
			outside.fillSpending(keys)
			s := outside.with(settings, pgx.QueryExecModeCacheStatement)
			for name, test := range tests {
				weak := outside.tx()
				if !test.alone {
					_, err := weak.Exec(t.Context(), `SELECT FROM ratelimit.buckets `+row+` FOR KEY SHARE`)
					require.NoError(t, err)
				}
				holder := outside.tx(test.statements...)
				before := spent(t, s.pool, spending)
				statements := 1
				if test.held {
					statements = 2 // the second one for the free rows
				}
				for range 2 {
					calls := takeSpending(keys)
					waiting := runBatch(t, s.Session, calls...)
					s.requireSent(statements, name)
					for i, c := range calls {
						if test.held && i == 4 {
							require.Len(t, waiting, 1, name)
							require.Same(t, c, waiting[0].Call.Of, name)
							continue
						}
						require.True(t, c.isAllowed(t), name)
					}
				}
				require.NoError(t, holder.Rollback(t.Context()))
				require.NoError(t, weak.Rollback(t.Context()))
				given := 2.0 * keys
				if test.held {
					given -= 2
				}
				require.Equal(t, given, spent(t, s.pool, spending)-before, name)
			}
		})
	}
}

// Batches with the same keys, whose plans lock them in opposite orders, run at the same time: no call fails, and the
// given tokens are gone.
func TestBatchesInOppositeOrdersFailNoCall(t *testing.T) {
	t.Parallel()
	const keys, rounds = 60, 12
	outside := newStand(t)
	outside.fillSpending(keys) // from the last key to the first
	outside.exec("VACUUM ANALYZE ratelimit.buckets")
	var mu sync.Mutex
	allowed := 0
	var racers sync.WaitGroup
	for _, settings := range []string{"", "", "enable_nestloop=off;enable_indexscan=off", "enable_nestloop=off;enable_indexscan=off"} {
		s := outside.with(settings, pgx.QueryExecModeCacheStatement)
		racers.Go(func() {
			for range rounds {
				calls := takeSpending(keys)
				s.decideAll(t.Context(), calls...)
				mu.Lock()
				for _, c := range calls {
					if c.Result() == nil && bucket.AllAllowed(c.Answers) {
						allowed++
					} else {
						t.Errorf("%v: %v", c.Asks[0].Key, c.Result())
					}
				}
				mu.Unlock()
			}
		})
	}
	racers.Wait()
	require.Equal(t, float64(allowed), spent(t, outside.pool, spending)-50*keys)
}

// An answer for a bucket outside the call is an error.
func TestAnAnswerForABucketThatWasNotAskedForIsAnError(t *testing.T) {
	t.Parallel()
	rows := planOf(takeSpending(2)).policies[0]
	s := newStand(t)
	for _, place := range []int{-1, 0, 3} {
		batch := &pgx.Batch{}
		batch.Queue(fmt.Sprintf("SELECT (%d)::bigint, true, 1::float8, 1::bigint, 1::float8, 1::bigint", place))
		err := s.Send(t.Context(), batch, func(results pgx.BatchResults) error { return receiveSpend(results, rows) })
		require.ErrorIs(t, err, errUnasked)
		require.False(t, rows[0].found || rows[1].found)
	}
}
