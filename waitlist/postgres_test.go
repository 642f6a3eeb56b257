package waitlist_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/roundtrips"
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

// BenchmarkWaiting counts the round trips of callers that wait for three slots which others hold. A Take is one round trip.
func BenchmarkWaiting(b *testing.B) {
	var wire roundtrips.Counter
	pool := postgrestest.New(b, func(config *pgxpool.Config) { config.ConnConfig.DialFunc = wire.Dial })
	limiter, err := ratelimit.New(pool, ratelimit.Config{})
	require.NoError(b, err)
	s, err := waitlist.New(limiter, exports, waitlist.Config{})
	require.NoError(b, err)
	for range 3 {
		lease, err := s.Acquire(b.Context(), exports.For("acme"))
		require.NoError(b, err)
		_, release := limiter.Keep(b.Context(), lease)
		defer release()
	}
	ctx, cancel := context.WithCancel(b.Context())
	var g errgroup.Group
	for range 1000 {
		g.Go(func() error { _, _ = s.Acquire(ctx, exports.For("acme")); return nil })
	}
	before := int64(0)
	for i := 0; b.Loop(); i++ { // a second each
		if i == 1 { // all wait
			before = wire.Trips()
		}
		time.Sleep(time.Second)
	}
	b.ReportMetric(float64(wire.Trips()-before)/float64(b.N-1), "trips/s")
	cancel()
	require.NoError(b, g.Wait())
}
