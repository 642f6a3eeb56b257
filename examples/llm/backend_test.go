package main

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

func TestAsk(t *testing.T) {
	t.Parallel()

	setup := func(t *testing.T) (*backend, func(sql string) int) {
		t.Helper()
		pool := postgrestest.NewEmpty(t, func(c *pgxpool.Config) { c.MaxConns = 4 })
		require.NoError(t, migrate(t.Context(), pool))
		b, err := newBackend(pool, newLimits(demoScale()), time.Second, "http://unused.invalid")
		require.NoError(t, err)
		return b, func(sql string) (n int) {
			require.NoError(t, pool.QueryRow(t.Context(), sql).Scan(&n))
			return n
		}
	}

	t.Run("WritesTheTurnTheJobAndTheReservations", func(t *testing.T) {
		t.Parallel()
		b, count := setup(t)
		_, err := b.ask(t.Context(), "ada", "pro", "what is a token bucket?", 100)
		require.NoError(t, err)
		require.Equal(t, 1, count(`SELECT count(*) FROM llm.turns`))
		require.Equal(t, 1, count(`SELECT count(*) FROM river_job`))
		require.Equal(t, 2, count(`SELECT count(*) FROM ratelimit.reservations`))
		require.Equal(t, 6, count(`SELECT count(*) FROM ratelimit.buckets`))
	})

	t.Run("LeavesNothingWhenItIsRefused", func(t *testing.T) {
		t.Parallel()
		b, count := setup(t)
		_, err := b.ask(t.Context(), "ada", "free", "how long can an answer be?", 15_000)
		require.NoError(t, err)
		_, err = b.ask(t.Context(), "ada", "free", "and now?", 15_000) // she has 20,000 at once
		require.ErrorIs(t, err, ratelimit.ErrLimited)
		require.Equal(t, 1, count(`SELECT count(*) FROM llm.turns`))
		require.Equal(t, 1, count(`SELECT count(*) FROM river_job`))
		require.Equal(t, 2, count(`SELECT count(*) FROM ratelimit.reservations`))

		_, err = b.ask(t.Context(), "alan", "free", "and I?", 15_000)
		require.NoError(t, err)
	})

	t.Run("GivesEachRequestItsOwnMoment", func(t *testing.T) {
		t.Parallel()
		b, count := setup(t)
		for _, user := range []string{"ada", "alan", "grace"} {
			_, err := b.ask(t.Context(), user, "free", "", 10_000)
			require.NoError(t, err)
		}
		// As far behind the one before as its tokens take to arrive: 10,000 of 188,000 in 18 s.
		const gaps = `SELECT round(1000 * extract(epoch FROM min(gap)))::int FROM
			(SELECT ready_at - lag(ready_at) OVER (ORDER BY ready_at) AS gap FROM llm.turns) AS g`
		require.Equal(t, 957, count(gaps))
	})
}
