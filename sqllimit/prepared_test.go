package sqllimit_test

import (
	"context"
	"database/sql"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/sqllimit"
)

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

// TestWhatIsNoTransactionOfStdlib promises an error that says what to pass, and that nothing is taken, where calls would commit by
// themselves or cannot be sent.
func TestWhatIsNoTransactionOfStdlib(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	db, err := sql.Open("pgx", postgrestest.NewDatabase(t))
	require.NoError(t, err)
	defer func() { require.NoError(t, db.Close()) }()
	limiter, err := sqllimit.New(db, ratelimit.Config{})
	require.NoError(t, err)
	limit := ratelimit.Define("limit", ratelimit.PerDay(5))

	conn, err := db.Conn(ctx)
	require.NoError(t, err)
	defer func() { require.NoError(t, conn.Close()) }()
	err = sqllimit.WithTx(limiter, conn).Require(ctx, limit.For("ada"))
	require.ErrorIs(t, err, ratelimit.ErrInvalidConfig)
	require.ErrorContains(t, err, "*sql.Conn on which no transaction was begun: begin one")

	tx, err := db.BeginTx(ctx, nil)
	require.NoError(t, err)
	err = sqllimit.WithTx(limiter, prepared{tx}).Require(ctx, limit.For("ada"))
	require.ErrorIs(t, err, ratelimit.ErrInvalidConfig)
	require.ErrorContains(t, err, "pass the *sql.Tx that it holds")
	require.NoError(t, sqllimit.WithTx(limiter, tx).Require(ctx, limit.For("ada")))
	require.NoError(t, tx.Rollback())
	value, err := limiter.Value(ctx, limit.For("ada"))
	require.NoError(t, err)
	require.InDelta(t, 5, value.Tokens, 0)
}
