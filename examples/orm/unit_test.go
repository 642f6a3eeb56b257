package orm_test

import (
	"context"
	"database/sql"
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/DATA-DOG/go-sqlmock"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/examples/orm"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
	"github.com/pgratelimit/pgratelimit/sqllimit"
)

// The tests of this file need no server: the limits are in memory, and the rows in a mock.

// sendIn is code of an application that is handed a transaction.
func sendIn(ctx context.Context, limiter *ratelimit.Limiter, tx *sql.Tx, author, body string) error {
	if err := sqllimit.WithTx(limiter, tx).Require(ctx, orm.SendMessage.For(author)); err != nil {
		return err
	}
	_, err := tx.ExecContext(ctx, `INSERT INTO messages (author, body) VALUES ($1, $2)`, author, body)
	return err
}

func TestSendInATransaction(t *testing.T) {
	t.Parallel()
	send := func(ctx context.Context, limiter *ratelimit.Limiter, tx *sql.Tx) error {
		return sendIn(ctx, limiter, tx, "ada", "hello")
	}
	rows, mock, err := sqlmock.New()
	require.NoError(t, err)
	buckets := ratelimittest.NewDB()
	db := buckets.OpenSQL(rows) // begins and ends transactions of both
	defer func() { require.NoError(t, errors.Join(db.Close(), rows.Close())) }()
	limiter, err := ratelimit.New(buckets, ratelimit.Config{AsOf: ratelimittest.NewClock().Now})
	require.NoError(t, err)

	mock.ExpectBegin()
	mock.ExpectExec("INSERT INTO messages").WithArgs("ada", "hello").WillReturnResult(sqlmock.NewResult(0, 1))
	mock.ExpectRollback()
	mock.ExpectClose()
	tx, err := db.BeginTx(t.Context(), nil)
	require.NoError(t, err)
	require.NoError(t, send(t.Context(), limiter, tx))
	require.NoError(t, tx.Rollback())
	v, err := limiter.Value(t.Context(), orm.SendMessage.For("ada"))
	require.NoError(t, err)
	require.Equal(t, 3.0, v.Tokens) // the rollback restored them
}

// TestTestingGuide checks that the block on database/sql of docs/testing.md is in the test above.
func TestTestingGuide(t *testing.T) {
	t.Parallel()
	guide, err := os.ReadFile("../../docs/testing.md")
	require.NoError(t, err)
	own, err := os.ReadFile("unit_test.go")
	require.NoError(t, err)
	_, after, found := strings.Cut(string(guide), "## With database/sql\n")
	require.True(t, found)
	_, block, found := strings.Cut(after, "```go\n")
	require.True(t, found)
	block, _, _ = strings.Cut(block, "```")
	for line := range strings.Lines(block) {
		require.Contains(t, string(own), strings.TrimSpace(line))
	}
}

// TestWithoutAServer runs the functions of this package for each library as TestSend does, with rows in a mock.
func TestWithoutAServer(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"sqlx", "sqlx, again", "GORM", "GORM, again", "bun", "bun, again", "ent", "ent, again"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			rows, mock, err := sqlmock.New()
			require.NoError(t, err)
			db := ratelimittest.NewDB().OpenSQL(rows)
			defer func() { require.NoError(t, errors.Join(db.Close(), rows.Close())) }()
			limiter, err := sqllimit.New(db, ratelimit.Config{AsOf: ratelimittest.NewClock().Now})
			require.NoError(t, err)
			send := sends(t, db, "pgx")[name]
			for range 3 {
				mock.ExpectBegin()
				if strings.HasPrefix(name, "sqlx") || strings.HasPrefix(name, "ent") {
					mock.ExpectExec("INSERT INTO").WillReturnResult(sqlmock.NewResult(0, 1))
				} else { // it asks for the ID
					mock.ExpectQuery("INSERT INTO").WillReturnRows(sqlmock.NewRows([]string{"id"}).AddRow(1))
				}
				mock.ExpectCommit()
			}
			mock.ExpectBegin()
			mock.ExpectRollback()
			for range 3 {
				require.NoError(t, send(t.Context(), limiter, "ada", "hello"))
			}
			require.ErrorIs(t, send(t.Context(), limiter, "ada", "hello"), ratelimit.ErrLimited)
			require.NoError(t, mock.ExpectationsWereMet())
			mock.ExpectClose()
		})
	}
}
