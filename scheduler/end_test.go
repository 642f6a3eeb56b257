package scheduler_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
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

// later is a retry policy that waits longer than a test runs.
type later struct{}

func (later) NextRetry(*rivertype.JobRow) time.Time { return time.Now().Add(time.Hour) }

// TestCancel promises that a cancelled job returns the tokens that no attempt may have used.
func TestCancel(t *testing.T) {
	t.Parallel()
	f := setup(t, func(s *settings) { s.river.RetryPolicy = later{} })
	enqueue := func(name string) scheduler.Enqueued {
		return f.enqueue(t, &river.InsertOpts{Tags: []string{name}}, daily.For(name).Cost(30))
	}
	cancel := func(id int64, result error) (state rivertype.JobState, err error) {
		err = pgx.BeginFunc(t.Context(), f.pool, func(tx pgx.Tx) error {
			job, err := f.scheduler.Cancel(t.Context(), f.client, tx, id)
			if err != nil {
				return err
			}
			state = job.State
			return result
		})
		return state, err
	}
	requireCancelled := func(e scheduler.Enqueued, job rivertype.JobState, state ratelimit.ReservationState) {
		t.Helper()
		got, err := cancel(e.Job.ID, nil)
		require.NoError(t, err)
		require.Equal(t, job, got)
		require.Equal(t, state, f.state(t, e.ID))
	}

	unused := enqueue("unused")
	_, err := cancel(unused.Job.ID, errUpstream)
	require.ErrorIs(t, err, errUpstream)
	require.Equal(t, ratelimit.Open, f.state(t, unused.ID), "the transaction was rolled back")
	var group errgroup.Group
	for range 10 {
		group.Go(func() error { _, err := cancel(unused.Job.ID, nil); return err })
	}
	require.NoError(t, group.Wait())
	requireCancelled(unused, rivertype.JobStateCancelled, ratelimit.Cancelled)
	require.InDelta(t, 100, f.held(t, daily, "unused"), 1e-9)

	running, end := make(chan struct{}), make(chan struct{})
	events := f.start(t, func(ctx context.Context, job *river.Job[taskArgs]) error {
		switch job.Tags[0] {
		case "fails":
			return errUpstream
		case "runs":
			close(running)
			<-ctx.Done()
			<-end
			return ctx.Err()
		}
		return nil
	})
	succeeds := enqueue("succeeds")
	await(t, events, 1, river.EventKindJobCompleted)
	requireCancelled(succeeds, rivertype.JobStateCompleted, ratelimit.Settled)
	fails := enqueue("fails")
	await(t, events, 1, river.EventKindJobFailed)
	requireCancelled(fails, rivertype.JobStateCancelled, ratelimit.Settled)
	runs := enqueue("runs")
	<-running
	requireCancelled(runs, rivertype.JobStateRunning, ratelimit.Open)
	close(end)
	await(t, events, 1, river.EventKindJobCancelled)
	require.Equal(t, ratelimit.Settled, f.state(t, runs.ID))
	for _, name := range []string{"succeeds", "fails", "runs"} {
		require.InDelta(t, 70, f.held(t, daily, name), 1e-9)
	}
	_, err = cancel(12345, nil)
	require.ErrorIs(t, err, river.ErrNotFound)
}

// TestLostReservation promises that a job whose reservation is gone runs, and pays for one new turn, however often it
// is started. Here its queue was paused until the reservation had expired and its row was deleted.
func TestLostReservation(t *testing.T) {
	t.Parallel()
	now := time.Now()
	f := setup(t, func(s *settings) {
		s.limiter.AsOf = func() time.Time { return now }
		s.river.RetryPolicy = soon{}
	})
	e := f.enqueue(t, nil, daily.For("ada").Plan("pro").Cost(30))
	require.JSONEq(t, `[{"limit": "daily", "key": "ada", "plan": "pro", "cost": 30, "policy": `+policyOf(t, daily)+`}]`,
		one[string](t, f.pool, "SELECT metadata ->> 'ratelimit:reservation:requests' FROM river_job WHERE id = $1", e.Job.ID))
	require.Equal(t, e.ReadyAt.UTC().Format(time.RFC3339Nano),
		one[string](t, f.pool, "SELECT metadata ->> 'ratelimit:reservation:ready_at' FROM river_job WHERE id = $1", e.Job.ID))
	page, err := os.ReadFile("../docs/reservations.md")
	require.NoError(t, err)
	block := regexp.MustCompile("(?s)```sql\n(.*?)```").FindSubmatch(page)
	require.Equal(t, fmt.Sprint(e.Job.ID, " daily ada 30 ", e.ReadyAt.UTC().Format(time.RFC3339Nano)), one[string](t, f.pool,
		`SELECT concat_ws(' ', w.id, w."limit", w.key, w.cost, w.ready_at) FROM (`+strings.TrimSuffix(strings.TrimSpace(string(block[1])), ";")+`) AS w`))
	for range 2 { // it ends, and its row is deleted
		now = now.Add(10 * ratelimit.Day)
		_, err := f.limiter.Expire(t.Context())
		require.NoError(t, err)
	}
	require.Zero(t, one[int](t, f.pool, "SELECT count(*) FROM ratelimit.reservations"))
	events := f.start(t, func(_ context.Context, job *river.Job[taskArgs]) error {
		require.InDelta(t, 70, f.held(t, daily, "ada"), 1e-9)
		if job.Attempt == 1 {
			return errUpstream
		}
		return nil
	})
	await(t, events, 1, river.EventKindJobCompleted)
	require.InDelta(t, 70, f.held(t, daily, "ada"), 1e-9)
	require.Equal(t, ratelimit.Settled, f.state(t, e.ID), "it has the same ID")
	require.Equal(t, 1, one[int](t, f.pool, "SELECT count(*) FROM ratelimit.reservations"))
}

