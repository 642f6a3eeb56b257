package ratelimittest_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"io"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
	"github.com/pgratelimit/pgratelimit/sqllimit"
)

// recorder is a database that records its statements, and answers each query with its parameters.
type recorder struct {
	mu     sync.Mutex
	told   []string
	refuse string // the statement that fails
}

func (r *recorder) tell(what string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.told = append(r.told, what)
	if what == r.refuse {
		return errRefused
	}
	return nil
}

var errRefused = errors.New("the table refuses that")

func (r *recorder) Connect(context.Context) (driver.Conn, error) { return recorded{r}, nil }
func (r *recorder) Driver() driver.Driver                        { return nil }

type recorded struct{ *recorder }

func (recorded) Prepare(string) (driver.Stmt, error) {
	return nil, errors.New("nothing is prepared here")
}
func (recorded) Close() error                { return nil }
func (r recorded) Begin() (driver.Tx, error) { return r, r.tell("BEGIN") }
func (r recorded) BeginTx(context.Context, driver.TxOptions) (driver.Tx, error) {
	return r.Begin()
}
func (r recorded) Commit() error   { return r.tell("COMMIT") }
func (r recorded) Rollback() error { return r.tell("ROLLBACK") }

func (r recorded) ExecContext(_ context.Context, query string, _ []driver.NamedValue) (driver.Result, error) {
	return driver.RowsAffected(7), r.tell(query)
}

func (r recorded) QueryContext(_ context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	return &echo{args: args}, r.tell(query)
}

type echo struct {
	args []driver.NamedValue
	done bool
}

func (*echo) Close() error { return nil }
func (e *echo) Columns() []string {
	return strings.Split(strings.Repeat("column ", len(e.args)), " ")[:len(e.args)]
}

func (e *echo) Next(into []driver.Value) error {
	if e.done {
		return io.EOF
	}
	e.done = true
	for i, a := range e.args {
		into[i] = a.Value
	}
	return nil
}

// onSQL is a *sql.DB in memory whose rows are in a recorder, and a Limiter on its buckets.
func onSQL(t *testing.T) (*sql.DB, *ratelimit.Limiter, *recorder) {
	t.Helper()
	rows := &recorder{}
	other := sql.OpenDB(rows)
	db := ratelimittest.NewDB().OpenSQL(other)
	t.Cleanup(func() {
		// database/sql gives a connection back a moment after a context has ended its transaction.
		require.Eventually(t, func() bool { return db.Stats().InUse == 0 }, time.Minute, time.Millisecond)
		require.NoError(t, db.Close())
		require.Zero(t, other.Stats().InUse)
		require.NoError(t, other.Close())
	})
	limiter, err := sqllimit.New(db, ratelimit.Config{AsOf: ratelimittest.NewClock().Now})
	require.NoError(t, err)
	return db, limiter, rows
}

const insert = "INSERT INTO messages"

// sendTen is code that is handed a transaction.
func sendTen(ctx context.Context, limiter *ratelimit.Limiter, tx *sql.Tx, cost float64) error {
	if err := sqllimit.WithTx(limiter, tx).Require(ctx, ten.For("ada").Cost(cost)); err != nil {
		return err
	}
	_, err := tx.ExecContext(ctx, insert)
	return err
}

// Tokens are taken in the transaction of the other database, and end with it.
func TestOpenSQL(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		costs  []float64
		end    func(*sql.Tx) error
		refuse string
		held   float64
		told   []string
	}{
		"CommitsBoth":                          {[]float64{4}, (*sql.Tx).Commit, "", 6, []string{"BEGIN", insert, "COMMIT"}},
		"RollsBackBoth":                        {[]float64{4}, (*sql.Tx).Rollback, "", 10, []string{"BEGIN", insert, "ROLLBACK"}},
		"GoesOnAfterARefusal":                  {[]float64{4, 7, 6}, (*sql.Tx).Commit, "", 0, []string{"BEGIN", insert, insert, "COMMIT"}},
		"KeepsNothingWhereTheOtherCommitFails": {[]float64{4}, (*sql.Tx).Commit, "COMMIT", 10, []string{"BEGIN", insert, "COMMIT"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db, limiter, rows := onSQL(t)
			rows.refuse = c.refuse
			tx, err := db.BeginTx(t.Context(), nil)
			require.NoError(t, err)
			for _, cost := range c.costs {
				err := sendTen(t.Context(), limiter, tx, cost)
				require.Equal(t, cost == 7, errors.Is(err, ratelimit.ErrLimited), err)
			}
			holds(t, limiter, 10, ten.For("ada")) // it is not committed
			require.Equal(t, c.refuse != "", errors.Is(c.end(tx), errRefused))
			holds(t, limiter, c.held, ten.For("ada"))
			require.Equal(t, c.told, rows.told[:len(c.told)])
		})
	}
}

// A transaction whose context ends is rolled back.
func TestOpenSQLRollsBackWhenItsContextEnds(t *testing.T) {
	t.Parallel()
	db, limiter, _ := onSQL(t)
	ctx, cancel := context.WithCancel(t.Context())
	tx, err := db.BeginTx(ctx, nil)
	require.NoError(t, err)
	require.NoError(t, sendTen(ctx, limiter, tx, 10))
	cancel()
	require.NoError(t, limiter.Require(t.Context(), ten.For("ada").Cost(10)), "it waits for the end of the transaction")
	require.Error(t, tx.Commit())
}

