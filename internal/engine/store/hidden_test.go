package store

import (
	"context"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
)

// A look that row level security may filter fails, and the calls that took in the same batch succeed, once.
func TestALookThatMayMissRowsFailsAlone(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	var role string
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT 'looks_' || oid FROM pg_database WHERE datname = current_database()`).Scan(&role))
	_, err := pool.Exec(t.Context(), fmt.Sprintf(`CREATE ROLE %[1]s; GRANT USAGE ON SCHEMA ratelimit TO %[1]s;
		GRANT ALL ON ALL TABLES IN SCHEMA ratelimit TO %[1]s; GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA ratelimit TO %[1]s; ALTER TABLE ratelimit.buckets ENABLE ROW LEVEL SECURITY;
		CREATE POLICY visible ON ratelimit.buckets TO %[1]s USING (key <> 'hidden')`, role))
	require.NoError(t, err)
	config := pool.Config()
	config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, "SET ROLE "+role)
		return err
	}
	filtered, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(func() {
		filtered.Close()
		_, err := pool.Exec(context.WithoutCancel(t.Context()), fmt.Sprintf("DROP OWNED BY %[1]s; DROP ROLE %[1]s", role))
		require.NoError(t, err)
	})
	s, limit := standOn(t, filtered), dyadic[0]
	ada, eve, look := taking(limit.ask("ada", 1)), taking(limit.ask("eve", 2)), looking(limit.ask("bob", 1))
	s.batch(ada, look, eve)
	require.ErrorContains(t, look.Result(), "row level security may hide rows of buckets")
	require.True(t, ada.isAllowed(t))
	require.True(t, eve.isAllowed(t))
	require.Equal(t, []float64{15, 14}, standOn(t, pool).held(limit.ask("ada", 0), limit.ask("eve", 0)))
}
