package scheduler_test

import (
	"context"
	"fmt"
	"log/slog"
	"math"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
	"github.com/pgratelimit/pgratelimit/scheduler"
)

// deadline is the longest wait for an expected event. It only ends a test that hangs.
const deadline = 2 * time.Minute

// perSecond holds 10 tokens, and 10 a second arrive.
var perSecond = ratelimit.Define("perSecond", ratelimit.PerSecond(10))

// taskArgs are the arguments of a job.
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
	work      task // set before the client starts
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
	f := &fixture{pool: pool}
	var err error
	f.limiter, err = ratelimit.New(pool, s.limiter)
	require.NoError(t, err)
	f.scheduler, err = scheduler.New(f.limiter, s.scheduler)
	require.NoError(t, err)
	s.river.Workers = river.NewWorkers()
	river.AddWorker(s.river.Workers, river.WorkFunc(func(ctx context.Context, job *river.Job[taskArgs]) error {
		return f.work(ctx, job)
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
	f.work = work
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
func (f *fixture) enqueue(t testing.TB, opts *river.InsertOpts, requests ...ratelimit.Request) scheduler.Enqueued {
	t.Helper()
	e, err := f.tryEnqueue(t.Context(), opts, requests...)
	require.NoError(t, err)
	return e
}

func (f *fixture) tryEnqueue(ctx context.Context, opts *river.InsertOpts, requests ...ratelimit.Request) (e scheduler.Enqueued, err error) {
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

func (f *fixture) jobs(t testing.TB) int {
	t.Helper()
	return one[int](t, f.pool, "SELECT count(*) FROM river_job WHERE kind = 'task'")
}

// open returns how many reservations have not ended.
func (f *fixture) open(t testing.TB) int {
	t.Helper()
	return one[int](t, f.pool, "SELECT count(*) FROM ratelimit.reservations WHERE state = 'open'")
}

// TestEnqueue promises that a job is committed with its reservation, and is due at its turn.
func TestEnqueue(t *testing.T) {
	t.Parallel()
	f := setup(t, stopped)
	now := f.enqueue(t, nil, perSecond.Global().Cost(4))
	require.True(t, now.Allowed)
	require.Equal(t, now.At, now.ReadyAt)
	require.Equal(t, rivertype.JobStateAvailable, now.Job.State)
	require.Equal(t, ratelimit.Open, f.state(t, now.ID))
	require.InDelta(t, 6, f.held(t, perSecond, ""), 1e-9)
	require.Equal(t, 1, f.jobs(t))

	soon := f.enqueue(t, nil, perSecond.Global().Cost(26))
	require.Equal(t, 2*time.Second, soon.Delay())
	require.Equal(t, rivertype.JobStateAvailable, soon.Job.State, "River's next look at scheduled jobs would be too late")
	require.WithinDuration(t, soon.ReadyAt, soon.Job.ScheduledAt, 0)

	slow := ratelimit.Define("slow", ratelimit.PerMinute(6))
	f.enqueue(t, nil, perSecond.For("a").Cost(10), slow.Global().Cost(6))
	later := f.enqueue(t, nil, perSecond.For("a"), slow.Global().Cost(2), perSecond.For("b"))
	require.Equal(t, 20*time.Second, later.Delay(), "the slowest of the limits decides")
	require.Len(t, later.States, 3)
	require.Equal(t, rivertype.JobStateScheduled, later.Job.State)
	require.WithinDuration(t, later.ReadyAt, later.Job.ScheduledAt, 0)

	options := &river.InsertOpts{
		MaxAttempts: 3, Metadata: []byte(`{"trace": [1, 2]}`), Priority: 4, Queue: "llm", Tags: []string{"prompt"},
		UniqueOpts: river.UniqueOpts{ByArgs: true},
	}
	unique := f.enqueue(t, options, perSecond.For("unique").Cost(4))
	require.Equal(t, 3, unique.Job.MaxAttempts)
	require.Equal(t, 4, unique.Job.Priority)
	require.Equal(t, "llm", unique.Job.Queue)
	require.Equal(t, []string{"prompt"}, unique.Job.Tags)
	require.JSONEq(t, `{"trace": [1, 2], "ratelimit:reservation": "`+unique.ID+`",
		"ratelimit:reservation:ready_at": "`+unique.ReadyAt.UTC().Format(time.RFC3339Nano)+`",
		"ratelimit:reservation:requests": [{"limit": "perSecond", "key": "unique", "cost": 4, "policy": `+policyOf(t, perSecond)+`}]}`,
		string(unique.Job.Metadata))
	short := ratelimit.Define("short", ratelimit.TokenBucket{Rate: 1, Period: time.Minute, MaxReserved: 1})
	f.enqueue(t, nil, short.Global().Cost(2))
	jobs, open := f.jobs(t), f.open(t)
	duplicate := f.enqueue(t, options, perSecond.For("unique").Cost(4))
	require.True(t, duplicate.UniqueSkippedAsDuplicate)
	require.Equal(t, unique.Job.ID, duplicate.Job.ID)
	require.Empty(t, duplicate.ID)
	require.InDelta(t, 6, f.held(t, perSecond, "unique"), 1e-9)

	_, err := f.tryEnqueue(t.Context(), nil, perSecond.Global(), short.Global())
	require.ErrorIs(t, err, ratelimit.ErrLimited, "a transaction that commits without its job loses it")
	require.NoError(t, pgx.BeginFunc(t.Context(), f.pool, func(tx pgx.Tx) error {
		refused, err := f.scheduler.TryEnqueue(t.Context(), f.client, tx, taskArgs{}, nil, perSecond.Global(), short.Global())
		require.NoError(t, err)
		require.False(t, refused.Allowed)
		require.Nil(t, refused.Job)
		require.Empty(t, refused.ID)
		require.Equal(t, time.Minute, refused.RetryAfter)
		_, err = tx.Exec(t.Context(), "SELECT 1") // the transaction goes on
		return err
	}))
	require.Equal(t, jobs, f.jobs(t))
	require.Equal(t, open, f.open(t))
}

// TestEnqueueThatDoesNotCommit promises that neither a job nor a reservation is left, also when the process is killed.
func TestEnqueueThatDoesNotCommit(t *testing.T) {
	t.Parallel()
	f := setup(t)
	for _, isKilled := range []bool{false, true} {
		require.Error(t, pgx.BeginFunc(t.Context(), f.pool, func(tx pgx.Tx) error {
			e, err := f.scheduler.Enqueue(t.Context(), f.client, tx, taskArgs{}, nil, perSecond.Global(), daily.Global())
			require.NoError(t, err)
			require.NotEmpty(t, e.ID)
			if isKilled {
				require.True(t, one[bool](t, f.pool, "SELECT pg_terminate_backend($1, 60000)", int32(tx.Conn().PgConn().PID())))
				return nil
			}
			return errUpstream
		}))
		require.Zero(t, f.jobs(t))
		require.Zero(t, one[int](t, f.pool, "SELECT count(*) FROM ratelimit.reservations"))
		require.Zero(t, one[int](t, f.pool, "SELECT count(*) FROM ratelimit.buckets"))
	}
}

func TestEnqueueErrors(t *testing.T) {
	t.Parallel()
	f := setup(t)
	// A statement would panic.
	try := func(client *river.Client[pgx.Tx], args river.JobArgs, opts river.InsertOpts, requests ...ratelimit.Request) error {
		return did(f.scheduler.Enqueue(t.Context(), client, struct{ pgx.Tx }{}, args, &opts, requests...))
	}
	with := func(opts river.InsertOpts) error {
		return try(f.client, taskArgs{}, opts, perSecond.Global())
	}
	none := river.InsertOpts{}
	for name, test := range map[string]struct{ err, want error }{
		"NoClient":        {try(nil, taskArgs{}, none, perSecond.Global()), scheduler.ErrInvalidJob},
		"NoArgs":          {try(f.client, nil, none, perSecond.Global()), scheduler.ErrInvalidJob},
		"NilArgs":         {try(f.client, (*taskArgs)(nil), none, perSecond.Global()), scheduler.ErrInvalidJob},
		"ScheduledAt":     {with(river.InsertOpts{ScheduledAt: time.Now()}), scheduler.ErrInvalidJob},
		"MetadataList":    {with(river.InsertOpts{Metadata: []byte(`[]`)}), scheduler.ErrInvalidJob},
		"MetadataNull":    {with(river.InsertOpts{Metadata: []byte(`null`)}), scheduler.ErrInvalidJob},
		"MetadataOurs":    {with(river.InsertOpts{Metadata: []byte(`{"ratelimit:reservation": ""}`)}), scheduler.ErrInvalidJob},
		"NoRequest":       {try(f.client, taskArgs{}, none), ratelimit.ErrInvalidRequest},
		"EmptyKey":        {try(f.client, taskArgs{}, none, perSecond.For("")), ratelimit.ErrInvalidKey},
		"NotANumberCosts": {try(f.client, taskArgs{}, none, perSecond.Global().Cost(math.NaN())), ratelimit.ErrInvalidCost},
	} {
		require.ErrorIs(t, test.err, test.want, name)
	}

	bare := setupOn(t, f.pool, func(s *settings) { s.river.Middleware = []rivertype.Middleware{} })
	for _, test := range []struct {
		*fixture
		queue, want string
	}{{f, "not a queue!", "queue name"}, {bare, "", scheduler.ErrNotInstalled.Error()}} {
		opts := &river.InsertOpts{Queue: test.queue}
		require.NoError(t, pgx.BeginFunc(t.Context(), f.pool, func(tx pgx.Tx) error {
			_, err := test.scheduler.Enqueue(t.Context(), test.client, tx, taskArgs{}, opts, perSecond.Global().Cost(4))
			require.ErrorContains(t, err, test.want)
			return nil // and the transaction is committed nevertheless
		}))
		require.Zero(t, f.jobs(t))
		require.Zero(t, f.open(t))
		require.InDelta(t, 10, f.held(t, perSecond, ""), 1e-9)
	}

	_, err := f.pool.Exec(t.Context(), `DROP TABLE river_job CASCADE`)
	require.NoError(t, err)
	_, err = f.tryEnqueue(t.Context(), nil, perSecond.Global())
	require.ErrorIs(t, err, scheduler.ErrNotMigrated)
}

// TestInstall promises that Install is all a River client needs. A client that works jobs guards their turns and slots,
// and calls Maintain. A job whose worker was killed runs again when River has rescued it, and is charged once. The
// killed worker's slot is free when its lease ends, and not before.
func TestInstall(t *testing.T) {
	t.Parallel()
	slot := ratelimit.Define("slot", ratelimit.Concurrency{Slots: 1, Lease: time.Second}).Global()
	ofTask := func(job *rivertype.JobRow) ([]ratelimit.Request, error) {
		if job.Kind != (taskArgs{}).Kind() {
			return nil, fmt.Errorf("what does a job %q cost?", job.Kind)
		}
		return []ratelimit.Request{slot}, nil
	}
	f := setup(t, func(s *settings) { s.scheduler.Requests = ofTask })
	holder, err := scheduler.NewHolder(f.limiter, scheduler.HolderConfig{
		Requests:  ofTask,
		MaxSnooze: 50 * time.Millisecond,
	})
	require.NoError(t, err)
	workers, started := river.NewWorkers(), make(chan time.Time, 1)
	river.AddWorker(workers, river.WorkFunc(func(ctx context.Context, _ *river.Job[taskArgs]) error {
		if _, held := ratelimit.LeaseFromContext(ctx); !held {
			return river.JobCancel(errUpstream)
		}
		d, err := f.limiter.Check(ctx, slot)
		started <- d.At
		return err
	}))
	config := &river.Config{
		FetchCooldown: 5 * time.Millisecond, FetchPollInterval: 20 * time.Millisecond, Logger: slog.New(slog.DiscardHandler), TestOnly: true,
		Queues: map[string]river.QueueConfig{"tasks": {MaxWorkers: 10}}, Workers: workers,
	}
	require.NoError(t, f.scheduler.Install(config, holder))
	f.client, err = river.NewClient(riverpgxv5.New(f.pool), config)
	require.NoError(t, err)

	// No client works the queue of this job: it ends outside of the middleware, and Maintain finds it.
	elsewhere := f.enqueue(t, &river.InsertOpts{Queue: "elsewhere"}, perSecond.Global())
	_, err = f.client.JobCancel(t.Context(), elsewhere.Job.ID)
	require.NoError(t, err)
	killed := f.enqueue(t, &river.InsertOpts{Queue: "tasks"}, daily.Global().Cost(30))
	_, err = f.limiter.Start(t.Context(), killed.ID)
	require.NoError(t, err)
	lease, err := f.limiter.Acquire(t.Context(), slot) // without a renewal
	require.NoError(t, err)
	_, err = f.pool.Exec(t.Context(), `UPDATE river_job SET state = 'running', attempt = 1, attempted_at = now() - interval '2 hours',
		attempted_by = '{killed}' WHERE id = $1`, killed.Job.ID) // River rescues jobs that have been running for an hour
	require.NoError(t, err)
	events := f.start(t, nil)
	for _, job := range await(t, events, 2, river.EventKindJobCompleted) { // the other one calls Maintain
		require.Equal(t, job.Kind == killed.Job.Kind, job.Attempt == 2, job.Kind)
	}
	require.False(t, (<-started).Before(lease.Until))
	require.Equal(t, ratelimit.Settled, f.state(t, killed.ID))
	require.InDelta(t, 70, f.held(t, daily, ""), 1e-9)
	require.Eventually(t, func() bool { return f.state(t, elsewhere.ID) == ratelimit.Cancelled }, deadline, 10*time.Millisecond)
}

// A client that only inserts gets no workers and no periodic jobs.
func TestInstallInAClientThatInserts(t *testing.T) {
	t.Parallel()
	limiter := ratelimittest.New(t, nil)
	s, err := scheduler.New(limiter, scheduler.Config{})
	require.NoError(t, err)
	config := &river.Config{}
	require.NoError(t, s.Install(config))
	require.Nil(t, config.Workers)
	require.Empty(t, config.PeriodicJobs)
	require.ErrorContains(t, s.Install(config), "call Install once")
	require.Len(t, config.Middleware, 1)
	working := func(workers *river.Workers) *river.Config {
		return &river.Config{Queues: map[string]river.QueueConfig{"q": {MaxWorkers: 1}}, Workers: workers}
	}
	workers := river.NewWorkers()
	require.NoError(t, s.Install(working(workers)))
	config = working(workers)
	require.ErrorIs(t, s.Install(config), scheduler.ErrInvalidConfig)
	require.Empty(t, config.Middleware, "it is as it was")
}

// TestSchemas promises that a limiter and River in schemas of their own use no others.
func TestSchemas(t *testing.T) {
	t.Parallel()
	f := setup(t)
	require.NoError(t, migrations.Up(t.Context(), f.pool, migrations.Config{Schema: "limits"}))
	require.NoError(t, scheduler.Migrate(t.Context(), f.pool, scheduler.MigrateConfig{Schema: "jobs"}))
	other := setupOn(t, f.pool, func(s *settings) { s.limiter.Schema, s.river.Schema = "limits", "jobs" })
	events := other.start(t, func(ctx context.Context, _ *river.Job[taskArgs]) error {
		return scheduler.TurnFromContext(ctx).Settle(ctx, daily.Global().Cost(10))
	})
	e := other.enqueue(t, nil, daily.Global().Cost(30))
	await(t, events, 1, river.EventKindJobCompleted)
	require.Equal(t, string(ratelimit.Settled), one[string](t, f.pool, "SELECT state FROM limits.reservations WHERE id = $1::uuid", e.ID))
	require.Contains(t, string(e.Job.Metadata), `"ratelimit:reservation:limits"`)
	require.Zero(t, f.jobs(t), "in the schema of the search_path")

	elsewhere := &river.InsertOpts{Queue: "elsewhere"}
	for _, each := range []*fixture{f, other} {
		e = each.enqueue(t, elsewhere, daily.Global().Cost(10))
		_, err := each.client.JobCancel(t.Context(), e.Job.ID)
		require.NoError(t, err)
	}
	done, err := other.scheduler.Maintain(t.Context(), other.client)
	require.NoError(t, err)
	require.Equal(t, 1, done.Ended)
	require.Equal(t, 1, f.open(t))
}

func TestMigrateIsSafeWhenSeveralCallIt(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t, func(c *pgxpool.Config) { c.MaxConns = 1 })
	var group errgroup.Group
	for range 4 {
		group.Go(func() error { return scheduler.Migrate(t.Context(), pool, scheduler.MigrateConfig{Schema: "jobs"}) })
	}
	require.NoError(t, group.Wait())
	require.Equal(t, 1, one[int](t, pool, "SELECT count(*) FROM pg_tables WHERE schemaname = 'jobs' AND tablename = 'river_job'"))
}

// did returns the error of a call.
func did[T any](_ T, err error) error { return err }

// TestInvalidConfig promises that the program learns at its start what cannot be used.
func TestInvalidConfig(t *testing.T) {
	t.Parallel()
	limiter := ratelimittest.New(t, nil)
	s, err := scheduler.New(limiter, scheduler.Config{})
	require.NoError(t, err)
	none := func(*rivertype.JobRow) ([]ratelimit.Request, error) { return nil, nil }
	for _, c := range []struct {
		says string
		err  error
	}{
		{"TakeUpEarly is 6s", did(scheduler.New(limiter, scheduler.Config{TakeUpEarly: 6e9}))},
		{"2 is neither KeepEstimate", did(scheduler.New(limiter, scheduler.Config{Cancelled: 2}))},
		{"-1 is neither KeepEstimate", did(scheduler.New(limiter, scheduler.Config{Discarded: -1}))},
		{"the limiter is nil", did(scheduler.New(nil, scheduler.Config{}))},
		{"bound to a transaction", did(scheduler.New(limiter.WithTx(nil), scheduler.Config{}))},
		{"the limiter is nil", did(scheduler.NewHolder(nil, scheduler.HolderConfig{Requests: none}))},
		{"Requests is nil", did(scheduler.NewHolder(limiter, scheduler.HolderConfig{}))},
		{"MaxSnooze", did(scheduler.NewHolder(limiter, scheduler.HolderConfig{Requests: none, MaxSnooze: -1}))},
		{"bound to a transaction", did(scheduler.NewHolder(limiter.WithTx(nil), scheduler.HolderConfig{Requests: none}))},
		{"the river.Config is nil", s.Install(nil)},
		{"holder 1 is nil", s.Install(&river.Config{}, nil)},
		{"the pool is nil", scheduler.Migrate(t.Context(), nil, scheduler.MigrateConfig{})},
		{"schema", scheduler.Migrate(t.Context(), new(pgxpool.Pool), scheduler.MigrateConfig{Schema: `a"; DROP`})},
	} {
		require.ErrorIs(t, c.err, scheduler.ErrInvalidConfig, c.says)
		require.ErrorContains(t, c.err, c.says)
	}
}
