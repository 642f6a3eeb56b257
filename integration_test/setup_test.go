// Package integration_test holds tests of the public API against a real server: the promises about races, isolation
// levels, transactions, clocks and plans.
package integration_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

const century = world.Century

// bundle is a database of the test's own and a limiter on it.
type bundle struct {
	pool    *pgxpool.Pool
	memory  *ratelimittest.DB // in place of the pool, in tests of promises of both backends
	limiter *ratelimit.Limiter
	schema  string
}

// setup returns a bundle on Postgres.
func setup(t *testing.T, configure ...func(*pgxpool.Config)) *bundle {
	t.Helper()
	return onPostgres.setup(t, configure...)
}

// setupOwn is setup on a server of the test's own.
func setupOwn(t *testing.T, settings map[string]string, configure ...func(*pgxpool.Config)) *bundle {
	t.Helper()
	b := open(t, postgrestest.StartOwn(t, settings).URL(), configure...)
	require.NoError(t, migrations.Up(t.Context(), b.pool, migrations.Config{}))
	return b
}

// quiet is a server on which one test runs at a time. It logs nothing by itself.
var (
	quiet = postgrestest.NewShared(func(ctx context.Context) (*postgrestest.Server, error) {
		return postgrestest.Start(ctx, postgrestest.Options{Own: true, Settings: map[string]string{
			"autovacuum": "off", "checkpoint_timeout": "1h", "wal_level": "minimal", "max_wal_senders": "0",
		}})
	})
	quietly sync.Mutex
)

// setupQuiet is setup on the quiet server, for tests that would notice others: SERIALIZABLE transactions of another
// database count as neighbours, and the log of changes is one for all databases.
func setupQuiet(t *testing.T, configure ...func(*pgxpool.Config)) *bundle {
	t.Helper()
	quietly.Lock()
	t.Cleanup(quietly.Unlock)
	return open(t, quiet.NewDatabase(t), configure...)
}

// open returns a bundle on the database at url.
func open(t *testing.T, url string, configure ...func(*pgxpool.Config)) *bundle {
	t.Helper()
	w := world.Open(t, url, configure...)
	return &bundle{pool: w.Pool, limiter: w.Limiter, schema: "ratelimit"}
}

// planModes are the values of plan_cache_mode.
var planModes = []string{"auto", "force_generic_plan", "force_custom_plan"}

// planning is for a pool's configuration: one session prepares all statements, and plans them as mode says. Outside of
// explicit transactions it is not SERIALIZABLE, and leaves no lock behind.
func planning(mode string) func(*pgxpool.Config) {
	return func(c *pgxpool.Config) {
		c.MaxConns = 1
		c.ConnConfig.RuntimeParams["plan_cache_mode"] = mode
		c.ConnConfig.RuntimeParams["default_transaction_isolation"] = "read committed"
	}
}

// with returns another limiter on the same rows. Its calls have the time that they take on a busy machine, unless the
// configuration says otherwise.
func (b *bundle) with(t *testing.T, config ratelimit.Config) *ratelimit.Limiter {
	t.Helper()
	if config.Timeout == 0 {
		config.Timeout = 10 * time.Minute
	}
	limiter, err := ratelimit.New(b.db(), config)
	require.NoError(t, err)
	return limiter
}

// row is a stored bucket.
type row struct {
	Name, Key string
	Value     float64
	TS        int64 // microseconds since 1970
	Bits      string
}

// db returns the pool of the bundle's limiters.
func (b *bundle) db() ratelimit.Pool {
	if b.memory != nil {
		return b.memory
	}
	return b.pool
}

// rows returns the buckets whose keys have a prefix, in the order of the primary key. Bits are the value to the
// last bit, so that two answers are equal only when the rows are.
func (b *bundle) rows(t *testing.T, keys string) []row {
	t.Helper()
	if b.memory != nil {
		return rowsInMemory(b.memory, keys)
	}
	found, err := b.pool.Query(t.Context(), fmt.Sprintf(`
		SELECT name, key, value, ts, encode(float8send(value), 'hex') AS bits
		FROM %s.buckets WHERE starts_with(key, $1) ORDER BY name, key, shard`, b.schema), keys)
	require.NoError(t, err)
	rows, err := pgx.CollectRows(found, pgx.RowToStructByPos[row])
	require.NoError(t, err)
	return rows
}

