// Package driver_test runs the tests of package sqllimit for every driver of database/sql: pgx's stdlib, a driver that
// hides its connections, and lib/pq.
package driver_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/lib/pq"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
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
	// isOwn reports whether an error holds the driver's own, beside the error that the core looks for. It is nil for
	// drivers of pgx.
	isOwn func(err error) bool
	// prepares is whether the driver prepares a statement once, and each later run takes one round trip.
	prepares bool
	isLong   bool // the short tier leaves it out
}

var drivers = map[string]testedDriver{
	"Stdlib": {isPgx: true, connect: connectPgx},
	// A driver whose connections cannot be reached, for example a tracing driver: the Limiter uses only the interface of
	// database/sql.
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

// TestDrivers runs every test with every driver. Tests of a driver share a database, one after the other, unless they
// change its tables or count its sessions' messages.
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
	own := map[string]bool{"NothingIsRunTwice": true, "SameAnswersAsPgx": true, "RoundTrips": true}
	for name, test := range inTxCases {
		tests[name], own[name] = test.run, test.prepare != ""
	}
	for name, d := range drivers {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if d.isLong {
				testkit.Long(t, "runs the tests of lib/pq again")
			}
			shared := setup(t, d)
			for of, test := range tests {
				t.Run(of, func(t *testing.T) {
					if own[of] {
						t.Parallel()
						test(t, setup(t, d))
						return
					}
					test(t, shared.emptied(t))
				})
			}
		})
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
		wide:    ratelimit.Define("wide", ratelimit.TokenBucket{Rate: 400, Period: world.Century, Shards: 4}),
		owing:   ratelimit.Define("owing", ratelimit.TokenBucket{Rate: 7, Period: 3 * time.Second, Capacity: 10, MaxReserved: 30}),
		windows: ratelimit.Define("windows", ratelimit.FixedWindow{Rate: 10, Period: time.Hour}),
		sliding: ratelimit.Define("sliding", ratelimit.SlidingWindow{Rate: 10, Period: time.Hour}),
		days:    ratelimit.Define("days", ratelimit.CalendarWindow{Rate: 10, Resets: ratelimit.Daily, Zone: "Europe/Berlin"}),
		slots:   ratelimit.Define("slots", ratelimit.Concurrency{Slots: 3, Lease: time.Minute}),
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
	wire    *testkit.RoundTrips
}

func setup(t *testing.T, d testedDriver) *bundle {
	t.Helper()
	w := world.New(t)
	b := &bundle{limits: define(), driver: d, pool: w.Pool, ofPgx: w.Limiter, wire: &testkit.RoundTrips{}}
	b.db = sql.OpenDB(d.connect(t, w.URL(), b.wire.Dial))
	t.Cleanup(func() { _ = b.db.Close() })
	w.Exec(t, `CREATE TABLE public.messages (author text NOT NULL)`)
	return b.emptied(t)
}

// emptied returns the bundle with empty tables and a new limiter.
func (b *bundle) emptied(t *testing.T) *bundle {
	t.Helper()
	for _, table := range []string{"ratelimit.buckets", "ratelimit.leases", "ratelimit.reservations", "public.messages"} {
		_, err := b.pool.Exec(t.Context(), `DELETE FROM `+table)
		require.NoError(t, err)
	}
	limiter, err := sqllimit.New(b.db, ratelimit.Config{Timeout: 5 * time.Minute})
	require.NoError(t, err)
	emptied := *b
	emptied.limiter = limiter
	return &emptied
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

// exactAtOnce has eight callers take from buckets that hold fifty, outside and in transactions of theirs.
func exactAtOnce(t *testing.T, b *bundle) {
	ctx := t.Context()
	for name, take := range map[string]func(requests ...ratelimit.Request) error{
		"outside": func(requests ...ratelimit.Request) error { return b.limiter.Require(ctx, requests...) },
		"in transactions": func(requests ...ratelimit.Request) (err error) {
			for again := true; again; again = ratelimit.IsRetryable(err) {
				err = takeInTx(ctx, b, requests)
			}
			return err
		},
	} {
		var allowed atomic.Int64
		fifty := b.fifty.For(name)
		require.NoError(t, atonce.Do(8, func(int) error {
			for {
				if err := take(fifty, b.wide.For(name), b.sliding.For(name).Cost(0.1)); errors.Is(err, ratelimit.ErrLimited) {
					return nil
				} else if err != nil {
					return err
				}
				allowed.Add(1)
			}
		}), name)
		require.EqualValues(t, 50, allowed.Load(), name)
		require.InDelta(t, 0, b.tokens(t, fifty), 1e-3, name)
		require.InDelta(t, 5, b.tokens(t, b.sliding.For(name)), 1e-3, "nothing was taken for what was refused")
	}
	require.NoError(t, b.limiter.Close(ctx))
}

// takeInTx takes in a transaction of the caller's.
func takeInTx(ctx context.Context, b *bundle, requests []ratelimit.Request) error {
	tx, err := b.db.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelSerializable})
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }()
	if err := sqllimit.WithTx(b.limiter, tx).Require(ctx, requests...); err != nil {
		return err
	}
	return tx.Commit()
}

