package integration_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

const (
	holderURL = "RATELIMIT_TEST_HOLDER_URL" // makes TestHolder a process of holders

	holderProcesses, holdersEach = 4, 8
)

// held are the slots that the holders of all processes want.
var held = ratelimit.Define("held", ratelimit.Concurrency{Most: 8, Lease: 300 * time.Millisecond})

// TestHolder is not a test but a process of holders. Each acquires a slot, renews its lease in mid-work, writes to what the
// slot protects, and releases. They end when the input does, if they are not killed before.
func TestHolder(t *testing.T) { //nolint:paralleltest // alone in its process
	url := os.Getenv(holderURL)
	if url == "" {
		t.Skip("a process of TestHoldersThatAreKilledAreReplaced")
	}
	pool, err := pgxpool.New(t.Context(), url)
	require.NoError(t, err)
	defer pool.Close()
	b := &bundle{pool: pool, schema: "ratelimit"}
	limiter := b.with(t, ratelimit.Config{})
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	require.NoError(t, atonce.Do(holdersEach, func(int) error {
		for ctx.Err() == nil {
			if err := holdOnce(ctx, pool, limiter); err != nil && ctx.Err() == nil {
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

// write is what a holder does to what the slots protect, which keeps the highest fencing number that it has seen of each
// of eight parts, and refuses lower ones.
func write(ctx context.Context, pool *pgxpool.Pool, fence int64) error {
	_, err := pool.Exec(ctx, `INSERT INTO public.protected AS p (part, fence, writes) VALUES ($1, $2, 1)
		ON CONFLICT (part) DO UPDATE SET fence = excluded.fence, writes = p.writes + 1 WHERE p.fence <= excluded.fence`, fence%8, fence)
	return err
}

// TestHoldersThatAreKilledAreReplaced kills processes in mid-hold, again and again. The row never has more than eight leases
// that have not ended by the server's clock, those of the dead end, and all slots come back.
func TestHoldersThatAreKilledAreReplaced(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.exec(t, `CREATE TABLE public.protected (part bigint PRIMARY KEY, fence bigint NOT NULL, writes bigint NOT NULL)`)
	// Every version of the row is kept, with the instant at which it was written.
	b.exec(t, `CREATE TABLE public.versions (at timestamptz NOT NULL, leases bigint[])`)
	b.exec(t, `CREATE FUNCTION public.keep() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN INSERT INTO public.versions VALUES (statement_timestamp(), NEW.leases); RETURN NEW; END $$`)
	b.exec(t, `CREATE TRIGGER keep AFTER INSERT OR UPDATE ON ratelimit.buckets FOR EACH ROW EXECUTE FUNCTION public.keep()`)
	processes := make([]*holders, holderProcesses)
	for i := range processes {
		processes[i] = startHolders(t, b)
	}
	killed := 0
	for round := range 6 {
		seen := b.versions(t)
		eventually(t, "slots change hands", func() bool { return b.versions(t) > seen+100 })
		eventually(t, "all slots are held", func() bool { return b.leasesHeld(t, "held") == 8 })
		p := processes[round%holderProcesses]
		p.kill(t)
		killed++
		if round < 4 {
			processes[round%holderProcesses] = startHolders(t, b)
		} else {
			processes[round%holderProcesses] = nil
		}
	}
	for _, p := range processes { // the two that are left
		if p != nil {
			p.kill(t)
		}
	}
	eventually(t, "the leases of the dead end", func() bool { return b.leasesHeld(t, "held") == 0 })
	all, err := b.limiter.Acquire(t.Context(), held.Global().Cost(8))
	require.NoError(t, err)
	require.True(t, all.Allowed, "all slots are back")
	require.NoError(t, b.limiter.Release(t.Context(), all.ID))

	require.Zero(t, b.count(t, `SELECT count(*) FROM public.versions AS v WHERE 8 < (SELECT coalesce(sum(v.leases[i+2]), 0)
		FROM generate_series(2, cardinality(v.leases), 3) AS i WHERE v.leases[i+1] > extract(epoch FROM v.at) * 1000000)`),
		"versions of the row with more than eight slots held")
	require.Greater(t, b.versions(t), 600)
	require.NoError(t, write(t.Context(), b.pool, all.Fence))
	part, wrote := all.Fence%8, func() int {
		return b.count(t, fmt.Sprintf(`SELECT writes FROM public.protected WHERE part = %d`, all.Fence%8))
	}
	before := wrote()
	stale := all.Fence - 8
	require.Equal(t, part, stale%8)
	require.NoError(t, write(t.Context(), b.pool, stale))
	require.Equal(t, before, wrote(), "a stale fence writes nothing")
	t.Logf("%d processes killed, %d versions of the row", killed+2, b.versions(t))
}

// versions returns how often the row was written.
func (b *bundle) versions(t *testing.T) int {
	t.Helper()
	return b.count(t, `SELECT count(*) FROM public.versions`)
}

// leasesHeld returns how many slots of the global bucket are held by the server's clock.
func (b *bundle) leasesHeld(t *testing.T, name string) (slots int) {
	t.Helper()
	err := b.pool.QueryRow(t.Context(), `SELECT coalesce(sum(b.leases[i+2]), 0)::int
		FROM ratelimit.buckets AS b, generate_series(2, cardinality(b.leases), 3) AS i
		WHERE b.name = $1 AND b.key = '' AND b.leases[i+1] > extract(epoch FROM clock_timestamp()) * 1000000`, name).Scan(&slots)
	require.NoError(t, err)
	return slots
}

// holders is a process of them.
type holders struct {
	process *exec.Cmd
	output  bytes.Buffer
}

func startHolders(t *testing.T, b *bundle) *holders {
	t.Helper()
	h := &holders{process: exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestHolder$")}
	h.process.Env = append(os.Environ(), holderURL+"="+b.pool.Config().ConnString())
	h.process.Stdout = &h.output
	_, err := h.process.StdinPipe() // open as long as this test runs
	require.NoError(t, err)
	require.NoError(t, h.process.Start())
	return h
}

// kill kills the process with SIGKILL.
func (h *holders) kill(t *testing.T) {
	t.Helper()
	require.NoError(t, h.process.Process.Kill())
	err := h.process.Wait()
	require.ErrorContains(t, err, "killed", "%s", h.output.String())
}
