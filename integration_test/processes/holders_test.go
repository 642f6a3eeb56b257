package processes_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/integration_test/internal/child"
	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// held are the slots that the holders of all processes want.
var held = ratelimit.Define("held", ratelimit.Concurrency{Most: 8, Lease: 300 * time.Millisecond}).Global()

// holders is a process of eight holders. Each acquires a slot, renews its lease and releases it, until the process is killed.
func holders(t *testing.T, url string, _ []string) {
	t.Helper()
	limiter, ctx := world.Open(t, url).Limiter, child.InputEnded(t.Context())
	require.NoError(t, atonce.Do(8, func(int) error {
		for ctx.Err() == nil {
			// A lease that is lost on the way is no failure: the machine may be busy.
			if err := holdOnce(ctx, limiter); err != nil && !errors.Is(err, ratelimit.ErrLeaseLost) && ctx.Err() == nil {
				return err
			}
		}
		return nil
	}))
}

// holdOnce holds a slot for a while, if one is free.
func holdOnce(ctx context.Context, limiter *ratelimit.Limiter) error {
	lease, err := limiter.Acquire(ctx, held)
	if err != nil || !lease.Allowed {
		return err
	}
	for range 3 {
		if _, err := limiter.RenewLease(ctx, lease.ID); err != nil {
			return err
		}
	}
	return limiter.Release(ctx, lease.ID)
}

// TestHoldersThatAreKilledAreReplaced kills processes in mid-hold, again and again. The row never has more than eight leases that
// have not ended by the server's clock. The leases of killed processes end, and all slots become free.
func TestHoldersThatAreKilledAreReplaced(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "eight processes")
	w := world.New(t)
	// Every version of the row is kept, with the number of slots that are held.
	w.Exec(t, `CREATE TABLE public.versions (slots bigint)`)
	w.Exec(t, `CREATE FUNCTION public.slots(leases bigint[], at timestamptz) RETURNS bigint LANGUAGE sql AS $$
		SELECT coalesce(sum(leases[i+2]), 0)::bigint FROM generate_series(2, cardinality(leases), 3) AS i
		WHERE leases[i+1] > extract(epoch FROM at) * 1000000 $$`)
	w.Exec(t, `CREATE FUNCTION public.keep() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN INSERT INTO public.versions SELECT public.slots(NEW.leases, statement_timestamp()); RETURN NEW; END $$`)
	w.Exec(t, `CREATE TRIGGER keep AFTER INSERT OR UPDATE ON ratelimit.buckets FOR EACH ROW EXECUTE FUNCTION public.keep()`)
	versions := func() int { return w.Count(t, `SELECT count(*) FROM public.versions`) }
	slotsHeld := func() int {
		return w.Count(t, `SELECT coalesce(sum(public.slots(leases, clock_timestamp())), 0) FROM ratelimit.buckets WHERE name = 'held'`)
	}
	const processes, starts = 4, 8
	var running []*process
	for started := range starts {
		running = append(running, start(t, "holders", w.URL()))
		if started < processes {
			continue
		}
		seen := versions()
		world.Eventually(t, "slots change hands", func() bool { return versions() > seen+100 })
		world.Eventually(t, "all slots are held", func() bool { return slotsHeld() == 8 })
		require.True(t, running[started-processes].Kill(), running[started-processes].Output())
	}
	for _, p := range running[starts-processes:] {
		require.True(t, p.Kill(), p.Output())
	}
	world.Eventually(t, "the leases of the dead end", func() bool { return slotsHeld() == 0 })
	all, err := w.Limiter.Acquire(t.Context(), held.Cost(8))
	require.NoError(t, err)
	require.True(t, all.Allowed, "all slots are back")
	require.Zero(t, w.Count(t, `SELECT count(*) FROM public.versions WHERE slots > 8`))
}
