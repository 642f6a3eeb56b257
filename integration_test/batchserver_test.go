package integration_test

import (
	"context"
	"fmt"
	"os"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// However the pool's connections are, folded calls are exact.
func TestBatchesAreExactOnAnyConnection(t *testing.T) {
	t.Parallel()
	serializable := func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["default_transaction_isolation"] = "serializable" }
	mode := func(m pgx.QueryExecMode) func(*pgxpool.Config) {
		return func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = m }
	}
	for name, configure := range map[string]func(*pgxpool.Config){
		"OneConnection":  oneConnection,
		"Serializable":   serializable,
		"CacheStatement": mode(pgx.QueryExecModeCacheStatement),
		"CacheDescribe":  mode(pgx.QueryExecModeCacheDescribe),
		"DescribeExec":   mode(pgx.QueryExecModeDescribeExec),
		"Exec":           mode(pgx.QueryExecModeExec),
		"SimpleProtocol": mode(pgx.QueryExecModeSimpleProtocol),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t, configure)
			raceInBatches(t, b, b.limiter)
		})
	}
	t.Run("SingleConnection", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		conn, err := pgx.ConnectConfig(t.Context(), b.pool.Config().ConnConfig)
		require.NoError(t, err)
		defer conn.Close(context.WithoutCancel(t.Context()))
		limiter, err := ratelimit.New(conn, ratelimit.Config{})
		require.NoError(t, err)
		for i := range 4 {
			d, err := limiter.Take(t.Context(), pinch.For("key"))
			require.NoError(t, err)
			require.Equal(t, i < 2, d.Allowed)
		}
		require.NoError(t, limiter.Close(t.Context()))
		_, err = limiter.Take(t.Context(), pinch.For("key"))
		require.ErrorIs(t, err, ratelimit.ErrClosed)
	})
}

// raceInBatches has many callers take from few buckets, one limit and several, also with costs that are rounded.
func raceInBatches(t *testing.T, b *bundle, limiter *ratelimit.Limiter) {
	t.Helper()
	const callers, each, keys = 24, 12, 3
	whole := ratelimit.Define("whole", hoard(60))
	third := ratelimit.Define("third", hoard(20))
	var taken [2][keys]atomic.Int64
	require.NoError(t, atonce.Do(callers, func(caller int) error {
		for i := range each {
			key := (caller + i) % keys
			name := fmt.Sprint("ключ's \\ ", key)
			requests, took := []ratelimit.Request{whole.For(name)}, []int{0}
			switch i % 3 {
			case 1:
				requests, took = []ratelimit.Request{third.For(name).Cost(1.0 / 3)}, []int{1}
			case 2:
				requests, took = append(requests, third.For(name).Cost(1.0/3)), []int{0, 1}
			}
			call := limiter.Take
			if caller == 0 {
				call = func(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Decision, error) {
					r, err := limiter.Reserve(ctx, requests...)
					return r.Decision, err
				}
			}
			d, err := call(t.Context(), requests...)
			if err != nil {
				return err
			}
			for _, which := range took {
				if d.Allowed {
					taken[which][key].Add(1)
				}
			}
		}
		return nil
	}))
	for key := range keys {
		name := fmt.Sprint("ключ's \\ ", key)
		require.InDelta(t, 60-float64(taken[0][key].Load()), b.row(t, whole.Name(), name).Value, 1e-3)
		require.InDelta(t, 20-float64(taken[1][key].Load())/3, b.row(t, third.Name(), name).Value, 1e-3)
		require.GreaterOrEqual(t, taken[0][key].Load(), int64(59), "it was wanted more often than that")
	}
}

// A refusal outside a transaction writes nothing at all, also when many are refused at once.
func TestRefusalsInBatchesLogNothing(t *testing.T) {
	t.Parallel()
	fastPathOnly(t, "the general path locks rows to refuse what a look did not")
	s, _ := setupOwn(t, map[string]string{
		"autovacuum": "off", "checkpoint_timeout": "1h", "wal_level": "minimal", "max_wal_senders": "0",
	})
	requests := [][]ratelimit.Request{
		{tight.For("a")},
		{tight.For("b").Cost(0.3)},
		{roomy.For("new"), tight.For("a")},
		{tight.For("a"), tight.For("b"), other.For("new")},
	}
	takeAll(t, s.limiter, tight.For("a"))
	takeAll(t, s.limiter, tight.For("b"))
	s.exec(t, "VACUUM ratelimit.buckets") // reading a page tidies it, once
	refuse := func() {
		require.NoError(t, atonce.Do(32, func(caller int) error {
			for i := range 20 {
				d, err := s.limiter.Take(t.Context(), requests[(caller+i)%len(requests)]...)
				if err != nil || d.Allowed {
					return fmt.Errorf("%+v, %w", d, err)
				}
			}
			return nil
		}))
	}
	logged := func() (position string) {
		require.NoError(t, s.pool.QueryRow(t.Context(), `SELECT pg_current_wal_insert_lsn()::text`).Scan(&position))
		return position
	}
	refuse()
	before, rows := logged(), s.rows(t, "")
	refuse()
	require.Equal(t, before, logged())
	require.Equal(t, rows, s.rows(t, ""))
	takeAll(t, s.limiter, tight.For("c"))
	require.NotEqual(t, before, logged(), "what is taken is logged")
}

// A new table has no statistics, and plans are cached. A plan without the primary key would make each call read all rows for as
// long.
func TestStatementsUseThePrimaryKeyOfATableThatIsNew(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "a database for each statement; TestStatementsUseThePrimaryKey has them all on one")
	for _, rows := range []int{0, 100, 3000} {
		for file, parameters := range map[string]string{
			"bucket_take_alone.sql": oneBucket + `, 1, 10, 10, 1, 1000000, 0, 0, NULL, 60000000, 0, 9000000000000000000`,
			"buckets_spend.sql":     `'roomy', '{"key 17","key 18","key 99999"}', '{0,0,0}', '{1,1,1}', 10, 10, 1, 1000000, '{0,0,0}', NULL, 60000000, 0, 9000000000000000000`,
			"buckets_read.sql":      threeBuckets + `, NULL`,
			"buckets_lock_free.sql": threeBuckets + `, '{10,10,10}', '{1,1,1}', '{0,0,0}', NULL`,
		} {
			t.Run(fmt.Sprint(file, " ", rows), func(t *testing.T) {
				t.Parallel()
				b := setup(t, oneConnection)
				b.exec(t, `INSERT INTO ratelimit.buckets SELECT 'roomy', 'key ' || n, 0, 5, 0 FROM generate_series(1, $1) AS n`, rows)
				statement, err := os.ReadFile("../internal/store/sql/" + file)
				require.NoError(t, err)
				b.exec(t, "SET plan_cache_mode = force_generic_plan")
				b.exec(t, "PREPARE statement AS "+string(statement))
				var explained []byte
				require.NoError(t, b.pool.QueryRow(t.Context(), "EXPLAIN (FORMAT JSON) EXECUTE statement("+parameters+")").Scan(&explained))
				p := plan{t: t}
				p.read(explained)
				require.Positive(t, p.reads, "%s", explained)
			})
		}
	}
}