// row returns the one bucket of a name and key, which must be there.
func (b *bundle) row(t *testing.T, name, key string) row {
	t.Helper()
	for _, r := range b.rows(t, key) {
		if r.Name == name && r.Key == key {
			return r
		}
	}
	require.Failf(t, "no such bucket", "%s %q", name, key)
	return row{}
}

// held returns the sum of the rows of a bucket, without the tokens that have arrived since.
func (b *bundle) held(t *testing.T, name, key string) (tokens float64) {
	t.Helper()
	if b.memory != nil {
		for _, r := range rowsInMemory(b.memory, key) {
			if r.Name == name && r.Key == key {
				tokens += r.Value
			}
		}
		return tokens
	}
	require.NoError(t, b.pool.QueryRow(t.Context(),
		fmt.Sprintf(`SELECT sum(value) FROM %s.buckets WHERE name = $1 AND key = $2`, b.schema), name, key).Scan(&tokens))
	return tokens
}

// begin returns a transaction that does not outlive the test: it would keep the pool from closing.
func (b *bundle) begin(t *testing.T, level pgx.TxIsoLevel) pgx.Tx {
	t.Helper()
	tx, err := b.db().BeginTx(t.Context(), pgx.TxOptions{IsoLevel: level})
	require.NoError(t, err)
	t.Cleanup(func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) })
	return tx
}

func (b *bundle) exec(t *testing.T, sql string, arguments ...any) {
	t.Helper()
	_, err := b.pool.Exec(t.Context(), sql, arguments...)
	require.NoError(t, err)
}

func hoard(capacity float64) ratelimit.TokenBucket { return world.Hoard(capacity) }

var levels = []struct {
	name  string
	level pgx.TxIsoLevel
}{
	{"ReadCommitted", pgx.ReadCommitted},
	{"RepeatableRead", pgx.RepeatableRead},
	{"Serializable", pgx.Serializable},
}

func requireAllowed(t *testing.T, call verb, limiter *ratelimit.Limiter) {
	t.Helper()
	allowed, err := call(t.Context(), limiter)
	require.NoError(t, err)
	require.True(t, allowed)
}

// requireRefused checks that a Take is refused, and says for how long.
func requireRefused(t *testing.T, limiter *ratelimit.Limiter, requests []ratelimit.Request) {
	t.Helper()
	d, err := limiter.Take(t.Context(), requests...)
	require.NoError(t, err)
	require.False(t, d.Allowed)
	require.Positive(t, d.RetryAfter)
}

const patient = world.Patient

// representative skips a row of a table in the short tier, unless it is one of those named.
func representative(t *testing.T, row string, named ...string) {
	t.Helper()
	if !slices.Contains(named, row) {
		testkit.Long(t, "a row of a table of which the short tier runs others")
	}
}

func eventually(t *testing.T, what string, done func() bool) {
	t.Helper()
	world.Eventually(t, what, done)
}

// lastSession closes pool, and returns the only connection to its database. Sessions report to the server's statistics
// at the latest when they end.
func lastSession(t *testing.T, pool *pgxpool.Pool) *pgx.Conn {
	t.Helper()
	config := pool.Config().ConnConfig
	pool.Close()
	conn, err := pgx.ConnectConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
	eventually(t, "the pool's sessions end", func() (alone bool) {
		require.NoError(t, conn.QueryRow(t.Context(), `
			SELECT count(*) = 1 FROM pg_stat_activity
			WHERE datname = current_database() AND backend_type = 'client backend'`).Scan(&alone))
		return alone
	})
	return conn
}

// No test leaves a goroutine behind, also after faults.
func TestMain(m *testing.M) { testkit.Main(m) }

// tracing is a tracer that is called with each statement before pgx sends it.
type tracing func(sql string)

func (f tracing) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	if f != nil {
		f(data.SQL)
	}
	return ctx
}

func (tracing) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func (f tracing) TraceBatchStart(ctx context.Context, conn *pgx.Conn, data pgx.TraceBatchStartData) context.Context {
	for _, query := range data.Batch.QueuedQueries {
		f.TraceQueryStart(ctx, conn, pgx.TraceQueryStartData{SQL: query.SQL})
	}
	return ctx
}

func (tracing) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}
func (tracing) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData)     {}
