package docs_test

import (
	"context"
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
