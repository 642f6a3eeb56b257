package scheduler_test

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// dyingConn is the connection of a process that dies before or after one of its messages: at point 2n before the n-th, at 2n+1 after
// it. For the server that is the death of the process.
type dyingConn struct {
	net.Conn
	mu          sync.Mutex
	sent, point int
	armed, dead bool
	die         func() // ends what the process does
}

func (c *dyingConn) Write(b []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.armed {
		return c.Conn.Write(b)
	}
	if c.point == 2*c.sent {
		return 0, c.end()
	}
	n, err := c.Conn.Write(b)
	if c.point == 2*c.sent+1 {
		err = c.end()
	}
	c.sent++
	return n, err
}

func (c *dyingConn) arm(armed bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.armed = armed
}

func (c *dyingConn) end() error {
	c.dead = true
	_ = c.Close()
	c.die()
	return net.ErrClosed
}

// enqueueAndDie enqueues a job on a connection of its own, and returns how many points there are until the process dies.
func enqueueAndDie(t *testing.T, pool *pgxpool.Pool, key string, point int) int {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	config, dying := pool.Config(), &dyingConn{point: point, die: cancel}
	config.MaxConns = 1
	config.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (_ net.Conn, err error) {
		dying.mu.Lock()
		defer dying.mu.Unlock()
		if dying.dead {
			return nil, net.ErrClosed
		}
		dying.Conn, err = (&net.Dialer{}).DialContext(ctx, network, address)
		return dying, err
	}
	own, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	f := setupOn(t, own)
	require.NoError(t, own.Ping(t.Context()))
	dying.arm(true)
	err = f.limiter.InTx(ctx, func(tx pgx.Tx) error {
		_, err := f.scheduler.Enqueue(ctx, f.client, tx, taskArgs{Name: key}, nil, daily.For(key).Cost(30), daily.For("b"+key).Cost(10))
		return err
	})
	require.Equal(t, point < 0, err == nil, err)
	dying.arm(false)
	own.Close()
	return 2 * dying.sent
}

// TestClientKilledWhileEnqueueing promises that a process which dies at any point of a transaction leaves both a job and its
// reservation, or neither.
func TestClientKilledWhileEnqueueing(t *testing.T) {
	t.Parallel()
	f := setup(t)
	_, err := f.limiter.Take(t.Context(), daily.For("first")) // stores the fingerprint: the first process sends no more than the others
	require.NoError(t, err)
	points := enqueueAndDie(t, f.pool, "whole", -1)
	require.Greater(t, points, 8)
	whole := 0
	for point := range points {
		key := strconv.Itoa(point)
		enqueueAndDie(t, f.pool, key, point)
		eventually(t, func() bool { // the server has seen that it is gone
			return one[int](t, f.pool, `SELECT count(*) FROM pg_stat_activity
				WHERE datname = current_database() AND pid <> pg_backend_pid() AND state <> 'idle' AND backend_type = 'client backend'`) == 0
		})
		jobs := one[int](t, f.pool, "SELECT count(*) FROM river_job WHERE args ->> 'name' = $1", key)
		pairs := one[int](t, f.pool, `SELECT count(*) FROM river_job AS j JOIN ratelimit.reservations AS r ON r.id::text = j.metadata ->> 'ratelimit:reservation'
			WHERE j.args ->> 'name' = $1 AND $1 = ANY(r.keys)`, key)
		taken := one[float64](t, f.pool, "SELECT coalesce(sum(100 - value), 0) FROM ratelimit.buckets WHERE key IN ($1, 'b' || $1)", key)
		require.Equal(t, jobs, pairs, "killed at point %d", point)
		require.Equal(t, jobs, one[int](t, f.pool, "SELECT count(*) FROM ratelimit.reservations WHERE $1 = ANY(keys)", key))
		require.InDelta(t, 40*jobs, taken, 1e-9, "killed at point %d", point)
		whole += jobs
	}
	require.LessOrEqual(t, whole, 1, "only the last point, after COMMIT was sent, may leave them")
}

// killedAt leaves a job as a worker leaves it that was killed two hours ago. River rescues jobs that have been running for an hour.
func (f *fixture) killed(t *testing.T, job *rivertype.JobRow) {
	t.Helper()
	one[int64](t, f.pool, `UPDATE river_job SET state = 'running', attempt = 1, attempted_at = now() - interval '2 hours', attempted_by = '{killed}'
		WHERE id = $1 RETURNING id`, job.ID)
}

func TestWorkerKilledInTheMiddleOfAJob(t *testing.T) {
	t.Parallel()
	f := setup(t)
	e := f.enqueue(t, nil, daily.Global().Cost(30))
	_, err := f.limiter.Start(t.Context(), e.ID)
	require.NoError(t, err)
	f.killed(t, e.Job)
	events := f.start(t, func(context.Context, *river.Job[taskArgs]) error { return nil })
	require.Equal(t, 2, await(t, events, 1, river.EventKindJobCompleted)[0].Attempt)
	require.Equal(t, ratelimit.Settled, f.state(t, e.ID))
	require.InDelta(t, 70, f.held(t, daily, ""), 1e-9)
}

// TestWorkerKilledWhileItHolds promises that the slot of a killed worker is free when its lease ends, and not before. Its job runs again
// when River has rescued it, and no attempt is lost by waiting.
func TestWorkerKilledWhileItHolds(t *testing.T) {
	t.Parallel()
	f := setup(t, func(s *settings) { s.holds = []ratelimit.Request{oneEach.For("a")} })
	inserted, err := f.client.Insert(t.Context(), taskArgs{Name: "a"}, nil)
	require.NoError(t, err)
	lease, err := f.limiter.Acquire(t.Context(), oneEach.For("a")) // without a renewal
	require.NoError(t, err)
	f.killed(t, inserted.Job)
	var started time.Time
	events := f.start(t, func(ctx context.Context, _ *river.Job[taskArgs]) error {
		if _, held := ratelimit.LeaseFromContext(ctx); !held {
			return river.JobCancel(fmt.Errorf("it holds nothing"))
		}
		return f.pool.QueryRow(ctx, "SELECT clock_timestamp()").Scan(&started)
	})
	require.Equal(t, 2, await(t, events, 1, river.EventKindJobCompleted)[0].Attempt)
	require.False(t, started.Before(lease.Until), "the slot was the dead worker's until %v", lease.Until)
}
