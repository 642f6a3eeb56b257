package integration_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// inPartitions18 reports whether the buckets are in partitions of PostgreSQL 18, where a Limiter's statements name one row each.
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

// namesRowsByArrays reports whether a statement finds rows by arrays. The check of row level security reads an array of the catalog.
func namesRowsByArrays(sql string) bool {
	return strings.Contains(strings.ReplaceAll(sql, "pg_catalog.unnest(", ""), "unnest(")
}

var changesRows = regexp.MustCompile(`\b(INSERT|UPDATE|DELETE)\b`) // also FOR NO KEY UPDATE

// PostgreSQL 18.4 ends by a segmentation fault if a statement that locks or changes rows looks them up in partitions and finds one changed
// meanwhile. So no such statement is sent there.
func TestInPartitionsOfPostgres18EachStatementThatLocksNamesOneRow(t *testing.T) {
	t.Parallel()
	var several atomic.Int64
	b := inPartitions.setup(t, func(c *pgxpool.Config) {
		c.ConnConfig.Tracer = tracing(func(sql string) {
			if namesRowsByArrays(sql) && changesRows.MatchString(sql) {
				several.Add(1)
			}
		})
	})
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

// deletions is a tracer that counts the rows that each statement of Prune deletes.
type deletions struct {
	tracing // none
	mu      sync.Mutex
	rows    []int64
}

func (d *deletions) TraceQueryEnd(_ context.Context, _ *pgx.Conn, data pgx.TraceQueryEndData) {
	if data.CommandTag.Delete() {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.rows = append(d.rows, data.CommandTag.RowsAffected())
	}
}

// Prune deletes exactly the full buckets of its limits, but no row of a wrong clock, and a bounded number of rows at once. It waits for no
// row.
func TestPruneDeletesTheFullRows(t *testing.T) {
	t.Parallel()
	const idle, owing, others, perStep = 8_000, 500, 300, 32 * 80 // rows of so many blocks, and more
	for _, on := range []backend{onPostgres, inPartitions, byRoutedStatements} {
		t.Run(on.name, func(t *testing.T) {
			t.Parallel()
			traced := &deletions{}
			b := on.setup(t, func(c *pgxpool.Config) { c.ConnConfig.Tracer = traced })
			quick, twin := ratelimit.Define("quick", ratelimit.PerSecond(10)), ratelimit.Define("twin", ratelimit.PerSecond(10))
			b.exec(t, `INSERT INTO ratelimit.buckets SELECT 'quick', 'idle' || n, 0, 10, 0, 10 FROM generate_series(1, $1::integer) AS n
				UNION ALL SELECT 'quick', 'owing' || n, 0, -1e12, 0, 10 FROM generate_series(1, $2::integer) AS n
				UNION ALL SELECT 'other', 'idle' || n, 0, 10, 0, 10 FROM generate_series(1, $3::integer) AS n
				UNION ALL SELECT 'twin', 'idle' || n, 0, 10, 0, 10 FROM generate_series(1, $3::integer) AS n
				UNION ALL SELECT 'twin', 'ahead', 0, 10, 253402300799999999, 10`, idle, owing, others)
			release := b.holdRow(t, "quick", "idle7")
			left := map[string]int{"quick idle": 1, "quick owing": owing, "other idle": others, "twin ahead": 1}
			prune := func(want int64) {
				t.Helper()
				deleted, err := b.limiter.Prune(t.Context(), quick, twin)
				require.NoError(t, err)
				require.Equal(t, want, deleted)
				rows, err := b.pool.Query(t.Context(), `SELECT name || ' ' || rtrim(key, '0123456789'), count(*) FROM ratelimit.buckets GROUP BY 1`)
				require.NoError(t, err)
				found := make(map[string]int)
				var kind string
				var count int
				_, err = pgx.ForEachRow(rows, []any{&kind, &count}, func() error { found[kind] = count; return nil })
				require.NoError(t, err)
				require.Equal(t, left, found)
			}
			prune(idle + others - 1)
			if on.name != byRoutedStatements.name && !b.inPartitions18(t) { // where a statement names one row
				require.LessOrEqual(t, slices.Max(traced.rows), int64(perStep))
				require.Greater(t, len(traced.rows), idle/perStep)
			}
			release()
			delete(left, "quick idle")
			prune(1)
		})
	}
}

// While the table is made anew, calls wait, and nothing that they take is lost, nor taken twice.
func TestPartitionBesideTraffic(t *testing.T) {
	t.Parallel()
	const workers, calls, capacity = 4, 60, 1e4
	ctx := t.Context()
	b := setup(t, func(c *pgxpool.Config) { c.MaxConns = 12 })
	b.exec(t, `INSERT INTO ratelimit.buckets SELECT 'idle', 'k' || n, 0, 1, 1, 1 FROM generate_series(1, 5000) AS n`)
	alone, shared := ratelimit.Define("alone", hoard(capacity)), ratelimit.Define("shared", hoard(capacity)).For("all")
	window := ratelimit.Define("window", ratelimit.SlidingWindow{Rate: capacity, Period: century})
	numbers := []int{5, 2, 1, 3}
	if server18(t, b.pool) { // there no Limiter may go on that has found one table
		require.NoError(t, migrations.Partition(ctx, b.pool, migrations.Config{Partitions: numbers[0]}))
		numbers = []int{2, 4, 3}
	}
	partitioned := make(chan error, 1)
	go func() {
		var err error
		for _, n := range numbers {
			err = errors.Join(err, migrations.Partition(ctx, b.pool, migrations.Config{Partitions: n}))
		}
		partitioned <- err
	}()
	require.NoError(t, atonce.Do(workers, func(int) error {
		for i := range calls {
			key := fmt.Sprint("key ", i%7)
			call := []verb{taking(alone.For(key)), taking(alone.For(key), shared, window.For(key)), inTx(taking(alone.For(key), shared))}[i%3]
			if err := errOf(call(ctx, b.limiter)); err != nil {
				return err
			}
		}
		return nil
	}))
	require.NoError(t, <-partitioned)
	var spent float64
	require.NoError(t, b.pool.QueryRow(ctx, `SELECT sum($1 - value) FROM ratelimit.buckets WHERE name = 'alone'`, capacity).Scan(&spent))
	require.InDelta(t, workers*calls, spent, 0.01, "of the policy of a century next to nothing arrives")
	require.Equal(t, 5000, b.count(t, `SELECT count(*) FROM ratelimit.buckets WHERE name = 'idle'`))
	is, err := migrations.Partitions(ctx, b.pool, migrations.Config{})
	require.NoError(t, err)
	require.Equal(t, 3, is)
}

// A statement that finds rows by their TIDs never reads the whole table, also without statistics.
func TestStatementsByTIDDoNotScanTheTable(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, on backend) {
		t.Helper()
		b := on.setup(t)
		b.exec(t, `DO $$ DECLARE leaf regclass; BEGIN
			FOR leaf IN SELECT oid FROM pg_class WHERE relname LIKE 'buckets%' AND relkind = 'r' LOOP
				EXECUTE format('ALTER TABLE %s SET (autovacuum_enabled = false)', leaf);
			END LOOP; END $$`)
		b.exec(t, `INSERT INTO ratelimit.buckets SELECT 'roomy', 'key ' || n, 0, 5, 0, 5 FROM generate_series(1, 30000) AS n`)
		for file, parameters := range map[string]string{
			"buckets_prune.sql":  `'roomy', '{10,20}', '{1,2}', '{1,1}', '{1000000,1000000}', 32, 64, 60000000, NULL`,
			"buckets_unmake.sql": threeBuckets,
			"clusters_spend.sql": threeClusters,
		} {
			statement, err := os.ReadFile("../internal/store/sql/" + file)
			require.NoError(t, err)
			for _, analyzed := range []bool{false, true} {
				for _, mode := range []string{"force_generic_plan", "force_custom_plan"} {
					name := file + "/" + mode
					if analyzed {
						name += "/Analyzed"
					}
					t.Run(name, func(t *testing.T) { // not parallel: the statistics are of the whole server
						conn, err := pgx.ConnectConfig(t.Context(), b.pool.Config().ConnConfig)
						require.NoError(t, err)
						defer conn.Close(t.Context())
						tx, err := conn.Begin(t.Context())
						require.NoError(t, err)
						if analyzed {
							_, err = tx.Exec(t.Context(), "ANALYZE ratelimit.buckets")
							require.NoError(t, err)
						}
						_, err = tx.Exec(t.Context(), "SET LOCAL plan_cache_mode = "+mode)
						require.NoError(t, err)
						_, err = tx.Exec(t.Context(), "PREPARE statement AS "+string(statement))
						require.NoError(t, err)
						var explained []byte
						require.NoError(t, tx.QueryRow(t.Context(), "EXPLAIN (FORMAT JSON) EXECUTE statement("+parameters+")").Scan(&explained))
						var roots []struct{ Plan node }
						require.NoError(t, json.Unmarshal(explained, &roots))
						requireNoWholeTable(t, roots[0].Plan, string(explained))
						require.NoError(t, tx.Rollback(t.Context()))
					})
				}
			}
		}
	}, onPostgres, inPartitions)
}

