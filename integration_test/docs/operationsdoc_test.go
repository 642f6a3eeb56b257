package docs_test

import (
	"context"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// operationsPool holds the code block of docs/operations.md.
func operationsPool(ctx context.Context, url string) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, err
	}
	config.ConnConfig.BuildContextWatcherHandler = func(conn *pgconn.PgConn) ctxwatch.Handler {
		return &pgconn.CancelRequestContextWatcherHandler{
			Conn:               conn,
			CancelRequestDelay: 10 * time.Millisecond, // a statement that is about to finish needs no cancel request
			DeadlineDelay:      time.Second,           // then pgx closes the connection
		}
	}
	return pgxpool.NewWithConfig(ctx, config)
}

// TestOperationsPool promises that a caller who gives up at a held row gets the error of its context on the pool of the page.
func TestOperationsPool(t *testing.T) {
	t.Parallel()
	testsize.Long(t, documents)
	direct := postgrestest.New(t)
	pool, err := operationsPool(t.Context(), direct.Config().ConnString())
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	limiter, err := ratelimit.New(pool, ratelimit.Config{})
	require.NoError(t, err)
	limit := ratelimit.Define("held", ratelimit.PerHour(10))
	_, err = limiter.Take(t.Context(), limit.For("ada"))
	require.NoError(t, err)
	holder, err := direct.BeginTx(t.Context(), pgx.TxOptions{})
	require.NoError(t, err)
	t.Cleanup(func() { _ = holder.Rollback(context.WithoutCancel(t.Context())) })
	_, err = holder.Exec(t.Context(), `SELECT FROM ratelimit.buckets FOR UPDATE`)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	_, err = limiter.Take(ctx, limit.For("ada"))
	require.ErrorIs(t, err, context.DeadlineExceeded)
}

// TestOperationsCron promises that the statement of the page deletes rows that are full, and no others.
func TestOperationsCron(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../../docs/operations.md")
	require.NoError(t, err)
	parts := strings.Split(string(page), "$$")
	require.Len(t, parts, 3)
	pool := postgrestest.New(t)
	_, err = pool.Exec(t.Context(), `INSERT INTO ratelimit.buckets (name, key, shard, value, ts, leases)
		SELECT name, key, 0, value, (extract(epoch FROM now() - age) * 1e6)::bigint, leases FROM (VALUES
			('sendMessage', 'idle', 0, interval '61 minutes', NULL::bigint[]), ('sendMessage', 'used', 0, interval '59 minutes', NULL),
			('sendMessage', 'owes', -1, interval '61 minutes', NULL), ('sendMessage', 'holds', 0, interval '61 minutes', '{1}'),
			('other', 'idle', 0, interval '61 minutes', NULL)) AS rows (name, key, value, age, leases)`)
	require.NoError(t, err)
	deleted, err := pool.Exec(t.Context(), parts[1])
	require.NoError(t, err)
	require.EqualValues(t, 1, deleted.RowsAffected())
	var left bool
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM ratelimit.buckets WHERE name = 'sendMessage' AND key = 'idle')`).Scan(&left))
	require.False(t, left)
}
