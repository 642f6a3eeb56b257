package scheduler_test

import (
	"context"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/scheduler"
)

// deadline is the longest wait for an expected event. It only ends a test that hangs.
const deadline = 2 * time.Minute

// perSecond holds 10 tokens, and 10 a second arrive.
var perSecond = ratelimit.Define("perSecond", ratelimit.PerSecond(10))

// taskArgs are the jobs of these tests.
type taskArgs struct {
	Name string `json:"name"`
}

func (taskArgs) Kind() string { return "task" }

type task = func(ctx context.Context, job *river.Job[taskArgs]) error

// soon is a retry policy that tries again at once.
type soon struct{}

func (soon) NextRetry(*rivertype.JobRow) time.Time { return time.Now().Add(10 * time.Millisecond) }

// fixture is a database with all tables, and what works on it.
type fixture struct {
	pool      *pgxpool.Pool
	limiter   *ratelimit.Limiter
	scheduler *scheduler.Scheduler
	client    *river.Client[pgx.Tx]

	mu   sync.Mutex
	work task
}

// settings change what setup makes.
type settings struct {
	limiter   ratelimit.Config
	scheduler scheduler.Config
	river     river.Config
}

// stopped gives the limiter a clock that stands still, so that nothing arrives.
func stopped(s *settings) {
	now := time.Now()
	s.limiter.AsOf = func() time.Time { return now }
}

// setup makes a fixture. Its client does not work jobs before start.
func setup(t testing.TB, configure ...func(*settings)) *fixture {
	t.Helper()
	pool := postgrestest.New(t, func(c *pgxpool.Config) { c.MaxConns = 12 })
	require.NoError(t, scheduler.Migrate(t.Context(), pool, scheduler.MigrateConfig{}))
	return setupOn(t, pool, configure...)
}

// setupOn is setup on a database that has the tables.
func setupOn(t testing.TB, pool *pgxpool.Pool, configure ...func(*settings)) *fixture {
	t.Helper()
	s := settings{
		scheduler: scheduler.Config{Logger: slog.New(slog.DiscardHandler), TakeUpEarly: -1},
		river: river.Config{
			FetchCooldown:     5 * time.Millisecond,
			FetchPollInterval: 20 * time.Millisecond,
			Logger:            slog.New(slog.DiscardHandler),
			Queues:            map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 100}},
			RetryPolicy:       soon{},
			TestOnly:          true,
		},
	}
	for _, change := range configure {
		change(&s)
	}
	f := &fixture{pool: pool, work: func(context.Context, *river.Job[taskArgs]) error { return nil }}
	var err error
	f.limiter, err = ratelimit.New(pool, s.limiter)
	require.NoError(t, err)
	f.scheduler, err = scheduler.New(f.limiter, s.scheduler)
	require.NoError(t, err)
	s.river.Workers = river.NewWorkers()
	river.AddWorker(s.river.Workers, river.WorkFunc(func(ctx context.Context, job *river.Job[taskArgs]) error {
		f.mu.Lock()
		work := f.work
		f.mu.Unlock()
		return work(ctx, job)
	}))
	if s.river.Middleware == nil {
		s.river.Middleware = []rivertype.Middleware{f.scheduler.Middleware()}
	}
	f.client, err = river.NewClient(riverpgxv5.New(pool), &s.river)
	require.NoError(t, err)
	return f
}

// start makes the client work jobs with work until the test ends, and returns the channel of its job events.
func (f *fixture) start(t testing.TB, work task) <-chan *river.Event {
	t.Helper()
	f.mu.Lock()
	f.work = work
	f.mu.Unlock()
	events, _ := f.client.SubscribeConfig(&river.SubscribeConfig{ChanSize: 10_000, Kinds: []river.EventKind{
		river.EventKindJobCompleted, river.EventKindJobCancelled, river.EventKindJobFailed, river.EventKindJobSnoozed,
	}})
	require.NoError(t, f.client.Start(context.WithoutCancel(t.Context())))
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), deadline)
		defer cancel()
		require.NoError(t, f.client.StopAndCancel(ctx))
	})
	return events
}

// await returns the next n events of a kind.
func await(t testing.TB, events <-chan *river.Event, n int, kind river.EventKind) []*rivertype.JobRow {
	t.Helper()
	timeout := time.After(deadline)
	var jobs []*rivertype.JobRow
	for len(jobs) < n {
		select {
		case event := <-events:
			if event.Kind == kind {
				jobs = append(jobs, event.Job)
			}
		case <-timeout:
			require.FailNow(t, "the jobs did not end in time", "%d of %d %s", len(jobs), n, kind)
		}
	}
	return jobs
}

// enqueue enqueues a task in a transaction of its own.
func (f *fixture) enqueue(t testing.TB, opts *scheduler.EnqueueOpts, requests ...ratelimit.Request) scheduler.Enqueued {
	t.Helper()
	e, err := f.tryEnqueue(t.Context(), opts, requests...)
	require.NoError(t, err)
	return e
}

func (f *fixture) tryEnqueue(ctx context.Context, opts *scheduler.EnqueueOpts, requests ...ratelimit.Request) (e scheduler.Enqueued, err error) {
	err = pgx.BeginFunc(ctx, f.pool, func(tx pgx.Tx) error {
		e, err = f.scheduler.Enqueue(ctx, f.client, tx, taskArgs{Name: "task"}, opts, requests...)
		return err
	})
	return e, err
}

// one returns the one value a query yields.
func one[T any](t testing.TB, pool *pgxpool.Pool, sql string, args ...any) T {
	t.Helper()
	var value T
	require.NoError(t, pool.QueryRow(context.WithoutCancel(t.Context()), sql, args...).Scan(&value))
	return value
}

// state returns the state of a reservation.
func (f *fixture) state(t testing.TB, id string) ratelimit.ReservationState {
	t.Helper()
	return ratelimit.ReservationState(one[string](t, f.pool, "SELECT state FROM ratelimit.reservations WHERE id = $1::uuid", id))
}

// held returns the value in a bucket's row, without the tokens that have arrived since.
func (f *fixture) held(t testing.TB, limit ratelimit.Limit, key string) float64 {
	t.Helper()
	return one[float64](t, f.pool, "SELECT value FROM ratelimit.buckets WHERE name = $1 AND key = $2", limit.Name(), key)
}

// eventually waits until done is true.
func eventually(t testing.TB, done func() bool) {
	t.Helper()
	require.Eventually(t, done, deadline, 10*time.Millisecond)
}

func (f *fixture) jobs(t testing.TB) int {
	t.Helper()
	return one[int](t, f.pool, "SELECT count(*) FROM river_job WHERE kind = 'task'")
}

func (f *fixture) reservations(t testing.TB) int {
	t.Helper()
	return one[int](t, f.pool, "SELECT count(*) FROM ratelimit.reservations")
}

// open returns how many reservations have not ended.
func (f *fixture) open(t testing.TB) int {
	t.Helper()
	return one[int](t, f.pool, "SELECT count(*) FROM ratelimit.reservations WHERE state = 'open'")
}
