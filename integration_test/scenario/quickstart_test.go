package scenario_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
)

func TestQuickstart(t *testing.T) {
	t.Parallel()
	database := postgrestest.NewEmptyDatabase(t)
	pool, err := pgxpool.New(t.Context(), database)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	clock := stopClock(t, database, pool)
	for range 3 {
		output, err := invoke(t, database, "quickstart")
		require.NoError(t, err, output)
	}
	output, err := invoke(t, database, "quickstart")
	require.Error(t, err)
	require.Regexp(t, `limited by sendMessage: retry after 6s\n$`, output)
	require.Equal(t, 3, query[int](t, pool, `SELECT count(*) FROM messages`))

	clock.advance(t, 6*time.Second)
	output, err = invoke(t, database, "quickstart")
	require.NoError(t, err, output)
}

// TestORM sends with each library, over each driver, until the limit refuses, and sends a message that the table
// refuses.
func TestORM(t *testing.T) {
	t.Parallel()
	for i, driver := range []string{"pgx", "postgres"} {
		for j, library := range []string{"sqlx", "gorm", "bun", "ent"} {
			t.Run(driver+"/"+library, func(t *testing.T) {
				t.Parallel()
				if i != j%2 {
					testkit.Long(t, "the short tier runs each library over one driver")
				}
				database, pool := newDatabase(t)
				stopClock(t, database, pool)
				send := func(body string) (string, error) {
					return invoke(t, database, "orm", "-driver", driver, library, "ada", body)
				}
				left := func() float64 {
					return query[float64](t, pool, `SELECT coalesce((SELECT value FROM ratelimit.buckets WHERE name = 'freeTrials'), 100)`)
				}
				_, err := send("")
				require.Error(t, err, "the table refuses it")
				require.InDelta(t, 100, left(), 0, "the tokens are back")
				for range 3 {
					output, err := send("hello")
					require.NoError(t, err, output)
				}
				output, err := send("hello?")
				require.Error(t, err)
				require.Equal(t, "too many messages: try again in 6s\n", output)
				require.InDelta(t, 97, left(), 0, "a refusal takes nothing")
				require.Equal(t, 3, query[int](t, pool, `SELECT count(*) FROM messages`))
			})
		}
	}
	output, err := invoke(t, "", "orm", "rel", "ada", "hello")
	require.Error(t, err)
	require.Equal(t, "unknown library \"rel\"\n", output)
}
