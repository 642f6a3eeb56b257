package doctor_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/cmd/ratelimit/internal/doctor"
	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

func TestRunBehindPgBouncer(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "starts PgBouncer")
	database := postgrestest.NewDatabase(t)
	through := func(mode postgrestest.PoolMode) string { return postgrestest.StartPgBouncer(t, database, mode) }

	t.Run("InTransactionMode", func(t *testing.T) {
		t.Parallel()
		url := through(postgrestest.TransactionPool)
		config, err := pgx.ParseConfig(url)
		require.NoError(t, err)
		require.Equal(t, pgx.QueryExecModeCacheStatement, config.DefaultQueryExecMode, "the default")
		require.Error(t, takeOften(t, url), "it fails as the finding says")
		f := one(t, look(t, config, doctor.Config{}), "pooler")
		require.Equal(t, doctor.Fault, f.Level)
		require.Contains(t, f.Says, "transaction mode")
		require.Contains(t, f.Says, "cache_statement")
		require.Contains(t, f.Do, "add default_query_exec_mode=cache_describe (or exec) to the connection string")

		config, err = pgx.ParseConfig(url + "&default_query_exec_mode=describe_exec")
		require.NoError(t, err)
		require.Equal(t, doctor.Fault, one(t, look(t, config, doctor.Config{}), "pooler").Level)

		url += "&default_query_exec_mode=exec" // the advice
		require.NoError(t, takeOften(t, url))
		config, err = pgx.ParseConfig(url)
		require.NoError(t, err)
		f = one(t, look(t, config, doctor.Config{}), "pooler")
		require.Equal(t, doctor.OK, f.Level)
		require.Contains(t, f.Says, "transaction mode")
	})

	t.Run("InStatementMode", func(t *testing.T) {
		t.Parallel()
		config, err := pgx.ParseConfig(through(postgrestest.StatementPool))
		require.NoError(t, err)
		report := look(t, config, doctor.Config{})
		require.Len(t, report.Findings, 1)
		require.Contains(t, one(t, report, "connection").Says, "statement mode")
	})

	t.Run("InSessionMode", func(t *testing.T) {
		t.Parallel()
		config, err := pgx.ParseConfig(through(postgrestest.SessionPool))
		require.NoError(t, err)
		f := one(t, look(t, config, doctor.Config{}), "pooler")
		require.Equal(t, doctor.OK, f.Level)
		require.Contains(t, f.Says, "session mode")
	})
}

// takeOften takes on several connections at once, until one fails or all have taken often enough to have met each other.
func takeOften(t *testing.T, url string) error {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), url+"&pool_max_conns=4")
	require.NoError(t, err)
	defer pool.Close()
	limiter, err := ratelimit.New(pool, ratelimit.Config{NoBatching: true})
	require.NoError(t, err)
	limit := ratelimit.Define("pooled", ratelimit.PerSecond(1e6))
	failed := make(chan error, 8)
	for i := range cap(failed) {
		go func() {
			for j := range 50 {
				if _, err := limiter.Take(context.WithoutCancel(t.Context()), limit.For(fmt.Sprint(i, j))); err != nil {
					failed <- err
					return
				}
			}
			failed <- nil
		}()
	}
	var first error
	for range cap(failed) {
		if err := <-failed; first == nil {
			first = err
		}
	}
	return first
}