func abortedTransaction(t *testing.T, b *bundle) {
	ctx := t.Context()
	for name, call := range map[string]func(limits *ratelimit.Limiter) error{
		"one limit":      func(limits *ratelimit.Limiter) error { return limits.Require(ctx, b.five.For("ada")) },
		"several limits": func(limits *ratelimit.Limiter) error { return limits.Require(ctx, b.five.For("ada"), b.one.For("ada")) },
		"slots":          func(limits *ratelimit.Limiter) error { _, err := limits.Acquire(ctx, b.slots.For("ada")); return err },
	} {
		tx := b.begin(t, sql.LevelDefault)
		_, err := tx.ExecContext(ctx, `SELECT 1/0`)
		require.Error(t, err, name)
		err = call(sqllimit.WithTx(b.limiter, tx))
		var ofPgx *pgconn.PgError
		require.ErrorAs(t, err, &ofPgx, name)
		require.Equal(t, "25P02", ofPgx.Code, name)
		require.False(t, ratelimit.IsRetryable(err), name)
		require.True(t, b.driver.isOwn == nil || b.driver.isOwn(err), name)
		require.NoError(t, tx.Rollback(), name)
	}
	require.InDelta(t, 5, b.tokens(t, b.five.For("ada")), 0)
}

func endedTransaction(t *testing.T, b *bundle) {
	ctx := t.Context()
	tx := b.begin(t, sql.LevelDefault)
	limits := sqllimit.WithTx(b.limiter, tx)
	require.NoError(t, limits.Require(ctx, b.five.For("ada")))
	require.NoError(t, tx.Commit())
	for range 2 {
		require.ErrorIs(t, limits.Require(ctx, b.five.For("ada"), b.one.For("ada")), sql.ErrTxDone)
		require.ErrorIs(t, sqllimit.WithTx(b.limiter, tx).Require(ctx, b.five.For("ada")), sql.ErrTxDone)
	}
	require.InDelta(t, 4, b.tokens(t, b.five.For("ada")), 1e-3)
}

// endedContext ends the context of a call that waits for a row, or the context of its transaction. Then database/sql
// rolls the transaction back, but must not use the call's connection at the same time.
func endedContext(t *testing.T, b *bundle) {
	for _, ofCall := range []bool{true, false} {
		holder := b.begin(t, sql.LevelDefault)
		require.NoError(t, sqllimit.WithTx(b.limiter, holder).Require(t.Context(), b.five.For("ada")))
		ctx, cancel := context.WithCancel(t.Context())
		ofTx, ctxOfCall := t.Context(), ctx
		if !ofCall {
			ofTx, ctxOfCall = ctx, t.Context()
		}
		tx, err := b.db.BeginTx(ofTx, nil)
		require.NoError(t, err)
		limits := sqllimit.WithTx(b.limiter, tx)
		require.NoError(t, limits.Require(t.Context(), b.fifty.For("ada")))
		done := make(chan error, 1)
		go func() { done <- limits.Require(ctxOfCall, b.five.For("ada"), b.fifty.For("ada")) }()
		postgrestest.AwaitWaiter(t, b.pool)
		cancel()
		if ofCall {
			require.ErrorIs(t, <-done, context.Canceled)
			hurried, err := sqllimit.New(b.db, ratelimit.Config{Timeout: time.Millisecond})
			require.NoError(t, err)
			require.ErrorIs(t, hurried.Require(t.Context(), b.five.For("ada")), context.DeadlineExceeded)
		}
		require.NoError(t, holder.Rollback())
		if !ofCall {
			require.NotErrorIs(t, <-done, ratelimit.ErrInvalidConfig) // it may have been between two statements
		}
		require.Error(t, tx.Commit(), "it can only be rolled back")
		require.InDelta(t, 50, b.tokens(t, b.fifty.For("ada")), 0)
		require.InDelta(t, 5, b.tokens(t, b.five.For("ada")), 0)
	}
	require.NoError(t, b.limiter.Require(t.Context(), b.five.For("ada")))
}

