package integration_test

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
	"github.com/pgratelimit/pgratelimit/internal/engine/memory"
	"github.com/pgratelimit/pgratelimit/internal/engine/store"
	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

// backend is a way to store the buckets of a test.
type backend struct {
	name   string
	isLong bool // the short tier leaves it out
	open   func(t *testing.T, b *bundle, configure []func(*pgxpool.Config))
}

// setup returns a bundle on the backend.
func (on backend) setup(t *testing.T, configure ...func(*pgxpool.Config)) *bundle {
	t.Helper()
	b := &bundle{schema: "ratelimit"}
	on.open(t, b, configure)
	b.limiter = b.with(t, ratelimit.Config{})
	return b
}

var (
	onPostgres = backend{name: "Postgres", open: func(t *testing.T, b *bundle, configure []func(*pgxpool.Config)) {
		t.Helper()
		b.pool = postgrestest.New(t, configure...)
	}}

	// inMemory has no pool, so it ignores configure.
	inMemory = backend{name: "Memory", open: func(_ *testing.T, b *bundle, _ []func(*pgxpool.Config)) { b.memory = ratelimittest.NewDB() }}

	// byRoutedStatements sends the statements for Citus to plain Postgres, and checks that each of them names one row.
	byRoutedStatements = backend{name: "Routed", isLong: true, open: func(t *testing.T, b *bundle, configure []func(*pgxpool.Config)) {
		t.Helper()
		var several atomic.Int64 // statements on several rows
		b.pool = postgrestest.New(t, append(configure, func(c *pgxpool.Config) {
			c.ConnConfig.Tracer = tracing(func(sql string) {
				if namesRowsByArrays(sql) {
					several.Add(1)
				}
			})
		})...)
		t.Cleanup(func() { require.Zero(t, several.Load(), "each statement names one row") })
		b.seemDistributed(t)
	}}
)

// namesRowsByArrays reports whether a statement finds rows by arrays. The check of row level security reads an array of
// the catalog.
func namesRowsByArrays(sql string) bool {
	return strings.Contains(strings.ReplaceAll(sql, "pg_catalog.unnest(", ""), "unnest(")
}

// seemDistributed makes a table by which Limiters believe that Citus distributes the buckets, as its catalog does: they
// send the statements that name one row each, which are plain SQL.
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

// onEach runs a test on each of the backends.
func onEach(t *testing.T, test func(t *testing.T, on backend), backends ...backend) {
	t.Helper()
	for _, on := range backends {
		t.Run(on.name, func(t *testing.T) {
			t.Parallel()
			if on.isLong {
				testkit.Long(t, "the short tier leaves out this backend")
			}
			test(t, on)
		})
	}
}

// rowsInMemory returns the buckets of db whose keys have a prefix, as the method rows does.
func rowsInMemory(db *ratelimittest.DB, keys string) (rows []row) {
	engine, _ := store.EngineOf(db).(*memory.Tx)
	all := engine.Buckets()
	order := slices.SortedFunc(maps.Keys(all), bucket.Key.Compare)
	for _, k := range order {
		if strings.HasPrefix(k.Key, keys) {
			s := all[k]
			rows = append(rows, row{Name: k.Name, Key: k.Key, Value: s.Value, TS: s.TS, Bits: fmt.Sprintf("%016x", math.Float64bits(s.Value))})
		}
	}
	return rows
}