// policyOf returns the policy of a limit as JSON.
func policyOf(t *testing.T, limit ratelimit.Limit) string {
	t.Helper()
	text, err := ratelimit.MarshalPolicy(limit.Policy())
	require.NoError(t, err)
	return string(text)
}

func TestMaintain(t *testing.T) {
	t.Parallel()
	maintain := func(t *testing.T, f *fixture) scheduler.Maintained {
		t.Helper()
		done, err := f.scheduler.Maintain(t.Context(), f.client)
		require.NoError(t, err)
		return done
	}

	t.Run("EndsTheReservationsOfJobsThatHaveEnded", func(t *testing.T) {
		t.Parallel()
		f := setup(t, func(s *settings) { s.scheduler.Discarded = scheduler.GiveBack })
		f.enqueue(t, nil, daily.For("waits").Cost(30))
		for n, c := range []struct {
			job       rivertype.JobState
			started   bool
			unguarded int
			state     ratelimit.ReservationState
			left      float64
		}{
			{rivertype.JobStateCancelled, false, 0, ratelimit.Cancelled, 100}, // through River
			{rivertype.JobStateCancelled, true, 0, ratelimit.Settled, 70},
			{rivertype.JobStateDiscarded, true, 0, ratelimit.Cancelled, 100}, // it panicked in its last attempt
			{rivertype.JobStateCompleted, true, 0, ratelimit.Settled, 70},    // its process died before it could settle
			{rivertype.JobStateCompleted, false, 1, ratelimit.Settled, 70},   // its client lacks the middleware
		} {
			key := strconv.Itoa(n)
			e := f.enqueue(t, nil, daily.For(key).Cost(30))
			if c.started {
				_, err := f.limiter.Start(t.Context(), e.ID)
				require.NoError(t, err)
			}
			one[int64](t, f.pool, "UPDATE river_job SET state = $2, finalized_at = now() WHERE id = $1 RETURNING id", e.Job.ID, c.job)
			require.Equal(t, scheduler.Maintained{Ended: 1, Unguarded: c.unguarded}, maintain(t, f))
			require.Equal(t, c.state, f.state(t, e.ID), c)
			require.InDelta(t, c.left, f.held(t, daily, key), 1e-9)
		}
		require.Equal(t, scheduler.Maintained{}, maintain(t, f))
		require.Equal(t, 1, f.open(t))
	})

	t.Run("SkipsAReservationThatCannotBeEnded", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		var all []scheduler.Enqueued
		for range 3 {
			all = append(all, f.enqueue(t, nil, daily.Global().Cost(10)))
		}
		for _, e := range all {
			_, err := f.client.JobCancel(t.Context(), e.Job.ID)
			require.NoError(t, err)
		}
		rename := func(name string) {
			_, err := f.pool.Exec(t.Context(), "UPDATE ratelimit.reservations SET name = $2 WHERE id = $1::uuid", all[0].ID, name)
			require.NoError(t, err)
		}
		rename(strings.Repeat("x", 65)) // which no bucket can have
		for _, ended := range []int{2, 0} {
			done, err := f.scheduler.Maintain(t.Context(), f.client)
			require.ErrorContains(t, err, fmt.Sprintf("job %d: ", all[0].Job.ID))
			require.Equal(t, scheduler.Maintained{Ended: ended}, done)
			require.Equal(t, ratelimit.Open, f.state(t, all[0].ID))
		}
		require.InDelta(t, 90, f.held(t, daily, ""), 1e-9)
		rename(daily.Name())
		require.Equal(t, scheduler.Maintained{Ended: 1}, maintain(t, f))
		require.InDelta(t, 100, f.held(t, daily, ""), 1e-9)
	})

	t.Run("LooksAgainForReservationsThatWereHidden", func(t *testing.T) {
		t.Parallel()
		owner := setup(t)
		role, pool := postgrestest.NewRole(t, owner.pool, "")
		run := func(sql string) {
			_, err := owner.pool.Exec(t.Context(), sql)
			require.NoError(t, err)
		}
		run("GRANT USAGE ON SCHEMA ratelimit TO " + role + "; GRANT ALL ON ALL TABLES IN SCHEMA ratelimit, public TO " + role +
			"; GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO " + role + "; GRANT ALL ON ALL FUNCTIONS IN SCHEMA ratelimit TO " + role)
		f := setupOn(t, pool)
		e := f.enqueue(t, nil, daily.Global().Cost(10))
		one[int64](t, owner.pool, "UPDATE river_job SET state = 'cancelled', finalized_at = now() - interval '1 hour' WHERE id = $1 RETURNING id", e.Job.ID)
		run("ALTER TABLE ratelimit.reservations ENABLE ROW LEVEL SECURITY")
		_, err := f.scheduler.Maintain(t.Context(), f.client)
		require.ErrorContains(t, err, "row level security")
		run("ALTER TABLE ratelimit.reservations DISABLE ROW LEVEL SECURITY")
		require.Equal(t, scheduler.Maintained{Ended: 1}, maintain(t, f))
	})

	t.Run("SkipsALockedBucket", func(t *testing.T) {
		t.Parallel()
		roomy := ratelimit.Define("roomy", ratelimit.FixedWindow{Rate: 1e6, Period: 24 * time.Hour})
		const held = 110 // more than the failures after which a call gives up
		early := setup(t, func(s *settings) {
			s.limiter.AsOf = func() time.Time { return time.Now().Add(-48 * time.Hour) }
		})
		early.enqueue(t, nil, perSecond.Global().Cost(4)) // whose time is over
		f := setupOn(t, early.pool)
		var all []scheduler.Enqueued
		for n := range held + 1 {
			key := "held"
			if n == held {
				key = "free"
			}
			e := f.enqueue(t, nil, roomy.For(key).Cost(10))
			_, err := f.client.JobCancel(t.Context(), e.Job.ID)
			require.NoError(t, err)
			all = append(all, e)
		}
		holder, err := f.pool.Begin(t.Context())
		require.NoError(t, err)
		t.Cleanup(func() { _ = holder.Rollback(context.WithoutCancel(t.Context())) })
		_, err = holder.Exec(t.Context(), "SELECT FROM ratelimit.buckets WHERE key = 'held' FOR UPDATE")
		require.NoError(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second) // two jobs that wait for Config.Timeout
		defer cancel()
		done, err := f.scheduler.Maintain(ctx, f.client)
		require.Equal(t, scheduler.Maintained{Ended: 1, Expired: 1}, done)
		require.ErrorContains(t, err, "55P03", "it is told once, and the other jobs of the bucket are not tried")
		require.Equal(t, 1, strings.Count(err.Error(), "55P03"))
		require.Equal(t, ratelimit.Cancelled, f.state(t, all[held].ID))
		require.NoError(t, holder.Rollback(t.Context()))
		require.Equal(t, scheduler.Maintained{Ended: held}, maintain(t, f))
	})
}

