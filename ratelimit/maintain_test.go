package ratelimit_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

// heard keeps the events of housekeeping.
type heard struct {
	mu     sync.Mutex
	pruned []time.Time // when
	rows   int
	failed map[string]int // by verb
}

func (h *heard) Observe(_ context.Context, e event.Event) {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch e := e.(type) {
	case event.Pruned:
		h.pruned, h.rows = append(h.pruned, time.Now()), h.rows+e.Buckets
	case event.Failed:
		if h.failed == nil {
			h.failed = map[string]int{}
		}
		h.failed[e.Verb]++
	}
}

// TestMaintain promises that Maintain deletes rows of full buckets and ends reservations, at once and then every
// interval until the context ends.
func TestMaintain(t *testing.T) {
	t.Parallel()
	perMinute := ratelimit.Define("perMinute", ratelimit.PerMinute(60))
	synctest.Test(t, func(t *testing.T) { // no goroutine may be left at its end
		const every = 10 * time.Minute
		h := &heard{}
		limiter, err := ratelimit.New(ratelimittest.NewDB(), ratelimit.Config{AsOf: time.Now, Observer: h, ExpireAfter: time.Hour})
		require.NoError(t, err)
		began := time.Now()
		require.NoError(t, limiter.Require(t.Context(), perMinute.For("ada")))
		r, err := limiter.Reserve(t.Context(), perMinute.For("bob"))
		require.NoError(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Hour)
		defer cancel()
		require.NoError(t, limiter.Maintain(ctx, every, perMinute))
		require.Equal(t, 2, h.rows, "both buckets have been full")
		require.ErrorIs(t, limiter.Settle(t.Context(), r.ID), ratelimit.ErrReservationEnded)
		require.Equal(t, began, h.pruned[0], "at once")
		require.InDelta(t, 2*time.Hour/every, len(h.pruned), 2)
		for i := 1; i < len(h.pruned); i++ {
			interval := h.pruned[i].Sub(h.pruned[i-1])
			require.True(t, interval >= every && interval <= every+every/10, interval)
		}
		require.Empty(t, h.failed)
	})
}

// unreachable is a pool whose server does not answer.
type unreachable struct{ ratelimit.Pool }

var errUnreachable = errors.New("no server")

func (unreachable) Exec(context.Context, string, ...any) (pgconn.CommandTag, error) {
	return pgconn.CommandTag{}, errUnreachable
}

func (unreachable) Query(context.Context, string, ...any) (pgx.Rows, error) {
	return nil, errUnreachable
}

func (unreachable) BeginTx(context.Context, pgx.TxOptions) (pgx.Tx, error) {
	return nil, errUnreachable
}

func (unreachable) SendBatch(_ context.Context, batch *pgx.Batch) pgx.BatchResults {
	return pgx.FailedBatchResults(batch, errUnreachable)
}

// broken is an Observer that counts the events of background work by type, and panics at each of them.
type broken struct {
	mu       sync.Mutex
	panicked map[string]int
}

func (b *broken) Observe(_ context.Context, e event.Event) {
	if _, is := e.(ratelimit.Decided); is {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.panicked[fmt.Sprintf("%T", e)]++
	panic("out of cheese")
}

// TestMaintainGoesOnAfterErrors promises that the Observer receives each error, and that its panic ends nothing.
func TestMaintainGoesOnAfterErrors(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		h := &heard{}
		limiter, err := ratelimit.New(unreachable{}, ratelimit.Config{Observer: ratelimit.Observers(h, &broken{panicked: make(map[string]int)})})
		require.NoError(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		require.NoError(t, limiter.Maintain(ctx, 25*time.Minute, ratelimit.Define("limit", ratelimit.PerSecond(1))))
		require.Equal(t, map[string]int{"expire": 3, "prune": 3}, h.failed)
	})
}

func TestMaintainChecksItsArguments(t *testing.T) {
	t.Parallel()
	limiter, err := ratelimit.New(new(pgxpool.Pool), ratelimit.Config{})
	require.NoError(t, err)
	limit := ratelimit.Define("limit", ratelimit.PerSecond(1))
	require.ErrorIs(t, limiter.Maintain(t.Context(), 0, limit), ratelimit.ErrInvalidConfig)
	require.ErrorIs(t, limiter.Maintain(t.Context(), -time.Second, limit), ratelimit.ErrInvalidConfig)
	require.ErrorIs(t, limiter.Maintain(t.Context(), time.Second, limit, ratelimit.Limit{}), ratelimit.ErrInvalidLimit)
	require.ErrorIs(t, limiter.WithTx(nil).Maintain(t.Context(), time.Second, limit), ratelimit.ErrInvalidConfig)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	require.NoError(t, limiter.Maintain(ended, time.Second, limit))
}

// listener appends each event it receives to a list that several listeners share.
type listener struct {
	name  string
	heard *[]string
}

func (l *listener) Observe(_ context.Context, e event.Event) {
	*l.heard = append(*l.heard, l.name+" "+e.(event.ClockRepaired).Limit)
}

func TestObservers(t *testing.T) {
	t.Parallel()
	var heard []string
	first, second := &listener{"first", &heard}, &listener{"second", &heard}
	var none *listener

	ratelimit.Observers(nil, first, none, second).Observe(t.Context(), event.ClockRepaired{Limit: "uploads"})
	require.Equal(t, []string{"first uploads", "second uploads"}, heard)

	require.Same(t, second, ratelimit.Observers(nil, second), "one needs nobody in between")
	require.Nil(t, ratelimit.Observers(), "nobody is nobody, as in the zero Config")
	require.Nil(t, ratelimit.Observers(nil, none))
}

// An Observer that panics at each event of the background work ends neither the process nor that work.
func TestTheLimiterOutlivesAnObserverThatPanics(t *testing.T) {
	t.Parallel()
	slot := ratelimit.Define("slot", ratelimit.Concurrency{Slots: 1, Lease: 3 * time.Second})
	synctest.Test(t, func(t *testing.T) {
		observer := &broken{panicked: make(map[string]int)}
		limiter, err := ratelimit.New(ratelimittest.NewDB(), ratelimit.Config{Observer: observer})
		require.NoError(t, err)
		require.NoError(t, limiter.Hold(t.Context(), func(ctx context.Context, _ ratelimit.Lease) error {
			time.Sleep(10 * time.Second) // the lease is renewed each second
			return ctx.Err()
		}, slot.For("key")))
		require.NoError(t, limiter.Close(t.Context()))
		require.GreaterOrEqual(t, observer.panicked["event.LeaseChanged"], 9+1, "the last is the release")
	})
}
