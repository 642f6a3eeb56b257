package postgrestest_test

import (
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
)

func TestStartOwn(t *testing.T) {
	t.Parallel()

	t.Run("AppliesTheSettings", func(t *testing.T) {
		t.Parallel()
		server := postgrestest.StartOwn(t, map[string]string{"max_connections": "7", "fsync": "on"})
		require.Equal(t, "7", query(t, server, "SHOW max_connections"))
		require.Equal(t, "on", query(t, server, "SHOW fsync"))
		require.Equal(t, "on", query(t, server, "SHOW synchronous_commit"))
		require.Contains(t, server.String(), "PostgreSQL ")
	})

	for _, mode := range []postgrestest.StopMode{postgrestest.Fast, postgrestest.Immediate, postgrestest.Kill} {
		t.Run("KeepsPortAndCommitsOver/"+string(mode), func(t *testing.T) {
			t.Parallel()
			if mode != postgrestest.Kill {
				testsize.Long(t, "starts a server twice")
			}
			server := postgrestest.StartOwn(t, nil)
			conn, err := pgx.Connect(t.Context(), server.URL())
			require.NoError(t, err)
			_, err = conn.Exec(t.Context(), "CREATE TABLE kept AS SELECT 42 AS answer")
			require.NoError(t, err)

			require.NoError(t, server.Stop(t.Context(), mode))
			require.Error(t, conn.Ping(t.Context()))
			_, err = pgx.Connect(t.Context(), server.URL())
			require.Error(t, err)

			require.NoError(t, server.Restart(t.Context()))
			require.Equal(t, "42", query(t, server, "SELECT answer::text FROM kept"))
		})
	}

	t.Run("CanBeClosedWhileItIsStopped", func(t *testing.T) {
		t.Parallel()
		server := postgrestest.StartOwn(t, nil)
		require.NoError(t, server.Stop(t.Context(), postgrestest.Fast))
	})
}

func query(t *testing.T, server *postgrestest.Server, sql string) (result string) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), server.URL())
	require.NoError(t, err)
	require.NoError(t, conn.QueryRow(t.Context(), sql).Scan(&result))
	require.NoError(t, conn.Close(t.Context()))
	return result
}
