package integration_test

import (
	"context"
	"errors"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
)

// TestHoldReleases promises that a slot is held while the work runs and free afterwards, however the work ends.
func TestHoldReleases(t *testing.T) {
	t.Parallel()
	b := setup(t)
	jobs, hourly := slots("exports", 1), ratelimit.Define("hourly", ratelimit.TokenBucket{Rate: 100, Period: century})
	failure := errors.New("it failed")
	work := func(end func(ctx context.Context) error) error {
		return b.limiter.Hold(t.Context(), func(ctx context.Context, lease ratelimit.Lease) error {
			require.Zero(t, tokens(t, b.limiter, jobs.For("k")))
			found, held := ratelimit.LeaseFromContext(ctx)
			require.True(t, held)
			require.Equal(t, lease, found)
			return end(ctx)
		}, jobs.For("k"), hourly.For("k").Cost(2))
	}
	require.NoError(t, work(func(context.Context) error { return nil }))
	require.Equal(t, failure, work(func(context.Context) error { return failure }))
	require.PanicsWithValue(t, "broken", func() { _ = work(func(context.Context) error { panic("broken") }) })
	require.True(t, ended(func() { _ = work(func(context.Context) error { runtime.Goexit(); return nil }) }))
	var kept context.Context
	require.NoError(t, work(func(ctx context.Context) error { kept = ctx; return nil }))
	require.Equal(t, context.Canceled, context.Cause(kept), "the context ends with the work")
	require.Equal(t, 1.0, tokens(t, b.limiter, jobs.For("k")))
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
	held, release := b.limiter.KeepAlive(t.Context(), ratelimit.Lease{ID: "L1"})
	require.ErrorIs(t, context.Cause(held), ratelimit.ErrLeaseLost)
	require.ErrorIs(t, context.Cause(held), ratelimit.ErrInvalidLease)
	release()
}

// releases is an Observer that is asked before a release ends.
type releases func(event.LeaseChanged)

func (r releases) Observe(_ context.Context, e event.Event) {
	if e, is := e.(event.LeaseChanged); is {
		r(e)
	}
}

// TestAcquireWhoseCallerLeaves promises that a call that is being decided when its caller leaves goes on, and releases
// the slots that it gets, which Close waits for. An interrupted one could have taken slots for a lease that nobody
// knows.
func TestAcquireWhoseCallerLeaves(t *testing.T) {
	t.Parallel()
	s := newStand(t)
	takeOne(t, s.limiter, calls.For("ada"))
	released, goOn := make(chan int), make(chan struct{})
	limiter := s.with(t, ratelimit.Config{Observer: releases(func(e event.LeaseChanged) { released <- e.Slots; <-goOn })})
	release := s.hold(t)
	ctx, leave := context.WithCancel(t.Context())
	left, closed := make(chan error), make(chan error, 1)
	go func() { left <- errOf(limiter.Acquire(ctx, leased.For("ada").Cost(2), calls.For("ada"))) }()
	s.awaitWaiter(t)
	leave()
	require.ErrorIs(t, <-left, context.Canceled)
	go func() { closed <- limiter.Close(t.Context()) }()
	eventually(t, "it is closed", func() bool {
		return errors.Is(errOf(limiter.Take(t.Context(), calls.For("eve"))), ratelimit.ErrClosed)
	})
	release()
	require.Equal(t, 2, <-released)
	require.Empty(t, closed)
	close(goOn)
	require.NoError(t, <-closed)
	require.Equal(t, leased.Capacity(), tokens(t, s.limiter, leased.For("ada")))
}

// TestAcquireWhoseHookExitsItsGoroutine promises that such a call returns, whatever its context.
func TestAcquireWhoseHookExitsItsGoroutine(t *testing.T) {
	t.Parallel()
	exits := false
	limiter, err := ratelimit.New(setup(t).pool, ratelimit.Config{AsOf: func() time.Time {
		if exits {
			runtime.Goexit()
		}
		return time.Now()
	}})
	require.NoError(t, err)
	takeOne(t, limiter, calls.For("ada"))
	exits = true
	require.ErrorContains(t, errOf(limiter.Acquire(t.Context(), leased.For("ada"))), "goroutine of the batch has exited")
}
