package postgrestest_test

import (
	"strconv"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/migrations"
)

func TestNew(t *testing.T) {
	t.Parallel()

	t.Run("GivesEachTestADatabaseOfItsOwn", func(t *testing.T) {
		t.Parallel()
		for i := range 5 {
			t.Run(strconv.Itoa(i), func(t *testing.T) {
				t.Parallel()
				pool := postgrestest.New(t)
				_, err := pool.Exec(t.Context(),
					`INSERT INTO ratelimit.buckets (name, key, shard, value, ts) VALUES ('limit', 'key', 0, 1, 0)`)
				require.NoError(t, err)
				var rows int
				require.NoError(t, pool.QueryRow(t.Context(), `SELECT count(*) FROM ratelimit.buckets`).Scan(&rows))
				require.Equal(t, 1, rows)
			})
		}
	})

	t.Run("GivesThePoolTheConfigurationItIsAskedFor", func(t *testing.T) {
		t.Parallel()
		pool := postgrestest.New(t, func(c *pgxpool.Config) { c.MaxConns = 3 })
		require.EqualValues(t, 3, pool.Config().MaxConns)
	})
}

func TestNewEmpty(t *testing.T) {
	t.Parallel()
	pool := postgrestest.NewEmpty(t)
	version, err := migrations.Version(t.Context(), pool, migrations.Config{})
	require.NoError(t, err)
	require.Zero(t, version)
}