// ROLLBACK TO returns the tokens that were taken since the savepoint, and the other database gets the statement, too.
func TestOpenSQLRollsBackToASavepoint(t *testing.T) {
	t.Parallel()
	db, limiter, rows := onSQL(t)
	tx, err := db.BeginTx(t.Context(), nil)
	require.NoError(t, err)
	run := func(query string) {
		_, err := tx.ExecContext(t.Context(), query)
		require.NoError(t, err)
	}
	limits := sqllimit.WithTx(limiter, tx)
	take := func() { require.NoError(t, limits.Require(t.Context(), ten.For("ada").Cost(2))) }
	take()
	run("SAVEPOINT outer_one")
	take()
	run(`savepoint "inner one"`)
	take()
	run(`ROLLBACK TO SAVEPOINT "inner one"`)
	holds(t, limits, 6, ten.For("ada"))
	run(`RELEASE SAVEPOINT "inner one"`)
	_, err = tx.ExecContext(t.Context(), `ROLLBACK TO "inner one"`)
	require.ErrorContains(t, err, `does not exist`)
	require.ErrorContains(t, limits.Require(t.Context(), ten.For("ada")), "aborted")
	run("rollback to outer_one;")
	holds(t, limits, 8, ten.For("ada"))
	require.NoError(t, tx.Commit())
	holds(t, limiter, 8, ten.For("ada"))
	require.Equal(t, "rollback to outer_one;", rows.told[len(rows.told)-2])
}

// The other database gets parameters, and returns rows, as they are.
func TestOpenSQLPassesOtherStatementsOn(t *testing.T) {
	t.Parallel()
	db, _, rows := onSQL(t)
	prepared, err := db.PrepareContext(t.Context(), "SELECT")
	require.NoError(t, err)
	defer func() { require.NoError(t, prepared.Close()) }()
	for _, row := range []*sql.Row{
		db.QueryRowContext(t.Context(), "SELECT", "ada", 7, []byte{1}, nil), prepared.QueryRowContext(t.Context(), "ada", 7, []byte{1}, nil),
	} {
		var name string
		var n int
		var raw []byte
		var none *string
		require.NoError(t, row.Scan(&name, &n, &raw, &none))
		require.Equal(t, []any{"ada", 7, []byte{1}, (*string)(nil)}, []any{name, n, raw, none})
	}
	result, err := db.ExecContext(t.Context(), insert)
	require.NoError(t, err)
	n, err := result.RowsAffected()
	require.NoError(t, err)
	require.EqualValues(t, 7, n)
	require.Equal(t, []string{"SELECT", "SELECT", insert}, rows.told)
}

// Without another database, SQL fails. A transaction that was begun elsewhere is refused.
func TestOpenSQLRejectsUnsupportedStatements(t *testing.T) {
	t.Parallel()
	db := ratelimittest.NewDB().OpenSQL(nil)
	defer func() { require.NoError(t, db.Close()) }()
	limiter, err := sqllimit.New(db, ratelimit.Config{})
	require.NoError(t, err)
	tx, err := db.BeginTx(t.Context(), nil)
	require.NoError(t, err)
	require.ErrorIs(t, sendTen(t.Context(), limiter, tx, 4), ratelimittest.ErrNoDatabase)
	_, err = tx.QueryContext(t.Context(), "SELECT 1") //nolint:sqlclosecheck,rowserrcheck // it fails
	require.ErrorIs(t, err, ratelimittest.ErrNoDatabase)
	_, err = tx.PrepareContext(t.Context(), "SELECT 1") //nolint:sqlclosecheck // it fails
	require.ErrorIs(t, err, ratelimittest.ErrNoDatabase)
	require.NoError(t, tx.Rollback())

	stranger := sql.OpenDB(&recorder{})
	defer func() { require.NoError(t, stranger.Close()) }()
	tx, err = stranger.BeginTx(t.Context(), nil)
	require.NoError(t, err)
	require.ErrorIs(t, sendTen(t.Context(), limiter, tx, 4), ratelimit.ErrInvalidConfig)
	require.NoError(t, tx.Rollback())
	require.ErrorIs(t, sqllimit.WithTx(limiter, stranger).Require(t.Context(), ten.For("ada")), ratelimit.ErrInvalidConfig)
}

// A transaction that was begun on a sql.Conn is found by the Conn.
func TestOpenSQLKnowsATransactionOnAConn(t *testing.T) {
	t.Parallel()
	db, limiter, _ := onSQL(t)
	conn, err := db.Conn(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, conn.Close()) }) // once the test's context has ended the transaction
	require.ErrorIs(t, sqllimit.WithTx(limiter, conn).Require(t.Context(), ten.For("ada")), ratelimit.ErrInvalidConfig, "none was begun")
	tx, err := conn.BeginTx(t.Context(), nil)
	require.NoError(t, err)
	require.NoError(t, sqllimit.WithTx(limiter, conn).Require(t.Context(), ten.For("ada")))
	require.NoError(t, tx.Rollback())
	holds(t, limiter, 10, ten.For("ada"))
}
