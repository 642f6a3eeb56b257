package waitlist_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/waitlist"
)

// TestNotifications has processes that never poll share a slot. A release wakes the first in the line, and its leaving wakes the next.
func TestNotifications(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	one := ratelimit.Define("exports", ratelimit.Concurrency{Most: 1, Lease: time.Hour})
	ctx, cancel := context.WithCancel(t.Context())
	var running errgroup.Group
	process := func() (s *waitlist.List, entered, refused chan struct{}) {
		entered, refused = make(chan struct{}, 100), make(chan struct{}, 100)
		limiter, err := ratelimit.New(pool, ratelimit.Config{Observer: observer(func(event ratelimit.Event) {
			switch d, ok := event.(ratelimit.Decided); {
			case ok && !d.Decision.Allowed:
				refused <- struct{}{}
			case ok && d.Decision.States[0].Limit.Name() == "exports.line":
				entered <- struct{}{}
			}
		})})
		require.NoError(t, err)
		s, err = waitlist.New(limiter, one, waitlist.Config{Pool: pool, Poll: time.Hour})
		require.NoError(t, err)
		running.Go(func() error { _ = s.Run(ctx); return nil })
		return s, entered, refused
	}
	holder, _, _ := process()
	lease, err := holder.Acquire(ctx, one.For("acme"))
	require.NoError(t, err)
	first, _, refusedFirst := process()
	second, enteredSecond, refusedSecond := process()
	var g errgroup.Group
	g.Go(func() error {
		return first.Hold(ctx, func(context.Context, ratelimit.Lease) error {
			<-refusedSecond // it has become the first
			return nil
		}, one.For("acme"))
	})
	<-refusedFirst // without a place in the line, and then with one
	<-refusedFirst
	g.Go(func() error {
		return second.Hold(ctx, func(context.Context, ratelimit.Lease) error { return nil }, one.For("acme"))
	})
	<-enteredSecond
	require.NoError(t, holder.Release(ctx, lease, one.For("acme")))
	require.NoError(t, g.Wait())
	cancel()
	require.NoError(t, running.Wait())
}

type observer func(event ratelimit.Event)

func (o observer) Observe(_ context.Context, event ratelimit.Event) { o(event) }
