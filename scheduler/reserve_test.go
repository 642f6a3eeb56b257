package scheduler_test

import (
	"context"
	"encoding/json"
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
)

// perTenant returns what tasks cost that are named by their tenants: a token of the tenant's.
func perTenant(limit ratelimit.Limit) func(*rivertype.JobRow) ([]ratelimit.Request, error) {
	return func(job *rivertype.JobRow) ([]ratelimit.Request, error) {
		if job.Kind != (taskArgs{}).Kind() {
			return nil, nil
		}
		var args taskArgs
		if err := json.Unmarshal(job.EncodedArgs, &args); err != nil {
			return nil, err
		}
		return []ratelimit.Request{limit.For(args.Name)}, nil
	}
}

// insertMany inserts tasks as a program does that knows of no limits.
func (f *fixture) insertMany(t testing.TB, name string, n int) {
	t.Helper()
	params := make([]river.InsertManyParams, n)
	for i := range params {
		params[i].Args = taskArgs{Name: name}
	}
	_, err := f.client.InsertMany(t.Context(), params)
	require.NoError(t, err)
}

// TestJobsWithoutEnqueueArePaced promises for jobs from plain Insert: a tenant's jobs start no faster than its limit, none waits
// for another tenant's, and each runs once and loses no attempt by waiting.
func TestJobsWithoutEnqueueArePaced(t *testing.T) {
	t.Parallel()
	const stale = 200 * time.Millisecond
	each := testsize.Of(14, 25)
	f := setup(t, func(s *settings) {
		s.limiter.StaleAfter = stale
		s.scheduler.TakeUpEarly = 100 * time.Millisecond
		s.scheduler.Requests = perTenant(perSecond)
	})
	for _, tenant := range []string{"ada", "bob"} {
		f.insertMany(t, tenant, each)
	}
	events := f.start(t, func(context.Context, *river.Job[taskArgs]) error { return nil })
	for _, job := range await(t, events, 2*each, river.EventKindJobCompleted) {
		require.Equal(t, 1, job.Attempt)
	}
	require.Equal(t, 2*each, f.reservations(t), "one for each")
	for _, tenant := range []string{"ada", "bob"} {
		rows, err := f.pool.Query(t.Context(), `SELECT to_timestamp(started_us / 1e6) FROM ratelimit.reservations
			WHERE id IN (SELECT (metadata ->> 'ratelimit:reservation')::uuid FROM river_job WHERE args ->> 'name' = $1) ORDER BY started_us`, tenant)
		require.NoError(t, err)
		started, err := pgx.CollectRows(rows, pgx.RowTo[time.Time])
		require.NoError(t, err)
		require.Len(t, started, each)
		require.LessOrEqual(t, excess(started, 10, 10), 10*stale.Seconds()+1e-3)
	}
	require.Zero(t, one[int](t, f.pool, `SELECT count(*) FROM ratelimit.reservations WHERE state <> 'settled'`))
}

func TestJobsWithoutEnqueue(t *testing.T) {
	t.Parallel()

	t.Run("PayOnceForAllAttempts", func(t *testing.T) {
		t.Parallel()
		f := setup(t, stopped, func(s *settings) { s.scheduler.Requests = perTenant(daily) })
		f.insertMany(t, "ada", 1)
		events := f.start(t, func(_ context.Context, job *river.Job[taskArgs]) error {
			if job.Attempt < 3 {
				return errors.New("the service is down")
			}
			return nil
		})
		await(t, events, 1, river.EventKindJobCompleted)
		require.InDelta(t, 99, f.held(t, daily, "ada"), 1e-9)
		require.Equal(t, 1, f.reservations(t))
	})

	t.Run("WaitForRoomWhereALimitBoundsWhatIsReserved", func(t *testing.T) {
		t.Parallel()
		var c *clock
		bounded := ratelimit.Define("bounded", ratelimit.TokenBucket{Rate: 5, Period: time.Second, Capacity: 1, MaxReserved: ratelimit.None})
		f := setup(t, func(s *settings) {
			c = onClock(s)
			s.scheduler.Requests = perTenant(bounded)
		})
		f.insertMany(t, "ada", 2)
		var ran atomic.Int64
		events := f.start(t, func(context.Context, *river.Job[taskArgs]) error { ran.Add(1); return nil })
		await(t, events, 1, river.EventKindJobSnoozed)
		eventually(t, func() bool { return ran.Load() == 1 })
		c.move(time.Second)
		eventually(t, func() bool { return ran.Load() == 2 })
		eventually(t, func() bool {
			return one[int](t, f.pool, `SELECT count(*) FROM river_job WHERE state = 'completed' AND attempt = 1`) == 2
		})
	})

	t.Run("RunAsTheyComeWhereTheyCostNothing", func(t *testing.T) {
		t.Parallel()
		f := setup(t, stopped, func(s *settings) {
			s.scheduler.Requests = func(*rivertype.JobRow) ([]ratelimit.Request, error) { return nil, nil }
		})
		f.insertMany(t, "ada", 3)
		events := f.start(t, func(context.Context, *river.Job[taskArgs]) error { return nil })
		await(t, events, 3, river.EventKindJobCompleted)
		require.Zero(t, f.reservations(t))
	})

	t.Run("FailWhenWhatTheyCostIsNotKnown", func(t *testing.T) {
		t.Parallel()
		var asked atomic.Int64
		f := setup(t, stopped, func(s *settings) {
			s.scheduler.Requests = func(job *rivertype.JobRow) ([]ratelimit.Request, error) {
				if asked.Add(1) == 1 {
					return nil, errors.New("no such tenant")
				}
				return perTenant(daily)(job)
			}
		})
		f.insertMany(t, "ada", 1)
		var ran atomic.Int64
		events := f.start(t, func(context.Context, *river.Job[taskArgs]) error { ran.Add(1); return nil })
		failed := await(t, events, 1, river.EventKindJobFailed)[0]
		require.Contains(t, failed.Errors[0].Error, "scheduler: requests: no such tenant")
		await(t, events, 1, river.EventKindJobCompleted)
		require.EqualValues(t, 1, ran.Load())
	})
}
