package integration_test

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// free returns how many slots of jobs a key has.
func free(t *testing.T, l *ratelimit.Limiter, request ratelimit.Request) float64 {
	t.Helper()
	v, err := l.Value(t.Context(), request)
	require.NoError(t, err)
	return v.Tokens
}

// TestHoldGivesBack promises that a slot is held while the work runs and free afterwards, however the work ends.
func TestHoldGivesBack(t *testing.T) {
	t.Parallel()
	b := setup(t)
	jobs, hourly := slots("exports", 1), ratelimit.Define("hourly", ratelimit.TokenBucket{Rate: 100, Period: century})
	failure := errors.New("it failed")
	work := func(end func(ctx context.Context) error) error {
		return b.limiter.Hold(t.Context(), func(ctx context.Context, lease ratelimit.Lease) error {
			require.Zero(t, free(t, b.limiter, jobs.For("k")))
			found, held := ratelimit.LeaseFromContext(ctx)
			require.True(t, held)
			require.Equal(t, lease, found)
			return end(ctx)
		}, jobs.For("k"), hourly.For("k").Cost(2))
	}
	require.NoError(t, work(func(context.Context) error { return nil }))
	require.Equal(t, failure, work(func(context.Context) error { return failure }))
	require.PanicsWithValue(t, "broken", func() { _ = work(func(context.Context) error { panic("broken") }) })
	var ended sync.WaitGroup
	ended.Go(func() { _ = work(func(context.Context) error { runtime.Goexit(); return nil }) })
	ended.Wait()
	var kept context.Context
	require.NoError(t, work(func(ctx context.Context) error { kept = ctx; return nil }))
	require.Equal(t, context.Canceled, context.Cause(kept), "the context ends with the work")
	require.Equal(t, 1.0, free(t, b.limiter, jobs.For("k")))
	require.InDelta(t, 90, b.held(t, "hourly", "k"), 1e-6, "tokens stay taken")
}

// TestHoldRefuses promises that work does not run without a slot, for any reason, and that nothing is taken.
func TestHoldRefuses(t *testing.T) {
	t.Parallel()
	b := setup(t)
	jobs, hourly := slots("jobs", 1), ratelimit.Define("hourly", ratelimit.TokenBucket{Rate: 100, Period: century})
	never := func(context.Context, ratelimit.Lease) error { return errors.New("it ran") }
	require.NoError(t, b.limiter.Hold(t.Context(), func(ctx context.Context, _ ratelimit.Lease) error {
		err := b.limiter.Hold(ctx, never, jobs.For("k"), hourly.For("k"))
		var limited *ratelimit.LimitedError
		require.ErrorAs(t, err, &limited)
		require.Positive(t, limited.Decision.RetryAfter)
		require.LessOrEqual(t, limited.Decision.RetryAfter, time.Hour)
		return nil
	}, jobs.For("k")))
	require.ErrorIs(t, b.limiter.Hold(t.Context(), never, hourly.For("k")), ratelimit.ErrInvalidRequest)
	tx := b.begin(t, pgx.Serializable)
	require.ErrorIs(t, b.limiter.WithTx(tx).Hold(t.Context(), never, jobs.For("k")), ratelimit.ErrInvalidConfig)
	held, release := b.limiter.WithTx(tx).Keep(t.Context(), ratelimit.Lease{ID: "L1"})
	require.ErrorIs(t, context.Cause(held), ratelimit.ErrInvalidConfig)
	release()
	_, err := b.limiter.WithTx(tx).Take(t.Context(), hourly.For("k"))
	require.NoError(t, err, "the transaction can be used")
	held, release = b.limiter.Keep(t.Context(), ratelimit.Lease{ID: "L1"})
	require.ErrorIs(t, context.Cause(held), ratelimit.ErrLeaseLost)
	require.ErrorIs(t, context.Cause(held), ratelimit.ErrInvalidLease)
	release()
}

