package integration_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// partitions is over how many partitions the buckets of TestInPartitions are.
const partitions = 4

// TestInPartitions runs a test or two of each verb, kind and way to decide once more, on buckets in partitions: setup sees whose subtests they
// are. RATELIMIT_PARTITIONS=8 go test ./integration_test runs all of them so.
func TestInPartitions(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]func(t *testing.T){
		"TestABucketIsLevelledOverItsNewRows":         TestABucketIsLevelledOverItsNewRows,
		"TestCallersAtOnceGetWhatTheBucketHeld":       TestCallersAtOnceGetWhatTheBucketHeld,
		"TestCallsThatMixKindsAgreeWithTheExactModel": TestCallsThatMixKindsAgreeWithTheExactModel,
		"TestCancel":                            TestCancel,
		"TestCharge":                            TestCharge,
		"TestCredit":                            TestCredit,
		"TestHistoryOfBatchesIsLinearizable":    TestHistoryOfBatchesIsLinearizable,
		"TestLeasesAgreeWithTheExactModel":      TestLeasesAgreeWithTheExactModel,
		"TestPruneOfCalendarWindows":            TestPruneOfCalendarWindows,
		"TestRace":                              TestRace,
		"TestRenew":                             TestRenew,
		"TestReserve":                           TestReserve,
		"TestResetDoesNotMoveABucketBackInTime": TestResetDoesNotMoveABucketBackInTime,
		"TestRollbackToASavepointGivesBackWhatWasTakenInIt": TestRollbackToASavepointGivesBackWhatWasTakenInIt,
		"TestSettleOverSeveralLimits":                       TestSettleOverSeveralLimits,
		"TestShardedLimitsAmongOthersAreAllOrNothing":       TestShardedLimitsAmongOthersAreAllOrNothing,
		"TestSlidingWindowIsPruned":                         TestSlidingWindowIsPruned,
		"TestSlotsAndTokensAreTakenTogether":                TestSlotsAndTokensAreTakenTogether,
		"TestStart":                                         TestStart,
		"TestStatementsUseThePrimaryKey":                    TestStatementsUseThePrimaryKey,
		"TestWhatGoesByTIDDoesNotReadTheWholeTable":         TestWhatGoesByTIDDoesNotReadTheWholeTable,
		"TestTakeUpTo":                                      TestTakeUpTo,
	} {
		t.Run(name, test)
	}
}

// inPartitions18 reports whether the buckets are in partitions of PostgreSQL 18, where a Limiter goes by statements that name one row each.
func (b *bundle) inPartitions18(t *testing.T) (is bool) {
	t.Helper()
	if b.memory != nil {
		return false
	}
	require.NoError(t, b.pool.QueryRow(t.Context(), `SELECT relkind = 'p' FROM pg_class WHERE oid = 'ratelimit.buckets'::regclass`).Scan(&is))
	return is && server18(t, b.pool)
}

