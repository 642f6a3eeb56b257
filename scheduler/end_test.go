package scheduler_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/scheduler"
)

// daily holds 100 tokens, and nothing arrives while a test runs, so that its value shows the charge.
var daily = ratelimit.Define("daily", ratelimit.FixedWindow{Rate: 100, Period: 24 * time.Hour, Start: time.Now()})

// TestSettle promises that a settlement commits with the work and the completion of the job.
func TestSettle(t *testing.T) {
	t.Parallel()
	f := setup(t)
	var states []ratelimit.ReservationState
	events := f.start(t, func(ctx context.Context, job *river.Job[taskArgs]) error {
		states = append(states, f.state(t, scheduler.TurnFromContext(ctx).ID))
		return pgx.BeginFunc(ctx, f.pool, func(tx pgx.Tx) error {
			if err := scheduler.TurnFromContext(ctx).WithTx(tx).Settle(ctx, daily.Global().Cost(10)); err != nil {
				return err
			}
			if job.Attempt == 1 {
				return errUpstream // and the settlement is undone
			}
			_, err := river.JobCompleteTx[*riverpgxv5.Driver](ctx, tx, job)
			return err
		})
	})
	e := f.enqueue(t, nil, daily.Global().Cost(30))
	require.Equal(t, rivertype.JobStateAvailable, await(t, events, 1, river.EventKindJobFailed)[0].State)
	await(t, events, 1, river.EventKindJobCompleted)
	require.Equal(t, []ratelimit.ReservationState{ratelimit.Open, ratelimit.Open}, states)
	require.Equal(t, ratelimit.Settled, f.state(t, e.ID))
	require.InDelta(t, 90, f.held(t, daily, ""), 1e-9)
}

func TestCancel(t *testing.T) {
	t.Parallel()
	cancel := func(t *testing.T, f *fixture, id int64) *rivertype.JobRow {
		t.Helper()
		var job *rivertype.JobRow
		require.NoError(t, pgx.BeginFunc(t.Context(), f.pool, func(tx pgx.Tx) (err error) {
			job, err = f.scheduler.Cancel(t.Context(), f.client, tx, id)
			return err
		}))
		return job
	}

	t.Run("GivesBackOnceHoweverOftenItIsCalled", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.enqueue(t, nil, daily.Global().Cost(30))
		e := f.enqueue(t, nil, daily.Global().Cost(30))
		require.ErrorIs(t, pgx.BeginFunc(t.Context(), f.pool, func(tx pgx.Tx) error {
			job, err := f.scheduler.Cancel(t.Context(), f.client, tx, e.Job.ID)
			require.NoError(t, err)
			require.Equal(t, rivertype.JobStateCancelled, job.State)
			return errUpstream
		}), errUpstream)
		require.Equal(t, ratelimit.Open, f.state(t, e.ID), "the transaction was rolled back")
		var group errgroup.Group
		for range 10 {
			group.Go(func() error {
				return pgx.BeginFunc(t.Context(), f.pool, func(tx pgx.Tx) error {
					_, err := f.scheduler.Cancel(t.Context(), f.client, tx, e.Job.ID)
					return err
				})
			})
		}
		require.NoError(t, group.Wait())
		require.Equal(t, ratelimit.Cancelled, f.state(t, e.ID))
		require.InDelta(t, 70, f.held(t, daily, ""), 1e-9)
	})

	t.Run("KeepsWhatAnAttemptMayHaveUsed", func(t *testing.T) {
		t.Parallel()
		f := setup(t, func(s *settings) { s.river.RetryPolicy = later{} })
		events := f.start(t, func(context.Context, *river.Job[taskArgs]) error { return errUpstream })
		e := f.enqueue(t, nil, daily.Global().Cost(30))
		await(t, events, 1, river.EventKindJobFailed)
		require.Equal(t, rivertype.JobStateCancelled, cancel(t, f, e.Job.ID).State)
		require.Equal(t, ratelimit.Settled, f.state(t, e.ID))
		require.InDelta(t, 70, f.held(t, daily, ""), 1e-9)
	})

	t.Run("AsksARunningJobToStopAndEndsItsSlotWithIt", func(t *testing.T) {
		t.Parallel()
		f := setup(t, func(s *settings) { s.scheduler.Cancelled = scheduler.GiveBack })
		running := make(chan struct{})
		events := f.start(t, func(ctx context.Context, _ *river.Job[taskArgs]) error {
			close(running)
			<-ctx.Done()
			return ctx.Err()
		})
		e := f.enqueue(t, nil, daily.Global().Cost(30))
		<-running
		require.Equal(t, rivertype.JobStateRunning, cancel(t, f, e.Job.ID).State)
		await(t, events, 1, river.EventKindJobCancelled)
		require.Equal(t, ratelimit.Cancelled, f.state(t, e.ID))
		require.InDelta(t, 100, f.held(t, daily, ""), 1e-9)
	})

	t.Run("ChangesNothingOfAJobThatHasEnded", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		events := f.start(t, func(context.Context, *river.Job[taskArgs]) error { return nil })
		e := f.enqueue(t, nil, daily.Global().Cost(30))
		await(t, events, 1, river.EventKindJobCompleted)
		require.Equal(t, rivertype.JobStateCompleted, cancel(t, f, e.Job.ID).State)
		require.InDelta(t, 70, f.held(t, daily, ""), 1e-9)
		require.ErrorIs(t, pgx.BeginFunc(t.Context(), f.pool, func(tx pgx.Tx) error {
			_, err := f.scheduler.Cancel(t.Context(), f.client, tx, 12345)
			return err
		}), river.ErrNotFound)
	})
}

// later is a retry policy that waits longer than a test runs.
type later struct{}

func (later) NextRetry(*rivertype.JobRow) time.Time { return time.Now().Add(time.Hour) }