// TestHoldOutlivesTheLease promises that work may take longer than the lease and keeps its slot, also if another process acquired its lease.
func TestHoldOutlivesTheLease(t *testing.T) {
	t.Parallel()
	const lease = time.Minute
	jobs := ratelimit.Define("jobs", ratelimit.Concurrency{Most: 1, Lease: lease})
	inVirtualTime(t, func(t *testing.T, b *bundle) {
		t.Helper()
		var renewals atomic.Int64
		l := b.with(t, ratelimit.Config{AsOf: time.Now, Observer: observing(func(event ratelimit.Event) {
			if leased, is := event.(ratelimit.Leased); is && leased.Verb == "renew_lease" && !leased.Lost {
				renewals.Add(1)
			}
		})})
		acquired, err := b.limiter.Acquire(t.Context(), jobs.For("k"))
		require.NoError(t, err)
		held, release := l.Keep(t.Context(), ratelimit.Lease{ID: acquired.ID})
		time.Sleep(3 * lease)
		require.GreaterOrEqual(t, renewals.Load(), int64(4))
		require.NoError(t, held.Err())
		other, err := b.limiter.Acquire(t.Context(), jobs.For("k"))
		require.NoError(t, err)
		require.False(t, other.Allowed)
		release()
		require.Equal(t, context.Canceled, context.Cause(held))
		require.Equal(t, 1.0, free(t, b.limiter, jobs.For("k")))
	})
}

// TestHoldEndsWorkThatLostItsSlot promises that losing a slot cancels the work's context, and that the caller gets an error. This
// holds also if another caller or a step of the database's clock ended the lease.
func TestHoldEndsWorkThatLostItsSlot(t *testing.T) {
	t.Parallel()
	jobs := ratelimit.Define("jobs", ratelimit.Concurrency{Most: 1, Lease: time.Minute})
	for name, steal := range map[string]func(ctx context.Context, b *bundle, lease ratelimit.Lease) error{
		"ByARelease": func(ctx context.Context, b *bundle, lease ratelimit.Lease) error {
			return b.limiter.Release(ctx, lease.ID)
		},
		"ByAReset": func(ctx context.Context, b *bundle, _ ratelimit.Lease) error {
			return b.limiter.Reset(ctx, jobs.For("k"))
		},
		"ByALostRow": func(ctx context.Context, b *bundle, _ ratelimit.Lease) error {
			_, err := b.pool.Exec(ctx, "DELETE FROM ratelimit.buckets")
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			inVirtualTime(t, func(t *testing.T, b *bundle) {
				t.Helper()
				failure := errors.New("it stopped")
				err := b.limiter.Hold(t.Context(), func(ctx context.Context, lease ratelimit.Lease) error {
					if err := steal(ctx, b, lease); err != nil {
						return err
					}
					<-ctx.Done()
					require.ErrorIs(t, context.Cause(ctx), ratelimit.ErrLeaseLost)
					return failure
				}, jobs.For("k"))
				require.ErrorIs(t, err, ratelimit.ErrLeaseLost)
				require.ErrorIs(t, err, failure)
			})
		})
	}

	t.Run("ByAClockThatStepsForward", func(t *testing.T) {
		t.Parallel()
		inVirtualTime(t, func(t *testing.T, b *bundle) {
			t.Helper()
			var ahead atomic.Int64
			l := b.with(t, ratelimit.Config{AsOf: func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) }})
			err := l.Hold(t.Context(), func(ctx context.Context, _ ratelimit.Lease) error {
				ahead.Store(int64(time.Hour))
				<-ctx.Done()
				return nil
			}, jobs.For("k"))
			require.ErrorIs(t, err, ratelimit.ErrLeaseLost, "also where the work says that it is done")
		})
	})

	t.Run("ByARowThatSomebodyHolds", func(t *testing.T) { // by the real clock: virtual time stops while a statement waits
		t.Parallel()
		testsize.Long(t, "waits for the end of a lease")
		b := setup(t)
		short := ratelimit.Define("jobs", ratelimit.Concurrency{Most: 1, Lease: 600 * time.Millisecond})
		err := b.limiter.Hold(t.Context(), func(ctx context.Context, _ ratelimit.Lease) error {
			tx, err := b.pool.Begin(context.WithoutCancel(ctx))
			if err != nil {
				return err
			}
			if _, err := tx.Exec(context.WithoutCancel(ctx), "SELECT FROM ratelimit.buckets FOR UPDATE"); err != nil {
				return err
			}
			<-ctx.Done()
			require.ErrorIs(t, context.Cause(ctx), ratelimit.ErrLeaseLost)
			return tx.Rollback(context.WithoutCancel(ctx))
		}, short.For("k"))
		require.ErrorIs(t, err, ratelimit.ErrLeaseLost)
	})
}

// inVirtualTime runs test on Postgres in a bubble, whose clock the Limiter uses. Time does not pass while a statement runs.
func inVirtualTime(t *testing.T, test func(t *testing.T, b *bundle)) {
	t.Helper()
	url := postgrestest.NewDatabase(t)
	synctest.Test(t, func(t *testing.T) {
		b := countedOn(t, url, &wire{})
		b.limiter = b.with(t, ratelimit.Config{AsOf: time.Now})
		test(t, b)
	})
}
