package scheduler_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/riverqueue/river"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/scheduler"
)

func TestMaintain(t *testing.T) {
	t.Parallel()
	maintain := func(t *testing.T, f *fixture) scheduler.Maintained {
		t.Helper()
		done, err := f.scheduler.Maintain(t.Context(), f.client)
		require.NoError(t, err)
		return done
	}

	t.Run("GivesBackTheSlotsOfJobsCancelledThroughRiver", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		var cancelled, others []scheduler.Enqueued
		for range 3 {
			cancelled = append(cancelled, f.enqueue(t, nil, daily.Global().Cost(10)))
			others = append(others, f.enqueue(t, nil, daily.Global().Cost(10)))
		}
		for _, e := range cancelled {
			_, err := f.client.JobCancel(t.Context(), e.Job.ID)
			require.NoError(t, err)
		}
		require.Equal(t, scheduler.Maintained{Ended: 3}, maintain(t, f))
		require.Equal(t, scheduler.Maintained{}, maintain(t, f))
		require.InDelta(t, 70, f.held(t, daily, ""), 1e-9)
		require.Equal(t, ratelimit.Open, f.state(t, others[0].ID))

		_, err := f.client.JobCancel(t.Context(), others[0].Job.ID)
		require.NoError(t, err)
		require.Equal(t, scheduler.Maintained{Ended: 1}, maintain(t, f))
		require.InDelta(t, 80, f.held(t, daily, ""), 1e-9)
	})

	t.Run("GoesPastAReservationThatCannotBeEnded", func(t *testing.T) {
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
			_, err := f.pool.Exec(t.Context(), "UPDATE ratelimit.reservations SET names = ARRAY[$2::text] WHERE id = $1::uuid", all[0].ID, name)
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

	t.Run("GoesPastABucketThatIsHeld", func(t *testing.T) {
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

	t.Run("EndsTheSlotOfAJobThatPanickedInItsLastAttempt", func(t *testing.T) {
		t.Parallel()
		f := setup(t, func(s *settings) { s.scheduler.Discarded = scheduler.GiveBack })
		events := f.start(t, func(context.Context, *river.Job[taskArgs]) error { panic("on purpose") })
		e := f.enqueue(t, &scheduler.EnqueueOpts{InsertOpts: river.InsertOpts{MaxAttempts: 1}}, daily.Global().Cost(30))
		await(t, events, 1, river.EventKindJobFailed)
		require.Equal(t, 1, maintain(t, f).Ended)
		require.Equal(t, ratelimit.Cancelled, f.state(t, e.ID))
		require.InDelta(t, 100, f.held(t, daily, ""), 1e-9)
	})

	t.Run("SettlesAJobThatEndedOutsideOfTheMiddleware", func(t *testing.T) {
		t.Parallel()
		for _, started := range []bool{true, false} { // its process died before it could settle, or its client lacks the middleware
			f := setup(t)
			e := f.enqueue(t, nil, daily.Global().Cost(30))
			want := scheduler.Maintained{Ended: 1, Unguarded: 1}
			if started {
				_, err := f.limiter.Start(t.Context(), e.ID)
				require.NoError(t, err)
				want.Unguarded = 0
			}
			one[int64](t, f.pool, "UPDATE river_job SET state = 'completed', finalized_at = now() WHERE id = $1 RETURNING id", e.Job.ID)
			require.Equal(t, want, maintain(t, f))
			require.Equal(t, ratelimit.Settled, f.state(t, e.ID))
			require.InDelta(t, 70, f.held(t, daily, ""), 1e-9)
		}
	})

	t.Run("LooksAtReservationsOfItsOwnSchemaOnly", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		other := otherSchema(t, f)
		e := f.enqueue(t, nil, daily.Global().Cost(30))
		_, err := f.client.JobCancel(t.Context(), e.Job.ID)
		require.NoError(t, err)
		require.Zero(t, maintain(t, other).Ended)
		require.Equal(t, ratelimit.Open, f.state(t, e.ID))
	})
}
