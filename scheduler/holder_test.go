//go:build unix

package scheduler_test

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/logtest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
	"github.com/pgratelimit/pgratelimit/scheduler"
)

// oneEach and killable have a slot for each tenant. A lease of killable is short: a test waits for its end.
var (
	oneEach  = ratelimit.Define("oneEach", ratelimit.Concurrency{Most: 1})
	killable = ratelimit.Define("killable", ratelimit.Concurrency{Most: 1, Lease: 4 * time.Second})
)

// tenantOf returns the tenant of a task, which is its name.
func tenantOf(job *rivertype.JobRow) (string, error) {
	var args taskArgs
	err := json.Unmarshal(job.EncodedArgs, &args)
	return args.Name, err
}

// holding has tasks hold a slot of their tenant's in each of limits.
func holding(limits ...ratelimit.Limit) func(*settings) {
	return func(s *settings) {
		s.holder = &scheduler.HolderConfig{
			Requests: func(job *rivertype.JobRow) (requests []ratelimit.Request, err error) {
				if job.Kind != (taskArgs{}).Kind() {
					return nil, nil
				}
				tenant, err := tenantOf(job)
				for _, limit := range limits {
					requests = append(requests, limit.For(tenant))
				}
				return requests, err
			},
			MaxSnooze: 50 * time.Millisecond,
			Logger:    slog.New(slog.DiscardHandler),
		}
	}
}

// insert inserts a task of a tenant.
func (f *fixture) insert(t testing.TB, tenant string, opts *river.InsertOpts) *rivertype.JobRow {
	t.Helper()
	inserted, err := f.client.Insert(t.Context(), taskArgs{Name: tenant}, opts)
	require.NoError(t, err)
	return inserted.Job
}

// slots returns how many slots of a limit a tenant has free.
func (f *fixture) slots(t testing.TB, limit ratelimit.Limit, tenant string) float64 {
	t.Helper()
	v, err := f.limiter.Value(context.WithoutCancel(t.Context()), limit.For(tenant))
	require.NoError(t, err)
	return v.At(time.Now())
}

// TestHolderReleases promises that a slot is free when its job has ended, however it has, and that the next one gets it.
func TestHolderReleases(t *testing.T) {
	t.Parallel()
	failure := errors.New("it failed")
	for name, c := range map[string]struct {
		end  func(ctx context.Context, f *fixture, job *river.Job[taskArgs]) error
		kind river.EventKind
	}{
		"WhenItReturns": {func(context.Context, *fixture, *river.Job[taskArgs]) error { return nil }, river.EventKindJobCompleted},
		"WhenItFails":   {func(context.Context, *fixture, *river.Job[taskArgs]) error { return failure }, river.EventKindJobFailed},
		"WhenItPanics":  {func(context.Context, *fixture, *river.Job[taskArgs]) error { panic("broken") }, river.EventKindJobFailed},
		"WhenItSnoozes": {func(context.Context, *fixture, *river.Job[taskArgs]) error { return river.JobSnooze(time.Hour) }, river.EventKindJobSnoozed},
		"WhenItIsCancelled": {func(ctx context.Context, f *fixture, job *river.Job[taskArgs]) error {
			if _, err := f.client.JobCancel(ctx, job.ID); err != nil {
				return err
			}
			<-ctx.Done()
			return ctx.Err()
		}, river.EventKindJobCancelled},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setup(t, holding(oneEach))
			first := f.insert(t, "a", &river.InsertOpts{MaxAttempts: 1})
			events := f.start(t, func(ctx context.Context, job *river.Job[taskArgs]) error {
				if free := f.slots(t, oneEach, "a"); free != 0 {
					return river.JobCancel(errors.New("it holds nothing"))
				}
				if job.ID == first.ID {
					return c.end(ctx, f, job)
				}
				return nil
			})
			require.Equal(t, first.ID, await(t, events, 1, c.kind)[0].ID)
			second := f.insert(t, "a", nil)
			require.Equal(t, second.ID, await(t, events, 1, river.EventKindJobCompleted)[0].ID)
		})
	}
}

// TestHolderPutsOffWhatItRefuses promises that a job which finds no slot does not run, and loses no attempt by waiting.
func TestHolderPutsOffWhatItRefuses(t *testing.T) {
	t.Parallel()
	f := setup(t, holding(oneEach))
	elsewhere, err := f.limiter.Acquire(t.Context(), oneEach.For("a")) // with the clock of the limiter
	require.NoError(t, err)
	kept, release := f.limiter.Keep(t.Context(), elsewhere)
	var ran atomic.Int64
	events := f.start(t, func(_ context.Context, job *river.Job[taskArgs]) error {
		if job.Args.Name == "a" && kept.Err() == nil {
			ran.Add(1)
		}
		return nil
	})
	waiting := f.insert(t, "a", &river.InsertOpts{MaxAttempts: 1})
	for _, job := range await(t, events, 3, river.EventKindJobSnoozed) {
		require.Equal(t, waiting.ID, job.ID)
	}
	other := f.insert(t, "b", nil)
	require.Equal(t, other.ID, await(t, events, 1, river.EventKindJobCompleted)[0].ID, "another tenant does not wait")
	require.Zero(t, ran.Load())
	release()
	done := await(t, events, 1, river.EventKindJobCompleted)[0]
	require.Equal(t, waiting.ID, done.ID)
	require.Equal(t, 1, done.Attempt)
}