func requireNoWholeTable(t *testing.T, n node, explained string) {
	t.Helper()
	if strings.HasPrefix(n.Relation, "buckets") { // or a partition
		switch n.Type {
		case "ModifyTable", "Tid Scan", "Tid Range Scan":
		case "Index Scan", "Index Only Scan":
			require.Contains(t, n.Cond, "key = ", explained)
		default:
			require.Failf(t, "the table is read otherwise", "%s\n%s", n.Type, explained)
		}
	}
	for _, child := range n.Plans {
		requireNoWholeTable(t, child, explained)
	}
}

// seemDistributed makes a table by which Limiters believe that Citus distributes the buckets, as its catalog does: they send the
// statements that name one row each, which are plain SQL.
func (b *bundle) seemDistributed(t *testing.T) {
	t.Helper()
	if !isOnCitus(t, b) {
		b.exec(t, `SET allow_system_table_mods = on; CREATE TABLE pg_catalog.pg_dist_partition (logicalrelid regclass);
			INSERT INTO pg_catalog.pg_dist_partition VALUES ('ratelimit.buckets'); RESET allow_system_table_mods`)
	}
}

// setupRouted is setup with buckets that seem to be distributed.
func setupRouted(t *testing.T) *bundle {
	t.Helper()
	b := setup(t, func(c *pgxpool.Config) { c.MaxConns = 2 * racers })
	b.seemDistributed(t)
	b.limiter = b.with(t, ratelimit.Config{})
	return b
}

