package driver_test

import (
	"context"
	"database/sql"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/DATA-DOG/go-sqlmock"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
	"github.com/pgratelimit/pgratelimit/sqllimit"
)

var SendMessage = ratelimit.Define("sendMessage", ratelimit.TokenBucket{Rate: 10, Period: time.Minute, Capacity: 3})

func TestSendInATransaction(t *testing.T) {
	t.Parallel()
	send := func(ctx context.Context, limiter *ratelimit.Limiter, tx *sql.Tx) error { // code of an application
		if err := sqllimit.WithTx(limiter, tx).Require(ctx, SendMessage.For("ada")); err != nil {
			return err
		}
		_, err := tx.ExecContext(ctx, `INSERT INTO messages (author, body) VALUES ($1, $2)`, "ada", "hello")
		return err
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
	v, err := limiter.Value(t.Context(), SendMessage.For("ada"))
	require.NoError(t, err)
	require.Equal(t, 3.0, v.Tokens) // the rollback restored them
}

// TestTestingGuide checks that the block of docs/testing.md on database/sql is in the test above.
func TestTestingGuide(t *testing.T) {
	t.Parallel()
	guide, err := os.ReadFile("../../docs/testing.md")
	require.NoError(t, err)
	own, err := os.ReadFile("orm_test.go")
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
