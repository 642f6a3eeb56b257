package scheduler_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/scheduler"
)

// excess returns by how many of the instants, in order, some span holds more than capacity + rate * span, at most.
func excess(instants []time.Time, capacity, rate float64) float64 {
	worst := -capacity
	for i := range instants {
		for j := i; j < len(instants); j++ {
			worst = max(worst, float64(j-i+1)-capacity-rate*instants[j].Sub(instants[i]).Seconds())
		}
	}
	return worst
}

// The middleware snoozes a job whose turn has not come, and does not run it.
func TestMiddlewareSnoozesUntilTheTurn(t *testing.T) {
	t.Parallel()
	var c *clock
	f := setup(t, func(s *settings) { c = onClock(s) })
	worker, ok := f.scheduler.Middleware().(rivertype.WorkerMiddleware)
	require.True(t, ok)
	f.enqueue(t, nil, perSecond.Global().Cost(10))
	job, runs := f.enqueue(t, nil, perSecond.Global().Cost(10)).Job, 0
	work := func() error {
		return worker.Work(t.Context(), job, func(context.Context) error { runs++; return nil })
	}
	var snoozed *rivertype.JobSnoozeError
	require.ErrorAs(t, work(), &snoozed)
	require.Equal(t, time.Second+time.Millisecond, snoozed.Duration)
	require.Zero(t, runs)
	c.move(time.Second)
	require.NoError(t, work())
	require.Equal(t, 1, runs)
}

func TestJob(t *testing.T) {
	t.Parallel()

	t.Run("RunsAtOnceWhenTheTokensAreThere", func(t *testing.T) {
		t.Parallel()
		f := setup(t, func(s *settings) { s.river.FetchPollInterval = 10 * time.Minute }) // a notification wakes it
		events := f.start(t, func(context.Context, *river.Job[taskArgs]) error { return nil })
		f.enqueue(t, nil, perSecond.Global())
		await(t, events, 1, river.EventKindJobCompleted)
	})

	t.Run("WaitsAgainWhenItComesUpAfterItsSlotWentStale", func(t *testing.T) {
		t.Parallel()
		// The workers are down for an hour: everything is reserved then, and comes up now.
		const capacity, rate, stale = 10, 10, 200 * time.Millisecond
		jobs := testsize.Of(16, 40)
		hourAgo := time.Now().Add(-time.Hour)
		before := setup(t, func(s *settings) {
			s.limiter.AsOf = func() time.Time { return hourAgo }
			s.limiter.StaleAfter = stale
		})
		for range jobs {
			before.enqueue(t, nil, perSecond.Global())
		}
		now := setupOn(t, before.pool, func(s *settings) {
			s.limiter.StaleAfter = stale
			s.scheduler.TakeUpEarly = 100 * time.Millisecond
		})
		var early atomic.Int64
		events := now.start(t, func(ctx context.Context, _ *river.Job[taskArgs]) error {
			if started, err := now.limiter.Started(ctx, scheduler.TurnFromContext(ctx).ID); err != nil || !started {
				early.Add(1)
			}
			return nil
		})
		done := await(t, events, jobs, river.EventKindJobCompleted)
		for _, job := range done {
			require.Equal(t, 1, job.Attempt)
		}
		require.Zero(t, early.Load(), "each was called after its turn had been started")
		// The instants are the database's: how soon the work is called then is the machine's. A turn may be used
		// until it is stale, so that much of a burst is allowed for. Without new turns the excess is jobs - capacity.
		rows, err := now.pool.Query(t.Context(), "SELECT to_timestamp(started_us / 1e6) FROM ratelimit.reservations ORDER BY started_us")
		require.NoError(t, err)
		started, err := pgx.CollectRows(rows, pgx.RowTo[time.Time])
		require.NoError(t, err)
		require.Len(t, started, jobs)
		require.LessOrEqual(t, excess(started, capacity, rate), rate*stale.Seconds()+1e-3)
	})
}