func noTransaction(t *testing.T, b *bundle) {
	ctx := t.Context()
	for name, limits := range map[string]*ratelimit.Limiter{
		"a *sql.DB":      sqllimit.WithTx(b.limiter, b.db),
		"nothing":        sqllimit.WithTx(b.limiter, nil),
		"a nil *sql.Tx":  sqllimit.WithTx(b.limiter, (*sql.Tx)(nil)),
		"what rewrites":  sqllimit.WithTx(b.limiter, rewriting{b.begin(t, sql.LevelDefault)}),
		"a nil *sql.Con": sqllimit.WithTx(b.limiter, (*sql.Conn)(nil)),
		"what prepares":  sqllimit.WithTx(b.limiter, preparing{b.db}),
	} {
		require.ErrorIs(t, limits.Require(ctx, b.five.For("ada"), b.one.For("ada")), ratelimit.ErrInvalidConfig, name)
		_, err := limits.Reserve(ctx, b.five.For("ada"))
		require.ErrorIs(t, err, ratelimit.ErrInvalidConfig, name)
	}
	_, err := sqllimit.New(nil, ratelimit.Config{})
	require.ErrorIs(t, err, ratelimit.ErrInvalidConfig)
	require.InDelta(t, 5, b.tokens(t, b.five.For("ada")), 0)
}

// rewriting is a transaction of a library that puts the parameters into the text.
type rewriting struct{ *sql.Tx }

// ExecContext leaves the parameters out.
func (r rewriting) ExecContext(ctx context.Context, query string, _ ...any) (sql.Result, error) {
	return r.Tx.ExecContext(ctx, query)
}

// preparing is a pool that prepares each statement, as GORM has with PrepareStmt.
type preparing struct{ *sql.DB }

// GetDBConn returns the pool.
func (p preparing) GetDBConn() (*sql.DB, error) { return p.DB, nil }

func connectionWithATransaction(t *testing.T, b *bundle) {
	ctx := t.Context()
	own, err := b.db.Conn(ctx)
	require.NoError(t, err)
	defer func() { require.NoError(t, own.Close()) }()
	limits := sqllimit.WithTx(b.limiter, own)
	for _, end := range []string{"ROLLBACK", "COMMIT"} {
		_, err = own.ExecContext(ctx, "BEGIN")
		require.NoError(t, err)
		require.NoError(t, limits.Require(ctx, b.five.For("ada"), b.one.For("ada")))
		_, err = own.ExecContext(ctx, end)
		require.NoError(t, err)
	}
	require.InDelta(t, 4, b.tokens(t, b.five.For("ada")), 1e-3)
}

// nothingIsRunTwice loses a connection while the answer to a Take is awaited: the server has ended it after the row was
// changed.
func nothingIsRunTwice(t *testing.T, b *bundle) {
	ctx := t.Context()
	require.NoError(t, b.limiter.Require(ctx, b.fifty.For("ada")))
	_, err := b.pool.Exec(ctx, `CREATE SEQUENCE public.attempts;
		CREATE FUNCTION public.ends() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			PERFORM nextval('public.attempts'), pg_terminate_backend(pg_backend_pid());
			RETURN NEW;
		END $$;
		CREATE TRIGGER ends BEFORE UPDATE ON ratelimit.buckets FOR EACH ROW EXECUTE FUNCTION public.ends()`)
	require.NoError(t, err)
	err = b.limiter.Require(ctx, b.fifty.For("ada"))
	require.Error(t, err)
	require.NotErrorIs(t, err, ratelimit.ErrLimited)
	var attempts int
	require.NoError(t, b.pool.QueryRow(ctx, `SELECT last_value FROM public.attempts`).Scan(&attempts))
	require.Equal(t, 1, attempts)
}
