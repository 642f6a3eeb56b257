//go:build !generalpath

package store

import (
	"context"
	"fmt"
	"math"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
)

// spending is a limit of which some keys have a row.
var spending = tokenBucket("spending", 1, time.Hour, 100, 0)

// spendingKey returns the n-th key in the order of locking.
func spendingKey(n int) string { return fmt.Sprintf("key %06d", n) }

// fillSpending makes rows in an order that is not that of the keys, in a table that nobody analyzes.
func fillSpending(t *testing.T, pool *pgxpool.Pool, rows int) {
	t.Helper()
	_, err := pool.Exec(t.Context(), `ALTER TABLE ratelimit.buckets SET (autovacuum_enabled = false)`)
	require.NoError(t, err)
	_, err = pool.Exec(t.Context(), `INSERT INTO ratelimit.buckets SELECT 'spending', 'key ' || lpad(n::text, 6, '0'), 0, 50, $2 FROM generate_series($1, 1, -1) AS n`, rows, opening)
	require.NoError(t, err)
}

// takeSpending returns calls for the first keys.
func takeSpending(keys int) (calls []*Call) {
	for n := 1; n <= keys; n++ {
		calls = append(calls, taking(spending.ask(spendingKey(n), 1)))
	}
	return calls
}

// askBoldly has the next batch ask boldly, or not, whatever became of those before.
func (s *Session) askBoldly(bold bool) {
	s.bold.left.Store(0)
	if !bold {
		s.bold.left.Store(math.MaxInt64)
	}
}

// watching is a database that counts the statements sent to it in batches.
type watching struct {
	database
	mu   sync.Mutex
	sent map[string]int
}

func (w *watching) SendBatch(ctx context.Context, batch *pgx.Batch) pgx.BatchResults {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, q := range batch.QueuedQueries {
		w.sent[q.SQL]++
	}
	return w.database.SendBatch(ctx, batch)
}

// requireSent checks how many statements of each kind were sent since the last time.
func (w *watching) requireSent(t *testing.T, s *Session, bold, spend int, message string) {
	t.Helper()
	require.Equal(t, bold, w.sent[s.statements.spendBold], message)
	require.Equal(t, spend, w.sent[s.statements.spend], message)
	clear(w.sent)
}

func watch(db database) *watching { return &watching{database: db, sent: make(map[string]int)} }

// with opens another pool on the database, on which something is set as it may be for the database.
func with(t *testing.T, pool *pgxpool.Pool, settings string, mode pgx.QueryExecMode) *pgxpool.Pool {
	t.Helper()
	config := pool.Config().Copy()
	config.ConnConfig.DefaultQueryExecMode = mode
	config.ConnConfig.RuntimeParams["jit"] = "off" // ways that are off have a cost at which each plan would be compiled
	for setting := range strings.SplitSeq(settings, ";") {
		if name, value, found := strings.Cut(setting, "="); found {
			config.ConnConfig.RuntimeParams[name] = value
		}
	}
	other, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(other.Close)
	return other
}

// plans are what may be set for a database that changes how the planner goes about a batch.
var plans = []string{
	"", "enable_nestloop=off", "enable_nestloop=off;enable_hashjoin=off", "enable_indexscan=off", "enable_indexscan=off;enable_bitmapscan=off",
	"enable_nestloop=off;enable_seqscan=off", "enable_material=off;enable_seqscan=off", "plan_cache_mode=force_custom_plan",
	"default_transaction_isolation=repeatable read", "default_transaction_isolation=serializable",
}

// Whatever the plan, the level, and the way in which statements are sent, a batch that asks boldly is told the same: what has
// enough gives, in one round trip, what has not refuses, and what has no row is asked for again.
func TestWhateverThePlanABoldBatchIsToldTheSame(t *testing.T) {
	t.Parallel()
	for _, table := range []struct {
		name     string
		rows     int
		analyzed bool
	}{{"empty", 0, false}, {"tiny", 20, false}, {"tiny and analyzed", 20, true}, {"large", 20_000, false}, {"large and analyzed", 20_000, true}} {
		t.Run(table.name, func(t *testing.T) {
			t.Parallel()
			pool := postgrestest.New(t)
			fillSpending(t, pool, table.rows)
			if table.analyzed {
				_, err := pool.Exec(t.Context(), "VACUUM ANALYZE ratelimit.buckets")
				require.NoError(t, err)
			}
			for i, settings := range append([]string{"simple", "exec"}, plans...) {
				mode := pgx.QueryExecModeCacheStatement
				switch settings {
				case "simple":
					settings, mode = "", pgx.QueryExecModeSimpleProtocol
				case "exec":
					settings, mode = "", pgx.QueryExecModeExec
				case "plan_cache_mode=force_custom_plan":
				default:
					settings += ";plan_cache_mode=force_generic_plan"
				}
				db := watch(with(t, pool, settings, mode))
				s := newSession(db, standing)
				calls := append(takeSpending(8), taking(spending.ask(spendingKey(9), 80)))
				require.Empty(t, runBatch(t, s, calls...), settings)
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
				db.requireSent(t, s, 1, 0, settings)

				missing := taking(spending.ask(fmt.Sprint("missing ", i), 1))
				require.Empty(t, runBatch(t, s, append(takeSpending(8), missing)...), settings)
				require.Equal(t, []float64{99}, missing.tokens(), settings)
				db.requireSent(t, s, 1, 1, settings)
			}
		})
	}
}

