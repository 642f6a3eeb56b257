package sqllimit

import (
	"context"
	"database/sql"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// stateError is an error of another driver than pgx.
type stateError string

func (e stateError) Error() string    { return "the server says " + string(e) }
func (e stateError) SQLState() string { return string(e) }

// An error of another driver has the severity that the server gave it: FATAL if it ended the connection.
func TestAnErrorOfAnotherDriverHasASeverity(t *testing.T) {
	t.Parallel()
	for code, severity := range map[string]string{
		"40001": "ERROR", "57014": "ERROR", "23505": "ERROR", "57P01": "FATAL", "08006": "FATAL", "25P03": "FATAL", "XX000": "FATAL",
	} {
		var pgErr *pgconn.PgError
		require.ErrorAs(t, explained(t.Context(), stateError(code)), &pgErr, code)
		require.Equal(t, severity, pgErr.SeverityUnlocalized, code)
	}
}

// A transaction of database/sql has the isolation level that the Limiter asks for.
func TestTheIsolationLevelStaysTheSame(t *testing.T) {
	t.Parallel()
	for level, want := range map[pgx.TxIsoLevel]sql.IsolationLevel{
		pgx.Serializable: sql.LevelSerializable, pgx.RepeatableRead: sql.LevelRepeatableRead,
		pgx.ReadCommitted: sql.LevelReadCommitted, "": sql.LevelDefault,
	} {
		require.Equal(t, want, levelOf(level), level)
	}
}

// A row that was read does not change when the connection reads the next one into the same buffer.
func TestARowIsACopy(t *testing.T) {
	t.Parallel()
	buffer := []byte("ab")
	row := cloneRow([][]byte{buffer[:1], nil, buffer[1:]})
	copy(buffer, "xy")
	require.Equal(t, [][]byte{[]byte("a"), nil, []byte("b")}, row)
}

// failingTx is a transaction whose statements fail. It counts them.
type failingTx struct {
	Tx
	sent int
}

func (tx *failingTx) ExecContext(context.Context, string, ...any) (sql.Result, error) {
	tx.sent++
	return nil, errors.New("failed")
}

func (tx *failingTx) QueryContext(context.Context, string, ...any) (*sql.Rows, error) {
	tx.sent++
	return nil, errors.New("failed")
}

// A batch ends with the statement that fails: the statements behind it are not sent.
func TestABatchEndsWithTheStatementThatFails(t *testing.T) {
	t.Parallel()
	tx := &failingTx{}
	answers := runPlain(t.Context(), tx, statements{queries: []*pgx.QueuedQuery{{SQL: "SELECT 1"}, {SQL: "SELECT 2"}}})
	require.Len(t, answers, 1)
	require.Error(t, answers[0].err)
	require.Equal(t, 1, tx.sent)
}

// prepared is a transaction that prepares each statement first, as GORM's has with PrepareStmt.
type prepared struct{ *sql.Tx }

// ExecContext prepares the statement, so that it has only the parameters that it names.
func (p prepared) ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error) {
	statement, err := p.PrepareContext(ctx, query)
	if err != nil {
		return nil, err
	}
	defer func() { _ = statement.Close() }()
	return statement.ExecContext(ctx, args...)
}

// TestWithTxRejectsOtherTransactions promises an error that says what to pass, and that nothing is taken, where calls
// would commit by themselves or cannot be sent.
func TestWithTxRejectsOtherTransactions(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	db, err := sql.Open("pgx", postgrestest.NewDatabase(t))
	require.NoError(t, err)
	defer func() { require.NoError(t, db.Close()) }()
	limiter, err := New(db, ratelimit.Config{})
	require.NoError(t, err)
	limit := ratelimit.Define("limit", ratelimit.PerDay(5))

	conn, err := db.Conn(ctx)
	require.NoError(t, err)
	defer func() { require.NoError(t, conn.Close()) }()
	err = WithTx(limiter, conn).Require(ctx, limit.For("ada"))
	require.ErrorIs(t, err, ratelimit.ErrInvalidConfig)
	require.ErrorContains(t, err, "*sql.Conn on which no transaction was begun: begin one")

	tx, err := db.BeginTx(ctx, nil)
	require.NoError(t, err)
	err = WithTx(limiter, prepared{tx}).Require(ctx, limit.For("ada"))
	require.ErrorIs(t, err, ratelimit.ErrInvalidConfig)
	require.ErrorContains(t, err, "pass the *sql.Tx that it holds")
	require.NoError(t, WithTx(limiter, tx).Require(ctx, limit.For("ada")))
	require.NoError(t, tx.Rollback())
	value, err := limiter.Value(ctx, limit.For("ada"))
	require.NoError(t, err)
	require.InDelta(t, 5, value.Tokens, 0)
}
