package processes_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

const holderProcesses, holdersEach = 4, 8

// held are the slots that the holders of all processes want.
var held = ratelimit.Define("held", ratelimit.Concurrency{Most: 8, Lease: 300 * time.Millisecond})

// holders is a process of holders. Each acquires a slot, renews its lease in mid-work, writes to the resource that the slot
// protects, and releases. They end when the input does, if they are not killed before.
func holders(t *testing.T, url string, _ []string) {
	t.Helper()
	w, ctx := world.Open(t, url), inputEnded(t)
	require.NoError(t, atonce.Do(holdersEach, func(int) error {
		for ctx.Err() == nil {
			if err := holdOnce(ctx, w.Pool, w.Limiter); err != nil && ctx.Err() == nil {
				return err
			}
		}
		return nil
	}))
}

// holdOnce holds a slot for a while, if one is free. A lease that is lost on the way is no failure: the machine may be busy.
func holdOnce(ctx context.Context, pool *pgxpool.Pool, limiter *ratelimit.Limiter) error {
	lease, err := limiter.Acquire(ctx, held.Global())
	if err != nil || !lease.Allowed {
		return err
	}
	for range 3 {
		if err := write(ctx, pool, lease.Fence); err != nil {
			return err
		}
		if _, err := limiter.RenewLease(ctx, lease.ID); errors.Is(err, ratelimit.ErrLeaseLost) {
			return nil
		} else if err != nil {
			return err
		}
	}
	if err := limiter.Release(ctx, lease.ID); !errors.Is(err, ratelimit.ErrLeaseLost) {
		return err
	}
	return nil
}

// write is a holder's write to the protected resource. The resource keeps the highest fencing token of each of its eight parts, and
// rejects lower ones.
func write(ctx context.Context, pool *pgxpool.Pool, fence int64) error {
	_, err := pool.Exec(ctx, `INSERT INTO public.protected AS p (part, fence, writes) VALUES ($1, $2, 1)
		ON CONFLICT (part) DO UPDATE SET fence = excluded.fence, writes = p.writes + 1 WHERE p.fence <= excluded.fence`, fence%8, fence)
	return err
}

// TestHoldersThatAreKilledAreReplaced kills processes in mid-hold, again and again. The row never has more than eight leases that
// have not ended by the server's clock. The leases of killed processes end, and all slots become free.
func TestHoldersThatAreKilledAreReplaced(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "eight processes")
	w := world.New(t)
	w.Exec(t, `CREATE TABLE public.protected (part bigint PRIMARY KEY, fence bigint NOT NULL, writes bigint NOT NULL)`)
	// Every version of the row is kept, with the instant at which it was written.
	w.Exec(t, `CREATE TABLE public.versions (at timestamptz NOT NULL, leases bigint[])`)
	w.Exec(t, `CREATE FUNCTION public.keep() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN INSERT INTO public.versions VALUES (statement_timestamp(), NEW.leases); RETURN NEW; END $$`)
	w.Exec(t, `CREATE TRIGGER keep AFTER INSERT OR UPDATE ON ratelimit.buckets FOR EACH ROW EXECUTE FUNCTION public.keep()`)
	processes := make([]*process, holderProcesses)
	for i := range processes {
		processes[i] = start(t, "holders", w.URL(), nil)
	}
	killed := 0
	for round := range 6 {
		seen := versions(t, w)
		world.Eventually(t, "slots change hands", func() bool { return versions(t, w) > seen+100 })
		world.Eventually(t, "all slots are held", func() bool { return slotsHeld(t, w) == 8 })
		p := processes[round%holderProcesses]
		p.requireKilled(t)
		killed++
		if round < 4 {
			processes[round%holderProcesses] = start(t, "holders", w.URL(), nil)
		} else {
			processes[round%holderProcesses] = nil
		}
	}
	for _, p := range processes { // the two that are left
		if p != nil {
			p.requireKilled(t)
		}
	}
	world.Eventually(t, "the leases of the dead end", func() bool { return slotsHeld(t, w) == 0 })
	all, err := w.Limiter.Acquire(t.Context(), held.Global().Cost(8))
	require.NoError(t, err)
	require.True(t, all.Allowed, "all slots are back")
	require.NoError(t, w.Limiter.Release(t.Context(), all.ID))

	require.Zero(t, w.Count(t, `SELECT count(*) FROM public.versions AS v WHERE 8 < (SELECT coalesce(sum(v.leases[i+2]), 0)
		FROM generate_series(2, cardinality(v.leases), 3) AS i WHERE v.leases[i+1] > extract(epoch FROM v.at) * 1000000)`),
		"versions of the row with more than eight slots held")
	require.Greater(t, versions(t, w), 600)
	require.NoError(t, write(t.Context(), w.Pool, all.Fence))
	part, wrote := all.Fence%8, func() int {
		return w.Count(t, fmt.Sprintf(`SELECT writes FROM public.protected WHERE part = %d`, all.Fence%8))
	}
	before := wrote()
	stale := all.Fence - 8
	require.Equal(t, part, stale%8)
	require.NoError(t, write(t.Context(), w.Pool, stale))
	require.Equal(t, before, wrote(), "a stale fence writes nothing")
	t.Logf("%d processes killed, %d versions of the row", killed+2, versions(t, w))
}

// versions returns how often the row was written.
func versions(t *testing.T, w *world.World) int {
	t.Helper()
	return w.Count(t, `SELECT count(*) FROM public.versions`)
}

// slotsHeld returns how many slots are held by the server's clock.
func slotsHeld(t *testing.T, w *world.World) int {
	t.Helper()
	return w.Count(t, `SELECT coalesce(sum(b.leases[i+2]), 0)::int
		FROM ratelimit.buckets AS b, generate_series(2, cardinality(b.leases), 3) AS i
		WHERE b.name = 'held' AND b.key = '' AND b.leases[i+1] > extract(epoch FROM clock_timestamp()) * 1000000`)
}