// TestHolderPutsOffWhatOthersBlock promises that a job which others keep from a decision is snoozed, and loses no attempt.
func TestHolderPutsOffWhatOthersBlock(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, s := ratelimittest.NewDB(), settings{}
		limiter, err := ratelimit.New(db, ratelimit.Config{AsOf: time.Now})
		require.NoError(t, err)
		holding(oneEach)(&s)
		holder, err := scheduler.NewHolder(limiter, *s.holder)
		require.NoError(t, err)
		worker, ok := holder.Middleware().(rivertype.WorkerMiddleware)
		require.True(t, ok)
		tx, err := db.Begin(t.Context())
		require.NoError(t, err)
		require.NoError(t, limiter.WithTx(tx).Reset(t.Context(), oneEach.For("a"))) // which locks its row
		job := &rivertype.JobRow{Kind: taskArgs{}.Kind(), EncodedArgs: []byte(`{"name": "a"}`)}
		var snoozed *rivertype.JobSnoozeError
		require.ErrorAs(t, worker.Work(t.Context(), job, func(context.Context) error { return nil }), &snoozed)
		require.NoError(t, tx.Rollback(t.Context()))
	})
}

// TestHolderStopsWhatLostItsSlot promises that a lost lease cancels the job's context, and that the job fails with the cause and is
// retried. A job that continues to its end is not run twice.
func TestHolderStopsWhatLostItsSlot(t *testing.T) {
	t.Parallel()
	journal := &logtest.Journal{}
	quick := ratelimit.Define("quick", ratelimit.Concurrency{Most: 1, Lease: 300 * time.Millisecond})
	f := setup(t, holding(quick), func(s *settings) { s.holder.Logger = slog.New(slog.NewTextHandler(journal, nil)) })
	events := f.start(t, func(ctx context.Context, job *river.Job[taskArgs]) error {
		if job.Attempt > 1 {
			return nil
		}
		if err := f.limiter.Reset(ctx, quick.For(job.Args.Name)); err != nil {
			return err
		}
		<-ctx.Done()
		if job.Args.Name == "stubborn" {
			return nil
		}
		return ctx.Err()
	})
	f.insert(t, "obedient", nil)
	failed := await(t, events, 1, river.EventKindJobFailed)[0]
	require.Contains(t, failed.Errors[0].Error, "the lease is lost")
	require.Equal(t, 2, await(t, events, 1, river.EventKindJobCompleted)[0].Attempt)
	f.insert(t, "stubborn", nil)
	require.Equal(t, 1, await(t, events, 1, river.EventKindJobCompleted)[0].Attempt)
	require.Contains(t, journal.String(), "a job lost its slot and went on to its end")
}

// TestHolderFailsClosed promises that no job runs that could not be decided on.
func TestHolderFailsClosed(t *testing.T) {
	t.Parallel()
	f := setup(t, holding(oneEach))
	_, err := f.pool.Exec(t.Context(), "ALTER TABLE ratelimit.buckets RENAME TO away")
	require.NoError(t, err)
	var ran atomic.Int64
	events := f.start(t, func(context.Context, *river.Job[taskArgs]) error { ran.Add(1); return nil })
	f.insert(t, "a", &river.InsertOpts{MaxAttempts: 2})
	failed := await(t, events, 2, river.EventKindJobFailed)
	require.Contains(t, failed[0].Errors[0].Error, "scheduler: hold: ")
	f.insert(t, "", &river.InsertOpts{MaxAttempts: 1}) // no key is never a slot that those without one share
	require.Contains(t, await(t, events, 1, river.EventKindJobFailed)[0].Errors[0].Error, ratelimit.ErrInvalidKey.Error())
	require.Zero(t, ran.Load())
	_, err = f.pool.Exec(t.Context(), "ALTER TABLE ratelimit.away RENAME TO buckets")
	require.NoError(t, err)
}

// TestHolderBesideAScheduler promises that jobs with a reservation and a slot keep both promises. No job starts before its moment,
// a tenant never has more than one running job, and each job is settled.
func TestHolderBesideAScheduler(t *testing.T) {
	t.Parallel()
	jobs := testsize.Of(12, 25) // more than there are tokens at first
	f := setup(t, holding(oneEach), func(s *settings) {
		s.limiter.StaleAfter = 5 * time.Second
		s.scheduler.TakeUpEarly = 100 * time.Millisecond
	})
	var mu sync.Mutex
	running := map[string]int{}
	events := f.start(t, func(ctx context.Context, job *river.Job[taskArgs]) error {
		mu.Lock()
		running[job.Args.Name]++
		beside := running[job.Args.Name]
		mu.Unlock()
		defer func() { mu.Lock(); defer mu.Unlock(); running[job.Args.Name]-- }()
		var now time.Time
		if err := f.pool.QueryRow(ctx, "SELECT clock_timestamp()").Scan(&now); err != nil {
			return err
		}
		if turn := scheduler.TurnFromContext(ctx); beside > 1 || now.Before(turn.ReadyAt) {
			return river.JobCancel(errors.New("too many, or early"))
		}
		if lease, held := ratelimit.LeaseFromContext(ctx); !held || lease.Fence == 0 {
			return river.JobCancel(errors.New("it holds nothing"))
		}
		return scheduler.TurnFromContext(ctx).Settle(ctx)
	})
	for range jobs {
		f.enqueue(t, nil, perSecond.Global())
	}
	for _, job := range await(t, events, jobs, river.EventKindJobCompleted) {
		require.Equal(t, 1, job.Attempt)
	}
	require.Equal(t, jobs, one[int](t, f.pool, "SELECT count(*) FROM ratelimit.reservations WHERE state = 'settled'"))
}