// Batches that ask boldly, and those that do not, decide the same, to the last bit.
func TestBoldAndOtherBatchesDecideTheSame(t *testing.T) {
	t.Parallel()
	const most = 40
	now := opening
	clock := func() *int64 { return new(now) }
	bold, other := newSession(postgrestest.New(t), clock), newSession(postgrestest.New(t), clock)
	random := testsize.Rand(t)
	limits := []limit{tokenBucket("fraction", 0.1, 3*time.Millisecond, 7, 0), dyadic[0], dyadic[2]}
	for round := range testsize.Of(15, 40) {
		now += int64((random.ExpFloat64() - 0.2) * 5_000)
		var one, two []*Call
		for range 1 + random.IntN(most) {
			a := limits[random.IntN(len(limits))].ask(spendingKey(random.IntN(9)), random.Float64()*4)
			one, two = append(one, taking(a)), append(two, taking(a))
		}
		bold.askBoldly(true)
		other.askBoldly(false)
		require.Empty(t, runBatch(t, bold, one...))
		require.Empty(t, runBatch(t, other, two...))
		for i := range one {
			require.NoError(t, one[i].Result())
			require.Equal(t, two[i].Answers, one[i].Answers, "round %d, call %d", round, i)
		}
	}
}

// Somebody holds a row: those who need others are answered all the same, and those who need that one wait for it. The
// batches after it do not ask boldly for a while.
func TestAHeldRowStopsNobodyElseInABoldBatch(t *testing.T) {
	t.Parallel()
	const keys, row = 40, `WHERE name = 'spending' AND key = 'key 000005'`
	for name, test := range map[string]struct {
		statements []string
		held       bool
		alone      bool // else somebody else has a lock on the row that stops nobody, and goes on
	}{
		"Locked":           {[]string{`SELECT FROM ratelimit.buckets ` + row + ` FOR UPDATE`}, true, true},
		"Changed":          {[]string{`UPDATE ratelimit.buckets SET value = value - 1 ` + row}, true, false},
		"Deleted":          {[]string{`DELETE FROM ratelimit.buckets ` + row}, true, true},
		"Shared":           {[]string{`SELECT FROM ratelimit.buckets ` + row + ` FOR SHARE`}, true, false},
		"InASavepoint":     {[]string{`SAVEPOINT s`, `SELECT FROM ratelimit.buckets ` + row + ` FOR NO KEY UPDATE`}, true, false},
		"LockedAndChanged": {[]string{`SELECT FROM ratelimit.buckets ` + row + ` FOR SHARE`, `SAVEPOINT s`, `UPDATE ratelimit.buckets SET value = value - 1 ` + row}, true, false},
		"LockedAndUndone":  {[]string{`SELECT FROM ratelimit.buckets ` + row + ` FOR KEY SHARE`, `SAVEPOINT s`, `UPDATE ratelimit.buckets SET value = value - 1 ` + row, `ROLLBACK TO SAVEPOINT s`}, false, false},
		"KeyShared":        {[]string{`SELECT FROM ratelimit.buckets ` + row + ` FOR KEY SHARE`}, false, false},
	} {
		for _, settings := range []string{"", "enable_nestloop=off", "default_transaction_isolation=serializable"} {
			t.Run(name+" "+settings, func(t *testing.T) {
				t.Parallel()
				pool := postgrestest.New(t)
				fillSpending(t, pool, keys)
				db := watch(with(t, pool, settings, pgx.QueryExecModeCacheStatement))
				s := newSession(db, standing)
				if !test.alone {
					_, err := begin(t, pool).Exec(t.Context(), `SELECT FROM ratelimit.buckets `+row+` FOR KEY SHARE`)
					require.NoError(t, err)
				}
				holder := begin(t, pool)
				for _, statement := range test.statements {
					_, err := holder.Exec(t.Context(), statement)
					require.NoError(t, err)
				}
				before := spent(t, pool, spending)
				bold, otherwise := 1, 0
				if test.held {
					otherwise = 1
				}
				for range 2 {
					calls := takeSpending(keys)
					waiting := runBatch(t, s, calls...)
					db.requireSent(t, s, bold, otherwise, "")
					bold = 1 - otherwise
					for i, c := range calls {
						if test.held && i == 4 {
							require.Len(t, waiting, 1)
							require.Same(t, c, waiting[0].Call.Of)
							continue
						}
						require.True(t, c.isAllowed(t))
					}
				}
				require.NoError(t, holder.Rollback(t.Context()))
				given := 2.0 * keys
				if test.held {
					given -= 2
				}
				require.Equal(t, given, spent(t, pool, spending)-before)
			})
		}
	}
}