func TestRetries(t *testing.T) {
	t.Parallel()
	fail := errors.New("the service is down")

	t.Run("DoNotPayTwice", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.enqueue(t, nil, daily.Global().Cost(7))
		var restarted []bool
		events := f.start(t, func(ctx context.Context, job *river.Job[taskArgs]) error {
			restarted = append(restarted, scheduler.TurnFromContext(ctx).Restarted)
			if job.Attempt < 3 {
				return fail
			}
			return nil
		})
		await(t, events, 1, river.EventKindJobCompleted)
		require.Equal(t, []bool{false, true, true}, restarted)
		require.InDelta(t, 93, f.held(t, daily, ""), 1e-9)
	})

	t.Run("PayAndWaitWhenAsked", func(t *testing.T) {
		t.Parallel()
		f := setup(t, func(s *settings) { s.scheduler.RetriesPay = true })
		var last time.Time
		events := f.start(t, func(_ context.Context, job *river.Job[taskArgs]) error {
			last = time.Now()
			if job.Attempt < 3 {
				return fail
			}
			return nil
		})
		e := f.enqueue(t, nil, perSecond.Global().Cost(5))
		job := await(t, events, 1, river.EventKindJobCompleted)[0]
		require.Equal(t, 3, job.Attempt)
		// 15 tokens were taken: 10 are there, and 5 take half a second to arrive.
		require.GreaterOrEqual(t, last.Sub(e.At), 500*time.Millisecond)
	})

	t.Run("DoNotPayAfterASnooze", func(t *testing.T) {
		t.Parallel()
		daily := ratelimit.Define("daily", ratelimit.FixedWindow{Rate: 100, Period: 24 * time.Hour})
		f := setup(t, func(s *settings) { s.scheduler.RetriesPay = true })
		results := []error{river.JobSnooze(0), fail, river.JobSnooze(0), river.JobSnooze(0), nil}
		var attempts []int
		ended := false // its reservation, by a snooze
		events := f.start(t, func(ctx context.Context, job *river.Job[taskArgs]) error {
			ended = ended || f.state(t, scheduler.TurnFromContext(ctx).ID) != ratelimit.Open
			attempts = append(attempts, job.Attempt)
			return results[len(attempts)-1]
		})
		f.enqueue(t, nil, daily.Global().Cost(7))
		await(t, events, 1, river.EventKindJobCompleted)
		require.Equal(t, []int{1, 1, 2, 2, 2}, attempts)
		require.False(t, ended)
		require.InDelta(t, 100-2*7, f.held(t, daily, ""), 1e-9)
	})

	t.Run("WaitForWhatMaxReservedAllows", func(t *testing.T) {
		t.Parallel()
		tight := ratelimit.Define("tight", ratelimit.TokenBucket{Rate: 10, Period: time.Second, Capacity: 5, MaxReserved: 1})
		f := setup(t, func(s *settings) { s.scheduler.RetriesPay = true })
		events := f.start(t, func(_ context.Context, job *river.Job[taskArgs]) error {
			if job.Attempt < 2 {
				return fail
			}
			return nil
		})
		f.enqueue(t, nil, tight.Global().Cost(5))
		require.Equal(t, 2, await(t, events, 1, river.EventKindJobCompleted)[0].Attempt)
	})

	t.Run("ByHandOfAJobThatGaveBackItsTokensPay", func(t *testing.T) {
		t.Parallel()
		f := setup(t, func(s *settings) { s.scheduler.Discarded = scheduler.GiveBack })
		var healthy atomic.Bool
		events := f.start(t, func(context.Context, *river.Job[taskArgs]) error {
			if healthy.Load() {
				return nil
			}
			return fail
		})
		e := f.enqueue(t, &scheduler.EnqueueOpts{InsertOpts: river.InsertOpts{MaxAttempts: 1}}, daily.Global().Cost(7))
		require.Equal(t, rivertype.JobStateDiscarded, await(t, events, 1, river.EventKindJobFailed)[0].State)
		require.InDelta(t, 100, f.held(t, daily, ""), 1e-9)
		healthy.Store(true)
		_, err := f.client.JobRetry(t.Context(), e.Job.ID)
		require.NoError(t, err)
		await(t, events, 1, river.EventKindJobCompleted)
		require.InDelta(t, 93, f.held(t, daily, ""), 1e-9)
		require.Equal(t, ratelimit.Settled, f.state(t, e.ID))
	})
}
