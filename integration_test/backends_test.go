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

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/memstore"
	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/store"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

// partitions is the number of partitions of the buckets of inPartitions.
const partitions = 4

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

	inPartitions = backend{name: "Partitions", isLong: true, open: func(t *testing.T, b *bundle, configure []func(*pgxpool.Config)) {
		t.Helper()
		b.pool = postgrestest.NewPartitioned(t, partitions, configure...)
	}}

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

// onEach runs a test on each of the backends.
func onEach(t *testing.T, test func(t *testing.T, on backend), backends ...backend) {
	t.Helper()
	for _, on := range backends {
		t.Run(on.name, func(t *testing.T) {
			t.Parallel()
			if on.isLong {
				testsize.Long(t, "the short tier leaves out this backend")
			}
			test(t, on)
		})
	}
}

// rowsInMemory returns the buckets of db whose keys have a prefix, as the method rows does.
func rowsInMemory(db *ratelimittest.DB, keys string) (rows []row) {
	engine, _ := store.EngineOf(db).(*memstore.Tx)
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
