// Package driver_test runs the tests of package sqllimit for every driver of database/sql: pgx's stdlib, a driver that hides its
// connections, and lib/pq.
package driver_test

import (
	"context"
	"database/sql"
	"net"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/internal/roundtrips"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/sqllimit"
)

// dial makes a connection.
type dial func(ctx context.Context, network, address string) (net.Conn, error)

// testedDriver is the driver that the tests are run with.
type testedDriver struct {
	// Open returns a database whose connections are made by dial.
	Open func(t testing.TB, url string, dial dial) *sql.DB
	// IsPgx is whether the connections of pgx can be reached.
	IsPgx bool
	// IsOwn reports whether an error holds the driver's own, beside the error that the core looks for. It is nil for drivers of pgx.
	IsOwn func(err error) bool
	// Prepares is whether the driver prepares a statement once, and each later run takes one round trip.
	Prepares bool
}

// limits are the limits of the tests.
type limits struct {
	fifty, five, one, wide, owing, windows, sliding, days, slots ratelimit.Limit
}

func define() limits {
	return limits{
		fifty:   ratelimit.Define("fifty", world.Hoard(50)),
		five:    ratelimit.Define("five", world.Hoard(5)),
		one:     ratelimit.Define("one", world.Hoard(1)),
		wide:    ratelimit.Define("wide", ratelimit.TokenBucket{Rate: 50, Period: world.Century, Shards: 4}),
		owing:   ratelimit.Define("owing", ratelimit.TokenBucket{Rate: 7, Period: 3 * time.Second, Capacity: 10, MaxReserved: 30}),
		windows: ratelimit.Define("windows", ratelimit.FixedWindow{Rate: 10, Period: time.Hour}),
		sliding: ratelimit.Define("sliding", ratelimit.SlidingWindow{Rate: 10, Period: time.Hour}),
		days:    ratelimit.Define("days", ratelimit.CalendarWindow{Rate: 10, Resets: ratelimit.Daily, Zone: "Europe/Berlin"}),
		slots:   ratelimit.Define("slots", ratelimit.Concurrency{Most: 3, Lease: time.Minute}),
	}
}

// bundle is a database of the test's own, and limiters on it.
type bundle struct {
	limits
	driver  testedDriver
	db      *sql.DB
	limiter *ratelimit.Limiter // on db
	pool    *pgxpool.Pool
	ofPgx   *ratelimit.Limiter // on pool
	wire    *roundtrips.Counter
}

func setup(t *testing.T, d testedDriver) *bundle {
	t.Helper()
	w := world.New(t)
	b := &bundle{limits: define(), driver: d, pool: w.Pool, ofPgx: w.Limiter, wire: &roundtrips.Counter{}}
	b.db = d.Open(t, w.URL(), b.wire.Dial)
	t.Cleanup(func() { _ = b.db.Close() })
	var err error
	b.limiter, err = sqllimit.New(b.db, ratelimit.Config{Timeout: 5 * time.Minute})
	require.NoError(t, err)
	w.Exec(t, `CREATE TABLE public.messages (author text NOT NULL)`)
	return b
}

// begin begins a transaction of the test's own, which is rolled back if it is still open at the end.
func (b *bundle) begin(t *testing.T, level sql.IsolationLevel) *sql.Tx {
	t.Helper()
	tx, err := b.db.BeginTx(context.WithoutCancel(t.Context()), &sql.TxOptions{Isolation: level})
	require.NoError(t, err)
	t.Cleanup(func() { _ = tx.Rollback() })
	return tx
}

// tokens returns what a bucket holds.
func (b *bundle) tokens(t *testing.T, r ratelimit.Request) float64 {
	t.Helper()
	v, err := b.ofPgx.Value(t.Context(), r)
	require.NoError(t, err)
	return v.Tokens
}

// messages returns how many were written.
func (b *bundle) messages(t *testing.T) (n int) {
	t.Helper()
	require.NoError(t, b.pool.QueryRow(t.Context(), `SELECT count(*) FROM public.messages`).Scan(&n))
	return n
}

// run runs the tests with a driver.
func run(t *testing.T, d testedDriver) {
	t.Helper()
	tests := map[string]func(t *testing.T, b *bundle){
		"ExactAtOnce":                       exactAtOnce,
		"RollbackGivesBack":                 rollbackGivesBack,
		"RefusalLeavesTheTransactionUsable": refusalLeavesUsable,
		"AbortedTransaction":                abortedTransaction,
		"EndedTransaction":                  endedTransaction,
		"EndedContext":                      endedContext,
		"NoTransaction":                     noTransaction,
		"ConnectionWithATransaction":        connectionWithATransaction,
		"InTxThatIsNone":                    inTxThatIsNone,
		"NothingIsRunTwice":                 nothingIsRunTwice,
		"SameAnswersAsPgx":                  sameAnswersAsPgx,
		"RoundTrips":                        roundTrips,
	}
	for name, test := range inTxCases {
		tests[name] = test.run
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, setup(t, d))
		})
	}
}
