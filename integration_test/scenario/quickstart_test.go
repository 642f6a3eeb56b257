package scenario_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
)

func TestQuickstart(t *testing.T) {
	t.Parallel()
	database := postgrestest.NewEmptyDatabase(t)
	pool, err := pgxpool.New(t.Context(), database)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	clock := stopClock(t, database, pool)
	for range 3 {
		output, err := invoke(t, database, "quickstart", "ada", "hello")
		require.NoError(t, err, output)
	}
	output, err := invoke(t, database, "quickstart", "ada", "hello")
	require.Error(t, err)
	require.Equal(t, "too many messages: try again in 6s\n", output)
	require.Equal(t, 3, query[int](t, pool, `SELECT count(*) FROM messages`))

	clock.advance(t, 6*time.Second)
	output, err = invoke(t, database, "quickstart", "ada", "hello")
	require.NoError(t, err, output)

	output, err = invoke(t, database, "quickstart", "ada")
	require.Error(t, err)
	require.Equal(t, "usage: quickstart AUTHOR MESSAGE\n", output)
}