func isOnCitus(t *testing.T, b *bundle) (isThere bool) {
	t.Helper()
	require.NoError(t, b.pool.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_extension WHERE extname = 'citus')`).Scan(&isThere))
	return isThere
}

// TestRoutedStatementsRefuseWithoutWaiting promises that a refusal outside of a transaction waits for no row of several.
func TestRoutedStatementsRefuseWithoutWaiting(t *testing.T) {
	t.Parallel()
	b := setupRouted(t)
	limit := ratelimit.Define("once", hoard(1))
	d, err := b.limiter.Take(t.Context(), limit.For("k"))
	require.NoError(t, err)
	require.True(t, d.Allowed)
	blocker := b.begin(t, pgx.ReadCommitted)
	_, err = blocker.Exec(t.Context(), `SELECT FROM ratelimit.buckets WHERE key = 'k' FOR NO KEY UPDATE`)
	require.NoError(t, err)
	two := ratelimit.Define("twice", hoard(1))
	d, err = b.limiter.Take(t.Context(), limit.For("k"), two.For("k"))
	require.NoError(t, err)
	require.False(t, d.Allowed)
}

// A process does not prune a schema while another one does, which holds the schema's advisory lock.
func TestPruneRunsOnceAtATimeInASchema(t *testing.T) {
	t.Parallel()
	b := setup(t)
	require.NoError(t, migrations.Up(t.Context(), b.pool, migrations.Config{Schema: "other"}))
	elsewhere := b.with(t, ratelimit.Config{Schema: "other"})
	for _, schema := range []string{"ratelimit", "other"} {
		b.exec(t, "INSERT INTO "+schema+".buckets VALUES ('quick', 'idle', 0, 10, 0, 10)")
	}
	h := fnv.New64a()
	h.Write([]byte("pgratelimit prune ratelimit"))
	another := b.begin(t, pgx.ReadCommitted)
	_, err := another.Exec(t.Context(), `SELECT pg_advisory_xact_lock($1)`, int64(h.Sum64()))
	require.NoError(t, err)
	prune := func(l *ratelimit.Limiter, deletes int64) {
		n, err := l.Prune(t.Context(), ratelimit.Define("quick", ratelimit.PerSecond(10)))
		require.NoError(t, err)
		require.Equal(t, deletes, n)
	}
	prune(b.limiter, 0)
	prune(elsewhere, 1)
	require.NoError(t, another.Rollback(t.Context()))
	prune(b.limiter, 1)
}

// using is a pool that calls use before it begins its first transaction.
type using struct {
	ratelimit.Pool
	once sync.Once
	use  func(ctx context.Context)
}

func (p *using) BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error) {
	p.once.Do(func() { p.use(ctx) })
	return p.Pool.BeginTx(ctx, options)
}

// A plan that the Limiter is first used with during a Prune counts from then on.
func TestPruneRespectsPlansUsedMeanwhile(t *testing.T) {
	t.Parallel()
	b := setup(t)
	free, vip := ratelimit.Define("plan", ratelimit.PerHour(10)), ratelimit.Define("plan", ratelimit.TokenBucket{Rate: 10, Period: century})
	now := clockNoon
	pool := &using{Pool: b.pool}
	limiter, err := ratelimit.New(pool, ratelimit.Config{NoBatching: true, AsOf: func() time.Time { return now }})
	require.NoError(t, err)
	b.exec(t, "INSERT INTO ratelimit.buckets VALUES ('plan', 'vip', 0, 5, $1, 5)", clockNoon.UnixMicro())
	now = clockNoon.Add(ratelimit.Day)
	pool.use = func(ctx context.Context) {
		_, err := limiter.Value(ctx, vip.For("vip"))
		require.NoError(t, err)
	}
	deleted, err := limiter.Prune(t.Context(), free)
	require.NoError(t, err)
	require.Zero(t, deleted, "the row is not full as a vip's")
}

// An attacker with a new key for each call creates no rows if a coarser limit in the same call refuses. Otherwise Prune deletes the rows
// later, and the next keys use the room in the table.
func TestAnAttackerWithManyKeys(t *testing.T) {
	t.Parallel()
	keys, attackers := testsize.Of(500, 5000), 64
	d := setup(t, func(c *pgxpool.Config) { c.MaxConns = 8 }).desk(t, ratelimit.Config{RefusalCache: 512})
	network := ratelimit.Define("network", ratelimit.TokenBucket{Rate: 100, Period: ratelimit.Day})
	account := ratelimit.Define("account", ratelimit.TokenBucket{Rate: 1, Period: time.Hour})
	wave := func(name string, coarser ...ratelimit.Request) int {
		var given atomic.Int64
		require.NoError(t, atonce.Do(attackers, func(attacker int) error {
			for i := attacker; i < keys; i += attackers {
				in := callers()[3] // no transaction
				if i%50 == 0 {
					in = callers()[0] // a transaction that is committed, also after a refusal
				}
				requests := append(slices.Clone(coarser), account.For(fmt.Sprintf("%s %08d", name, i)))
				decision, err := in.take(t.Context(), d.pool, d.limiter, requests...)
				if err != nil {
					return err
				}
				if decision.Allowed {
					given.Add(1)
				}
			}
			return nil
		}))
		return int(given.Load())
	}
	rows := func() int { return d.count(t, `SELECT count(*) FROM ratelimit.buckets`) }
	size := func() int { return d.count(t, `SELECT pg_total_relation_size('ratelimit.buckets')`) }
	prune := func() {
		d.clock.set(d.clock.now().Add(2 * ratelimit.Day))
		_, err := d.limiter.Prune(t.Context(), network, account)
		require.NoError(t, err)
		require.Zero(t, rows())
	}
	require.Equal(t, 100, wave("coarse", network.For("attacker")))
	require.Equal(t, 100+1, rows())
	prune()
	d.exec(t, `VACUUM FULL ratelimit.buckets`)
	require.Equal(t, keys, wave("fine"))
	require.Zero(t, wave("fine"), "each bucket is empty")
	require.Equal(t, keys, rows())
	before := size()
	prune()
	d.exec(t, `VACUUM ratelimit.buckets`)
	require.Equal(t, keys, wave("next"))
	t.Run("Sizes", func(t *testing.T) { // not parallel: it is of the same table
		testsize.Nightly(t, "the size of a table depends on vacuum")
		require.Less(t, before/keys, 800, "bytes a key: the general way makes a row and then writes what is left of it")
		require.LessOrEqual(t, size(), before*3/2, "the index keeps pages for the keys before")
	})
}
