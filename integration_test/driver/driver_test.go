// Package driver_test runs the tests of package sqllimit for every driver of database/sql: pgx's stdlib, a driver that hides its
// connections, and lib/pq.
package driver_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/lib/pq"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/internal/roundtrips"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/sqllimit"
)

// dial makes a connection.
type dial func(ctx context.Context, network, address string) (net.Conn, error)

// testedDriver is a driver that the tests are run with.
type testedDriver struct {
	// connect returns a connector whose connections are made by dial.
	connect func(t *testing.T, url string, dial dial) driver.Connector
	// isPgx is whether the connections of pgx can be reached.
	isPgx bool
	// isOwn reports whether an error holds the driver's own, beside the error that the core looks for. It is nil for drivers of pgx.
	isOwn func(err error) bool
	// prepares is whether the driver prepares a statement once, and each later run takes one round trip.
	prepares bool
	isLong   bool // the short tier leaves it out
}

var drivers = map[string]testedDriver{
	"Stdlib": {isPgx: true, connect: connectPgx},
	// A driver whose connections cannot be reached, for example a tracing driver: the Limiter uses only the interface of database/sql.
	"Hidden": {prepares: true, connect: func(t *testing.T, url string, dial dial) driver.Connector {
		t.Helper()
		return hiding{connectPgx(t, url, dial)}
	}},
	"PQ": {connect: connectPQ, isOwn: func(err error) bool { return errors.As(err, new(*pq.Error)) }},
	// With binary_parameters lib/pq sends a statement and its parameters in one message.
	"PQWithBinaryParameters": {prepares: true, isLong: true, connect: func(t *testing.T, url string, dial dial) driver.Connector {
		t.Helper()
		separator := "?"
		if strings.Contains(url, separator) {
			separator = "&"
		}
		return connectPQ(t, url+separator+"binary_parameters=yes", dial)
	}},
}

// TestDrivers runs every test with every driver.
func TestDrivers(t *testing.T) {
	t.Parallel()
	tests := map[string]func(t *testing.T, b *bundle){
		"ExactAtOnce":                exactAtOnce,
		"AbortedTransaction":         abortedTransaction,
		"EndedTransaction":           endedTransaction,
		"EndedContext":               endedContext,
		"NoTransaction":              noTransaction,
		"ConnectionWithATransaction": connectionWithATransaction,
		"InTxThatIsNone":             inTxThatIsNone,
		"NothingIsRunTwice":          nothingIsRunTwice,
		"SameAnswersAsPgx":           sameAnswersAsPgx,
		"RoundTrips":                 roundTrips,
	}
	for name, test := range inTxCases {
		tests[name] = test.run
	}
	for name, d := range drivers {
		for of, test := range tests {
			t.Run(name+"/"+of, func(t *testing.T) {
				t.Parallel()
				if d.isLong {
					testsize.Long(t, "runs the tests of lib/pq again")
				}
				test(t, setup(t, d))
			})
		}
	}
}

func connectPgx(t *testing.T, url string, dial dial) driver.Connector {
	t.Helper()
	config, err := pgx.ParseConfig(url)
	require.NoError(t, err)
	config.DialFunc = pgconn.DialFunc(dial)
	return stdlib.GetConnector(*config)
}

// hiding is a driver that shows no more of another's connections than it has to.
type hiding struct{ driver.Connector }

// Connect connects.
func (h hiding) Connect(ctx context.Context) (driver.Conn, error) {
	of, err := h.Connector.Connect(ctx)
	if err != nil {
		return nil, err
	}
	return hidden{of, of.(driver.ConnBeginTx), of.(driver.ExecerContext), of.(driver.QueryerContext), of.(driver.SessionResetter)}, nil
}

// hidden is a connection, without the methods that only pgx has.
type hidden struct {
	driver.Conn
	driver.ConnBeginTx
	driver.ExecerContext
	driver.QueryerContext
	driver.SessionResetter
}

func connectPQ(t *testing.T, url string, dial dial) driver.Connector {
	t.Helper()
	connector, err := pq.NewConnector(url)
	require.NoError(t, err)
	connector.Dialer(dialing{dial: dial})
	return connector
}

// dialing has lib/pq make connections with a function.
type dialing struct {
	pq.Dialer // is not used, because there is DialContext

	dial dial
}

func (d dialing) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	return d.dial(ctx, network, address)
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
	b.db = sql.OpenDB(d.connect(t, w.URL(), b.wire.Dial))
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