// Batches with the same keys, whose plans lock them in opposite orders, all ask boldly at the same time: no call fails,
// and what was given is gone.
func TestBoldBatchesInOppositeOrdersFailNoCall(t *testing.T) {
	t.Parallel()
	const keys, rounds = 60, 12
	pool := postgrestest.New(t)
	fillSpending(t, pool, keys) // from the last key to the first
	_, err := pool.Exec(t.Context(), "VACUUM ANALYZE ratelimit.buckets")
	require.NoError(t, err)
	var mu sync.Mutex
	allowed := 0
	var racers sync.WaitGroup
	for _, settings := range []string{"", "", "enable_nestloop=off;enable_indexscan=off", "enable_nestloop=off;enable_indexscan=off"} {
		s := newSession(with(t, pool, settings, pgx.QueryExecModeCacheStatement), standing)
		racers.Go(func() {
			for range rounds {
				calls := takeSpending(keys)
				for _, c := range calls {
					c.Queueable().StartAlone()
				}
				s.askBoldly(true)
				for waiting := s.Run(t.Context(), calls, nil); len(waiting) > 0; {
					next := waiting[0]
					waiting = append(waiting[1:], s.Run(t.Context(), []*Call{next.Call.Of}, &next.Row)...)
				}
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
	require.Equal(t, float64(allowed), spent(t, pool, spending)-50*keys)
}

// In a table with partitions a batch takes from each row what it asks of that one.
func TestABoldBatchTakesFromPartitions(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	for _, statement := range []string{
		"ALTER TABLE ratelimit.buckets RENAME TO whole",
		"CREATE TABLE ratelimit.buckets (LIKE ratelimit.whole INCLUDING ALL) PARTITION BY HASH (name, key)",
		"CREATE TABLE ratelimit.buckets0 PARTITION OF ratelimit.buckets FOR VALUES WITH (MODULUS 2, REMAINDER 0)",
		"CREATE TABLE ratelimit.buckets1 PARTITION OF ratelimit.buckets FOR VALUES WITH (MODULUS 2, REMAINDER 1)",
		fmt.Sprintf("INSERT INTO ratelimit.buckets SELECT 'spending', 'key ' || lpad(n::text, 6, '0'), 0, n, %d FROM generate_series(1, 40) AS n", opening),
	} {
		_, err := pool.Exec(t.Context(), statement)
		require.NoError(t, err)
	}
	db := watch(pool)
	s := newSession(db, standing)
	calls := takeSpending(40)
	require.Empty(t, runBatch(t, s, calls...))
	for i, c := range calls {
		require.True(t, c.isAllowed(t))
		require.Equal(t, []float64{float64(i)}, c.tokens())
	}
	db.requireSent(t, s, 1, 0, "")
}

// Asking boldly pays or does not, and batches ask so accordingly.
func TestBoldnessLearns(t *testing.T) {
	t.Parallel()
	var b boldness
	asked := func(paid bool) (others int) {
		for !b.may() {
			others++
		}
		b.learn(paid)
		return others
	}
	var pauses []int
	for range 7 {
		pauses = append(pauses, asked(false))
	}
	require.Equal(t, []int{0, 64, 128, 256, 512, 1024, 1024}, pauses)
	require.Equal(t, 1024, asked(true))
	for range mostPause - 2 {
		require.Zero(t, asked(true))
	}
	require.Zero(t, asked(false))
	require.Equal(t, leastPause, asked(true), "what did not pay is forgotten in time")
}

// An answer is for a bucket that was asked for.
func TestAnAnswerForABucketThatWasNotAskedForIsAnError(t *testing.T) {
	t.Parallel()
	groups, _ := groupByKey(takeSpending(2))
	s := newSession(postgrestest.New(t), standing)
	for _, place := range []int{-1, 0, 3} {
		batch := &pgx.Batch{}
		batch.Queue(fmt.Sprintf("SELECT (%d)::bigint, true, 1::float8, 1::bigint, 1::bigint", place))
		err := s.Send(t.Context(), batch, func(results pgx.BatchResults) error { return receiveGroups(results, groups, true) })
		require.ErrorIs(t, err, errUnasked)
		require.False(t, groups[0].found || groups[1].found)
	}
}