// TestHolderTakesTokensWithSlots promises that slots and tokens are taken together: a job without an available token is snoozed,
// and holds no slot meanwhile.
func TestHolderTakesTokensWithSlots(t *testing.T) {
	t.Parallel()
	var c *clock
	starts := ratelimit.Define("starts", ratelimit.TokenBucket{Rate: 1, Period: time.Minute, Capacity: 2})
	f := setup(t, holding(oneEach, starts), func(s *settings) { c = onClock(s) })
	events := f.start(t, func(context.Context, *river.Job[taskArgs]) error { return nil })
	for range 3 {
		f.insert(t, "a", nil)
	}
	await(t, events, 2, river.EventKindJobCompleted)
	var waiting *rivertype.JobRow
	eventually(t, func() bool { // its slot may have been the first thing that it waited for
		found, err := f.client.JobList(t.Context(), river.NewJobListParams().States(rivertype.JobStateScheduled))
		require.NoError(t, err)
		if len(found.Jobs) == 1 {
			waiting = found.Jobs[0]
		}
		return waiting != nil
	})
	require.WithinDuration(t, time.Now().Add(time.Minute), waiting.ScheduledAt, 30*time.Second)
	require.Equal(t, 1.0, f.slots(t, oneEach, "a"))
	c.move(time.Minute)
	_, err := f.client.JobRetry(t.Context(), waiting.ID)
	require.NoError(t, err)
	require.Equal(t, 1, await(t, events, 1, river.EventKindJobCompleted)[0].Attempt)
}

// TestWorkerKilledWhileItHolds promises that the slot of a killed worker is free when its lease ends, and not before. Its job runs
// again when River has rescued it.
func TestWorkerKilledWhileItHolds(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "kills a process")
	f := setup(t, holding(killable))
	killed := f.insert(t, "a", nil)
	_, err := spawn(t.Context(), "hold", f.pool.Config().ConnString())
	require.NoError(t, err)
	job, err := f.client.JobGet(t.Context(), killed.ID)
	require.NoError(t, err)
	require.Equal(t, rivertype.JobStateRunning, job.State)
	d, err := f.limiter.Check(t.Context(), killable.For("a"))
	require.NoError(t, err)
	ends := d.At.Add(d.RetryAfter)
	t.Logf("the slot is free %v after the worker was killed", d.RetryAfter)

	_, err = f.pool.Exec(t.Context(), "UPDATE river_job SET attempted_at = attempted_at - interval '2 hours'") // River rescues after one
	require.NoError(t, err)
	var mu sync.Mutex
	var started []time.Time
	events := f.start(t, func(ctx context.Context, _ *river.Job[taskArgs]) error {
		var now time.Time
		err := f.pool.QueryRow(ctx, "SELECT clock_timestamp()").Scan(&now)
		mu.Lock()
		defer mu.Unlock()
		started = append(started, now)
		return err
	})
	f.insert(t, "a", nil)
	ended := await(t, events, 2, river.EventKindJobCompleted)
	at := slices.IndexFunc(ended, func(job *rivertype.JobRow) bool { return job.ID == killed.ID })
	require.NotEqual(t, -1, at)
	require.Equal(t, 2, ended[at].Attempt)
	mu.Lock()
	defer mu.Unlock()
	for _, start := range started {
		require.False(t, start.Before(ends), "the slot was the dead worker's until %v", ends)
	}
}

// TestNewHolder promises that what a Holder cannot work with is an error when the program starts.
func TestNewHolder(t *testing.T) {
	t.Parallel()
	f := setup(t)
	_, err := scheduler.NewHolder(nil, scheduler.HolderConfig{})
	require.ErrorIs(t, err, scheduler.ErrInvalidConfig)
	_, err = scheduler.NewHolder(f.limiter, scheduler.HolderConfig{})
	require.ErrorContains(t, err, "Requests is nil")
	none := func(*rivertype.JobRow) ([]ratelimit.Request, error) { return nil, nil }
	_, err = scheduler.NewHolder(f.limiter, scheduler.HolderConfig{Requests: none, MaxSnooze: -1})
	require.ErrorContains(t, err, "MaxSnooze")
	_, err = scheduler.NewHolder(f.limiter.WithTx(nil), scheduler.HolderConfig{Requests: none})
	require.ErrorContains(t, err, "WithTx")
}
