package inspect_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/inspect"
	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/rules/denials"
)

func TestSmoke(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	for _, q := range []string{
		`INSERT INTO ratelimit.buckets SELECT 'l'||(n%3), 'k'||n, s, n-10, 1e15+n FROM generate_series(1,20) n, generate_series(0,1) s`,
		`INSERT INTO ratelimit.denials SELECT date_trunc('minute', now()), 'l1', 'r', 'k'||n, false, n, n, 5 FROM generate_series(1,5) n`,
		`INSERT INTO ratelimit.reservations (id,state,ready_us,expires_us,release,names,keys,costs,capacities,rates,steps,step_us,phase_us,lowest)
		SELECT gen_random_uuid(), 'open', 9e15, n, true, array['l1'], array['k'||n], array[1.0], '{1}','{1}','{1}','{1}','{1}','{1}' FROM generate_series(1,5) n`,
	} {
		_, err := pool.Exec(t.Context(), q)
		require.NoError(t, err)
	}
	r, err := inspect.New(pool, "")
	require.NoError(t, err)
	now, err := r.Now(t.Context())
	require.NoError(t, err)
	names, err := r.Limits(t.Context(), "l0", 0)
	require.NoError(t, err)
	require.Equal(t, []string{"l1", "l2"}, names)
	b, err := r.Buckets(t.Context(), inspect.BucketQuery{Limit: "l1", Prefix: "k1", Most: 3})
	require.NoError(t, err)
	t.Log(b)
	bb, err := r.Bucket(t.Context(), "l1", "k1")
	require.NoError(t, err)
	t.Log(bb)
	d, err := r.Debts(t.Context(), inspect.DebtQuery{Look: 3})
	require.NoError(t, err)
	t.Log(d, d.Next)
	d, err = r.Debts(t.Context(), inspect.DebtQuery{Limit: "l1", Most: 3})
	require.NoError(t, err)
	t.Log(d, d.Next)
	k := "k2"
	rs, err := r.Reservations(t.Context(), inspect.ReservationQuery{State: "open", Waiting: true, Limit: "l1", Key: &k})
	require.NoError(t, err)
	require.Len(t, rs.List, 1)
	one, found, err := r.Reservation(t.Context(), rs.List[0].ID)
	require.NoError(t, err)
	require.True(t, found)
	require.Equal(t, rs.List[0], one)
	ms, _, err := r.Refusals(t.Context(), inspect.RefusalQuery{Since: now.Add(-time.Hour), Until: now.Add(time.Hour), Key: &k})
	require.NoError(t, err)
	t.Log(ms)
	top, _, err := r.TopRefused(t.Context(), denials.TopConfig{By: denials.ByKey})
	require.NoError(t, err)
	t.Log(top)
}
