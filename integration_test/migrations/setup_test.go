package migrations_test

import (
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/migrations"
)

func openPool(t *testing.T, url string, configure ...func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig(url)
	require.NoError(t, err)
	for _, change := range configure {
		change(config)
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return pool
}

// requireLatest checks that every migration has been applied, which the role of the pool may ask.
func requireLatest(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	version, err := migrations.Version(t.Context(), pool, migrations.Config{})
	require.NoError(t, err)
	files, err := migrations.FS.ReadDir(".")
	require.NoError(t, err)
	require.EqualValues(t, len(files), version)
}

func texts(t *testing.T, pool *pgxpool.Pool, query string) []string {
	t.Helper()
	rows, err := pool.Query(t.Context(), query)
	require.NoError(t, err)
	found, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return found
}