// TestJobsWithoutEnqueue promises for jobs from plain Insert: each waits for its turn, and has one reservation for all
// attempts. No attempt is lost by waiting.
func TestJobsWithoutEnqueue(t *testing.T) {
	t.Parallel()
	const jobs = 14 // four more than there are tokens
	f := setup(t, func(s *settings) {
		s.scheduler.Requests = func(job *rivertype.JobRow) ([]ratelimit.Request, error) {
			if job.Kind != (taskArgs{}).Kind() {
				return nil, nil
			}
			return []ratelimit.Request{perSecond.Global()}, nil
		}
	})
	_, err := f.client.InsertMany(t.Context(), slices.Repeat([]river.InsertManyParams{{Args: taskArgs{}}}, jobs))
	require.NoError(t, err)
	events := f.start(t, func(_ context.Context, job *river.Job[taskArgs]) error {
		if job.Attempt == 1 {
			return errUpstream
		}
		return nil
	})
	for _, job := range await(t, events, jobs, river.EventKindJobCompleted) {
		require.Equal(t, 2, job.Attempt)
	}
	require.Equal(t, jobs, one[int](t, f.pool, "SELECT count(*) FROM ratelimit.reservations"))
	require.Equal(t, jobs, one[int](t, f.pool, "SELECT count(*) FROM ratelimit.reservations WHERE state = 'settled' AND started_us >= ready_us"))
	require.GreaterOrEqual(t, one[int](t, f.pool, "SELECT max(ready_us) - min(ready_us) FROM ratelimit.reservations"), (jobs-10)*100_000-1)
}

// TestRetriesThatPay promises that an attempt after a failure pays again, and an attempt after a snooze does not.
func TestRetriesThatPay(t *testing.T) {
	t.Parallel()
	f := setup(t, func(s *settings) { s.scheduler.RetriesPay = true })
	results := []error{river.JobSnooze(0), errUpstream, river.JobSnooze(0), river.JobSnooze(0), nil}
	var attempts []int
	events := f.start(t, func(ctx context.Context, job *river.Job[taskArgs]) error {
		if f.state(t, scheduler.TurnFromContext(ctx).ID) != ratelimit.Open {
			return river.JobCancel(errors.New("a snooze ended its reservation"))
		}
		attempts = append(attempts, job.Attempt)
		return results[len(attempts)-1]
	})
	f.enqueue(t, nil, daily.Global().Cost(7))
	await(t, events, 1, river.EventKindJobCompleted)
	require.Equal(t, []int{1, 1, 2, 2, 2}, attempts)
	require.InDelta(t, 100-2*7, f.held(t, daily, ""), 1e-9)
}
