package store

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
)

// A look that row level security may filter fails, and the calls that took in the same batch succeed, once.
func TestALookThatMayMissRowsFailsAlone(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	role, filtered := postgrestest.NewRole(t, pool, "")
	_, err := pool.Exec(t.Context(), fmt.Sprintf(`GRANT USAGE ON SCHEMA ratelimit TO %[1]s;
		GRANT ALL ON ALL TABLES IN SCHEMA ratelimit TO %[1]s; GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA ratelimit TO %[1]s;
		ALTER TABLE ratelimit.buckets ENABLE ROW LEVEL SECURITY;
		CREATE POLICY visible ON ratelimit.buckets TO %[1]s USING (key <> 'hidden')`, role))
	require.NoError(t, err)
	s, limit := standOn(t, filtered), dyadic[0]
	ada, eve, look := taking(limit.ask("ada", 1)), taking(limit.ask("eve", 2)), looking(limit.ask("bob", 1))
	s.batch(ada, look, eve)
	require.ErrorContains(t, look.Result(), "row level security may hide rows of buckets")
	require.True(t, ada.isAllowed(t))
	require.True(t, eve.isAllowed(t))
	require.Equal(t, []float64{15, 14}, standOn(t, pool).held(limit.ask("ada", 0), limit.ask("eve", 0)))
}
