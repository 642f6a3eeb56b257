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

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/roundtrips"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/sqllimit"
)

// testedDriver is the driver that the tests are run with.
type testedDriver struct {
	// Open returns a database whose connections are made by dial.
	Open func(t testing.TB, url string, dial func(ctx context.Context, network, address string) (net.Conn, error)) *sql.DB
	// IsPgx is whether the connections of pgx can be reached.
	IsPgx bool
	// Prepares is whether the driver prepares a statement once, and each later run takes one round trip.
	Prepares bool
}

const century = 36525 * ratelimit.Day

// hoard is a policy that gains no token while a test runs.
func hoard(capacity float64) ratelimit.Policy {
	return ratelimit.TokenBucket{Rate: capacity, Period: century}
}

// limits are the limits of the tests.
type limits struct {
	fifty, five, one, wide, owing, windows, sliding, days, slots ratelimit.Limit
}

func define() limits {
	return limits{
		fifty:   ratelimit.Define("fifty", hoard(50)),
		five:    ratelimit.Define("five", hoard(5)),
		one:     ratelimit.Define("one", hoard(1)),
		wide:    ratelimit.Define("wide", ratelimit.TokenBucket{Rate: 50, Period: century, Shards: 4}),
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
	url     string
	db      *sql.DB
	limiter *ratelimit.Limiter // on db
	pool    *pgxpool.Pool
	ofPgx   *ratelimit.Limiter // on pool
	wire    *roundtrips.Counter
}

func setup(t *testing.T, d testedDriver) *bundle {
	t.Helper()
	b := &bundle{limits: define(), driver: d, url: postgrestest.NewDatabase(t), wire: &roundtrips.Counter{}}
	b.db = d.Open(t, b.url, b.wire.Dial)
	t.Cleanup(func() { _ = b.db.Close() })
	var err error
	b.pool, err = pgxpool.New(t.Context(), b.url)
	require.NoError(t, err)
	t.Cleanup(b.pool.Close)
	config := ratelimit.Config{Timeout: 5 * time.Minute}
	b.limiter, err = sqllimit.New(b.db, config)
	require.NoError(t, err)
	b.ofPgx, err = ratelimit.New(b.pool, config)
	require.NoError(t, err)
	_, err = b.pool.Exec(t.Context(), `CREATE TABLE public.messages (author text NOT NULL, body text NOT NULL DEFAULT '')`)
	require.NoError(t, err)
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
	for name, test := range map[string]func(t *testing.T, b *bundle){
		"ExactInTransactions":               exactInTransactions,
		"ExactOutsideTransactions":          exactOutsideTransactions,
		"ExactOverShards":                   exactOverShards,
		"RollbackGivesBack":                 rollbackGivesBack,
		"SeveralLimitsAllOrNothing":         severalLimitsAllOrNothing,
		"RefusalLeavesTheTransactionUsable": refusalLeavesUsable,
		"BadInputLeavesTheTransaction":      badInputLeavesUsable,
		"SavepointOfTheCaller":              savepointOfTheCaller,
		"AbortedTransaction":                abortedTransaction,
		"EndedTransaction":                  endedTransaction,
		"EndedContext":                      endedContext,
		"EndOfTheTransactionsContext":       endOfTheTransactionsContext,
		"NoTransaction":                     noTransaction,
		"ConnectionWithATransaction":        connectionWithATransaction,
		"InTxCommits":                       inTxCommits,
		"InTxRollsBack":                     inTxRollsBack,
		"InTxAgainAtAStatement":             inTxAgainAtAStatement,
		"InTxAgainAtCommit":                 inTxAgainAtCommit,
		"InTxCommitUnknown":                 inTxCommitUnknown,
		"InTxAfterALostConnection":          inTxAfterALostConnection,
		"InTxSwallowedError":                inTxSwallowedError,
		"InTxEndedByTheFunction":            inTxEndedByTheFunction,
		"InTxEndedBySQL":                    inTxEndedBySQL,
		"InTxWithAnotherLimiter":            inTxWithAnotherLimiter,
		"InTxContended":                     inTxContended,
		"NothingIsRunTwice":                 nothingIsRunTwice,
		"ReservationsThroughTheirLife":      reservationsThroughTheirLife,
		"SameAnswersAsPgx":                  sameAnswersAsPgx,
		"SameBitsAsPgx":                     sameBitsAsPgx,
		"RoundTrips":                        roundTrips,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, setup(t, d))
		})
	}
}
