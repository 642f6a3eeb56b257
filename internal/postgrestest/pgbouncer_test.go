package postgrestest_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
)

func TestStartPgBouncer(t *testing.T) {
	t.Parallel()
	modes := map[postgrestest.PoolMode]bool{postgrestest.SessionPool: false, postgrestest.TransactionPool: true}
	if postgrestest.HasTrackingPool(t) {
		modes[postgrestest.TrackingPool] = true
	}
	for mode, shares := range modes {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			database := postgrestest.NewDatabase(t)
			config, err := pgx.ParseConfig(postgrestest.StartPgBouncer(t, database, mode))
			require.NoError(t, err)
			config.DefaultQueryExecMode = pgx.QueryExecModeExec
			var pids [2]int
			for i := range pids {
				conn, err := pgx.ConnectConfig(t.Context(), config)
				require.NoError(t, err)
				t.Cleanup(func() { require.NoError(t, conn.Close(context.WithoutCancel(t.Context()))) })
				require.NoError(t, conn.QueryRow(t.Context(), "SELECT pg_backend_pid() FROM ratelimit.buckets RIGHT JOIN (VALUES (1)) one ON true").Scan(&pids[i]))
			}
			require.Equal(t, shares, pids[0] == pids[1], "two clients at once, in one connection of the server")
		})
	}
}