// server18 reports whether the server is PostgreSQL 18 or later.
func server18(t *testing.T, pool *pgxpool.Pool) (is bool) {
	t.Helper()
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT current_setting('server_version_num')::integer >= 180000`).Scan(&is))
	return is
}

// PostgreSQL 18.4 ends by a segmentation fault when a statement looks rows up in partitions and finds one changed meanwhile. So the statements that do
// are not sent there.
func TestInPartitionsOfPostgres18EachStatementNamesOneRow(t *testing.T) {
	t.Parallel()
	several := &atomic.Int64{}
	pool := postgrestest.NewPartitioned(t, partitions, func(c *pgxpool.Config) { c.ConnConfig.Tracer = countStatements{"unnest(", several} })
	b := &bundle{pool: pool, schema: "ratelimit"}
	b.limiter = b.with(t, ratelimit.Config{})
	require.NoError(t, atonce.Do(8, func(worker int) error {
		for range 20 {
			if _, err := b.limiter.Take(t.Context(), roomy.For(fmt.Sprint("key ", worker%3)), other.For("key")); err != nil {
				return err
			}
		}
		return nil
	}))
	require.Equal(t, b.inPartitions18(t), several.Load() == 0)
}

// deletions is a tracer that counts what each statement of Prune deletes.
type deletions struct {
	mu         sync.Mutex
	all, most  int64
	statements int
}

type isPrune struct{}

func (d *deletions) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	return context.WithValue(ctx, isPrune{}, strings.Contains(data.SQL, "DELETE FROM") && strings.Contains(data.SQL, "spare"))
}

func (d *deletions) TraceQueryEnd(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryEndData) {
	if is, _ := ctx.Value(isPrune{}).(bool); is {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.statements++
		d.all += data.CommandTag.RowsAffected()
		d.most = max(d.most, data.CommandTag.RowsAffected())
	}
}

// Prune deletes exactly what is full from each partition, a bounded number of rows at once, and beside it exactly what is asked for is taken.
func TestPruneGoesThroughEachPartition(t *testing.T) {
	t.Parallel()
	const idle, owing, others, calls = 8_000, 500, 300, 50
	const perStep = 32 * 80 // the rows of so many blocks, and more
	for _, n := range []int{1, 3, 16} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			t.Parallel()
			ctx, traced := t.Context(), &deletions{}
			pool := postgrestest.NewPartitioned(t, n, func(c *pgxpool.Config) { c.MaxConns, c.ConnConfig.Tracer = 12, traced })
			b := &bundle{pool: pool, schema: "ratelimit"}
			b.limiter = b.with(t, ratelimit.Config{})
			quick := pruneLimits[0]
			b.exec(t, `INSERT INTO ratelimit.buckets SELECT 'quick', 'idle' || n, 0, 10, 0 FROM generate_series(1, $1::integer) AS n
				UNION ALL SELECT 'quick', 'owing' || n, 0, -1e12, 0 FROM generate_series(1, $2::integer) AS n
				UNION ALL SELECT 'other', 'idle' || n, 0, 10, 0 FROM generate_series(1, $3::integer) AS n`, idle, owing, others)
			held := b.begin(t, pgx.ReadCommitted)
			_, err := held.Exec(ctx, `SELECT FROM ratelimit.buckets WHERE name = 'quick' AND key = 'idle7' FOR UPDATE`)
			require.NoError(t, err)

			var deleted int64
			require.NoError(t, atonce.Do(5, func(worker int) error {
				if worker == 0 {
					n, err := b.limiter.Prune(ctx, quick)
					deleted = n
					return err
				}
				for i := range calls {
					d, err := b.limiter.Take(ctx, quick.For(fmt.Sprintf("busy%d-%d", worker, i)))
					if err != nil || d.Remaining != 9 {
						return fmt.Errorf("%v remain, %w", d.Remaining, err)
					}
				}
				return nil
			}))
			require.EqualValues(t, idle-1, deleted, "all but the one that is held")
			if !b.inPartitions18(t) { // where a statement names one row
				require.Equal(t, deleted, traced.all)
				require.LessOrEqual(t, traced.most, int64(perStep))
				require.Greater(t, traced.statements, idle/perStep)
			}
			left := map[string]int64{"quick idle": 1, "quick owing": owing, "other idle": others, "quick busy": 4 * calls}
			requireLeft := func() {
				t.Helper()
				found := make(map[string]int64)
				rows, err := pool.Query(ctx, `SELECT name || ' ' || rtrim(key, '0123456789-'), count(*) FROM ratelimit.buckets GROUP BY 1`)
				require.NoError(t, err)
				var kind string
				var count int64
				_, err = pgx.ForEachRow(rows, []any{&kind, &count}, func() error { found[kind] = count; return nil })
				require.NoError(t, err)
				require.Equal(t, left, found)
			}
			requireLeft()

			require.NoError(t, held.Rollback(ctx))
			deleted, err = b.limiter.Prune(ctx, quick)
			require.NoError(t, err)
			require.EqualValues(t, 1, deleted)
			delete(left, "quick idle")
			requireLeft()
		})
	}
}

// While the table is made anew, calls wait, and nothing that they take is lost, nor taken twice.
func TestPartitionBesideTraffic(t *testing.T) {
	t.Parallel()
	const workers, calls, capacity = 4, 60, 1e4
	ctx := t.Context()
	b := setup(t, func(c *pgxpool.Config) { c.MaxConns = 12 })
	b.exec(t, `INSERT INTO ratelimit.buckets SELECT 'idle', 'k' || n, 0, 1, 1 FROM generate_series(1, 5000) AS n`)
	limits := []ratelimit.Limit{
		ratelimit.Define("alone", hoard(capacity)), ratelimit.Define("shared", hoard(capacity)),
		ratelimit.Define("window", ratelimit.SlidingWindow{Rate: capacity, Period: century}),
	}
	numbers := []int{5, 2, 1, 3}
	if server18(t, b.pool) { // there no Limiter may go on that has found one table
		require.NoError(t, migrations.Partition(ctx, b.pool, migrations.Config{Partitions: numbers[0]}))
		numbers = []int{2, 4, 3}
	}
	taken := make([]int, workers)
	require.NoError(t, atonce.Do(workers+1, func(worker int) error {
		if worker == workers {
			for _, n := range numbers {
				if err := migrations.Partition(ctx, b.pool, migrations.Config{Partitions: n}); err != nil {
					return err
				}
			}
			return nil
		}
		for i := range calls {
			key := fmt.Sprint("key ", i%7)
			var err error
			switch i % 3 {
			case 0:
				_, err = b.limiter.Take(ctx, limits[0].For(key))
			case 1:
				_, err = b.limiter.Take(ctx, limits[0].For(key), limits[1].For("all"), limits[2].For(key))
			default:
				err = b.limiter.InTx(ctx, func(tx pgx.Tx) error {
					_, err := b.limiter.WithTx(tx).Take(ctx, limits[0].For(key), limits[1].For("all"))
					return err
				})
			}
			if err != nil {
				return err
			}
			taken[worker]++
		}
		return nil
	}))
	var spent float64
	require.NoError(t, b.pool.QueryRow(ctx, `SELECT sum($1 - value) FROM ratelimit.buckets WHERE name = 'alone'`, capacity).Scan(&spent))
	require.InDelta(t, workers*calls, spent, 0.01, "of the policy of a century next to nothing arrives")
	require.Equal(t, 5000, b.count(t, `SELECT count(*) FROM ratelimit.buckets WHERE name = 'idle'`))
	is, err := migrations.Partitions(ctx, b.pool, migrations.Config{})
	require.NoError(t, err)
	require.Equal(t, 3, is)
}
