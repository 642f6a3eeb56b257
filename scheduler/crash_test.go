//go:build unix

package scheduler_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// The environment variables with the role and the database of a copy of the test program.
const (
	childRole     = "SCHEDULER_TEST_CHILD"
	childDatabase = "SCHEDULER_TEST_DATABASE"
	childKey      = "SCHEDULER_TEST_KEY"
	childPoint    = "SCHEDULER_TEST_POINT"
)

func TestMain(m *testing.M) {
	if role := os.Getenv(childRole); role != "" {
		os.Exit(child(context.Background(), role))
	}
	os.Exit(m.Run())
}

// child is the program that is killed.
func child(ctx context.Context, role string) int {
	var err error
	switch role {
	case "enqueue":
		err = enqueueAndDie(ctx)
	case "work":
		err = workAndDie(ctx)
	case "hold":
		err = workAndDie(ctx, holding(killable))
	}
	fmt.Fprintln(os.Stderr, err)
	return 1
}

func die() {
	_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	select {}
}

// spawn runs a child to its end and returns its output. It fails when the child was not killed.
func spawn(ctx context.Context, role, database string, settings ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, deadline)
	defer cancel()
	cmd := exec.CommandContext(ctx, os.Args[0])
	cmd.Env = append(os.Environ(), append(settings, childRole+"="+role, childDatabase+"="+database)...)
	output, err := cmd.CombinedOutput()
	status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus)
	if !ok || !status.Signaled() || ctx.Err() != nil {
		return "", fmt.Errorf("the child was not killed: %w\n%s", err, output)
	}
	return string(output), nil
}

// deadlyConn dies before or after one of the messages it sends: point 2n is before the n-th, 2n+1 after it.
type deadlyConn struct {
	net.Conn
	sent, point int
	armed       bool
}

func (c *deadlyConn) Write(b []byte) (int, error) {
	if !c.armed {
		return c.Conn.Write(b)
	}
	if c.point == 2*c.sent {
		die()
	}
	n, err := c.Conn.Write(b)
	if c.point == 2*c.sent+1 {
		die()
	}
	c.sent++
	return n, err
}

// enqueueAndDie enqueues a job and dies at the point that its environment names, or after the end.
func enqueueAndDie(ctx context.Context) error {
	config, err := pgxpool.ParseConfig(os.Getenv(childDatabase))
	if err != nil {
		return err
	}
	point, err := strconv.Atoi(os.Getenv(childPoint))
	if err != nil {
		return err
	}
	deadly := &deadlyConn{point: point}
	config.MaxConns = 1
	config.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := (&net.Dialer{}).DialContext(ctx, network, addr)
		deadly.Conn = conn
		return deadly, err
	}
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return err
	}
	f, err := newFixture(pool)
	if err != nil {
		return err
	}
	if err := pool.Ping(ctx); err != nil {
		return err
	}
	deadly.armed = true
	key := os.Getenv(childKey)
	if err := f.limiter.InTx(ctx, func(tx pgx.Tx) error {
		_, err := f.scheduler.Enqueue(ctx, f.client, tx, taskArgs{Name: key}, nil, daily.For(key).Cost(30), daily.For("b"+key).Cost(10))
		return err
	}); err != nil {
		return err
	}
	fmt.Println(2 * deadly.sent)
	die()
	return nil
}

// workAndDie works jobs and dies in the middle of the first.
func workAndDie(ctx context.Context, configure ...func(*settings)) error {
	pool, err := pgxpool.New(ctx, os.Getenv(childDatabase))
	if err != nil {
		return err
	}
	f, err := newFixture(pool, append(configure, func(s *settings) { s.river.LeaderElectionDisabled = true })...)
	if err != nil {
		return err
	}
	f.work = func(context.Context, *river.Job[taskArgs]) error {
		die()
		return nil
	}
	if err := f.client.Start(ctx); err != nil {
		return err
	}
	<-f.client.Stopped() // to be killed before that
	return nil
}

func TestClientKilledWhileEnqueueing(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "kills processes")
	f := setup(t)
	database := f.pool.Config().ConnString()
	_, err := f.limiter.Take(t.Context(), daily.For("first")) // stores the fingerprint: the first child sends no more than the others
	require.NoError(t, err)
	output, err := spawn(t.Context(), "enqueue", database, childKey+"=whole", childPoint+"=-1")
	require.NoError(t, err)
	points, err := strconv.Atoi(strings.TrimSpace(output))
	require.NoError(t, err)
	require.Greater(t, points, 8)

	var group errgroup.Group
	group.SetLimit(2)
	for point := range points {
		group.Go(func() error {
			_, err := spawn(t.Context(), "enqueue", database, fmt.Sprintf("%s=%d", childKey, point), fmt.Sprintf("%s=%d", childPoint, point))
			return err
		})
	}
	require.NoError(t, group.Wait())
	eventually(t, func() bool { // the server has seen that they are gone
		return one[int](t, f.pool, "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in transaction%'") == 0
	})

	whole := 0
	for point := range points {
		key := strconv.Itoa(point)
		jobs := one[int](t, f.pool, "SELECT count(*) FROM river_job WHERE args ->> 'name' = $1", key)
		reservations := one[int](t, f.pool, "SELECT count(*) FROM ratelimit.reservations WHERE $1 = ANY(keys)", key)
		pairs := one[int](t, f.pool, `SELECT count(*) FROM river_job AS j JOIN ratelimit.reservations AS r ON r.id::text = j.metadata ->> 'ratelimit:reservation'
			WHERE j.args ->> 'name' = $1 AND $1 = ANY(r.keys)`, key)
		taken := one[float64](t, f.pool, "SELECT coalesce(sum(100 - value), 0) FROM ratelimit.buckets WHERE key IN ($1, 'b' || $1)", key)
		require.Equal(t, jobs, reservations, "killed at point %d", point)
		require.Equal(t, jobs, pairs, "killed at point %d", point)
		require.InDelta(t, 40*jobs, taken, 1e-9, "killed at point %d", point)
		whole += jobs
	}
	t.Logf("killed at %d points: %d left both a job and a turn, %d neither", points, whole, points-whole)
	require.LessOrEqual(t, whole, 1) // only the last point, after COMMIT was sent, may leave them
}

func TestWorkerKilledInTheMiddleOfAJob(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "kills a process")
	f := setup(t)
	e := f.enqueue(t, nil, daily.Global().Cost(30))
	_, err := spawn(t.Context(), "work", f.pool.Config().ConnString())
	require.NoError(t, err)
	job, err := f.client.JobGet(t.Context(), e.Job.ID)
	require.NoError(t, err)
	require.Equal(t, rivertype.JobStateRunning, job.State)
	require.Equal(t, ratelimit.Open, f.state(t, e.ID))

	// River rescues jobs that have been running for an hour.
	_, err = f.pool.Exec(t.Context(), "UPDATE river_job SET attempted_at = attempted_at - interval '2 hours'")
	require.NoError(t, err)
	events := f.start(t, func(context.Context, *river.Job[taskArgs]) error { return nil })
	require.Equal(t, 2, await(t, events, 1, river.EventKindJobCompleted)[0].Attempt)
	require.Equal(t, ratelimit.Settled, f.state(t, e.ID))
	require.InDelta(t, 70, f.held(t, daily, ""), 1e-9)
}
