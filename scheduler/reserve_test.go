package scheduler_test

import (
	"context"
	"errors"
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

// insertMany inserts tasks without Enqueue, and sets what each costs.
func insertMany(t *testing.T, n int, request ratelimit.Request, configure ...func(*settings)) *fixture {
	t.Helper()
	f := setup(t, append(configure, func(s *settings) {
		s.scheduler.Requests = func(job *rivertype.JobRow) ([]ratelimit.Request, error) {
			if job.Kind != (taskArgs{}).Kind() {
				return nil, nil
			}
			return []ratelimit.Request{request}, nil
		}
	})...)
	params := make([]river.InsertManyParams, n)
	for i := range params {
		params[i].Args = taskArgs{Name: "task"}
	}
	_, err := f.client.InsertMany(t.Context(), params)
	require.NoError(t, err)
	return f
}

// TestJobsWithoutEnqueueArePaced promises for jobs from plain Insert: they start no faster than their limit, and each runs once and loses
// no attempt by waiting.
func TestJobsWithoutEnqueueArePaced(t *testing.T) {
	t.Parallel()
	const capacity, rate, stale = 10, 10, 200 * time.Millisecond
	jobs := testsize.Of(14, 25)
	f := insertMany(t, jobs, perSecond.Global(), func(s *settings) {
		s.limiter.StaleAfter, s.scheduler.TakeUpEarly = stale, 100*time.Millisecond
	})
	events := f.start(t, func(context.Context, *river.Job[taskArgs]) error { return nil })
	for _, job := range await(t, events, jobs, river.EventKindJobCompleted) {
		require.Equal(t, 1, job.Attempt)
	}
	// The instants are the database's: how soon the work is called then is the machine's. A turn may be used until it is stale.
	rows, err := f.pool.Query(t.Context(), "SELECT to_timestamp(started_us / 1e6) FROM ratelimit.reservations WHERE state = 'settled' ORDER BY started_us")
	require.NoError(t, err)
	started, err := pgx.CollectRows(rows, pgx.RowTo[time.Time])
	require.NoError(t, err)
	require.Len(t, started, jobs, "a reservation for each")
	for i := range started {
		for j := i; j < len(started); j++ {
			span := started[j].Sub(started[i]) + stale
			require.LessOrEqual(t, float64(j-i+1), capacity+rate*span.Seconds()+1e-3)
		}
	}
}

// TestJobsWithoutEnqueuePayOnce promises one reservation for all attempts.
func TestJobsWithoutEnqueuePayOnce(t *testing.T) {
	t.Parallel()
	f := insertMany(t, 1, daily.For("ada"))
	events := f.start(t, func(_ context.Context, job *river.Job[taskArgs]) error {
		if job.Attempt < 3 {
			return errUpstream
		}
		return nil
	})
	await(t, events, 1, river.EventKindJobCompleted)
	require.InDelta(t, 99, f.held(t, daily, "ada"), 1e-9)
	require.Equal(t, 1, f.reservations(t))
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
