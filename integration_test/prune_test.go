package integration_test

import (
	"context"
	"fmt"
	"hash/fnv"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

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

// Prune deletes exactly the full buckets of its limits, but no row of a wrong clock, and a bounded number of rows at
// once. It waits for no row.
func TestPruneDeletesTheFullRows(t *testing.T) {
	t.Parallel()
	const idle, owing, others, perStep = 8_000, 500, 300, 32 * 80 // rows of so many blocks, and more
	for _, on := range []backend{onPostgres, byRoutedStatements} {
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
			if on.name != byRoutedStatements.name { // where a statement names one row
				require.LessOrEqual(t, slices.Max(traced.rows), int64(perStep))
				require.Greater(t, len(traced.rows), idle/perStep)
			}
			release()
			delete(left, "quick idle")
			prune(1)
		})
	}
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

// An attacker with a new key for each call creates no rows if a coarser limit in the same call refuses. Otherwise Prune
// deletes the rows later, and the next keys use the room in the table.
func TestAnAttackerWithManyKeys(t *testing.T) {
	t.Parallel()
	keys, attackers := testkit.Sized(500, 5000), 64
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
		testkit.Nightly(t, "the size of a table depends on vacuum")
		require.Less(t, before/keys, 800, "bytes a key: the general way makes a row and then writes what is left of it")
		require.LessOrEqual(t, size(), before*3/2, "the index keeps pages for the keys before")
	})
}
