package ratelimit_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

// heard keeps the events of housekeeping.
type heard struct {
	mu     sync.Mutex
	pruned []time.Time // when
	rows   int
	failed map[string]int // by verb
}

func (h *heard) Observe(_ context.Context, event ratelimit.Event) {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch e := event.(type) {
	case ratelimit.Pruned:
		h.pruned, h.rows = append(h.pruned, time.Now()), h.rows+e.Buckets
	case ratelimit.Failed:
		if h.failed == nil {
			h.failed = map[string]int{}
		}
		h.failed[e.Verb]++
	}
}

// count returns how many times Prune has run, and how many rows it has deleted.
func (h *heard) count() (prunes, rows int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.pruned), h.rows
}

// TestMaintain promises that Maintain deletes rows of full buckets and ends reservations, at once and then every interval until the
// context ends. Two processes may run it at the same time.
func TestMaintain(t *testing.T) {
	t.Parallel()
	perMinute := ratelimit.Define("perMinute", ratelimit.PerMinute(60))
	for name, processes := range map[string]int{"OneProcess": 1, "TwoProcesses": 2} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) { // no goroutine may be left at its end
				const every = 10 * time.Minute
				db, h := ratelimittest.NewDB(), &heard{}
				limiter, err := ratelimit.New(db, ratelimit.Config{AsOf: time.Now, Observer: h, ExpireAfter: time.Hour})
				require.NoError(t, err)
				began := time.Now()
				d, err := limiter.Take(t.Context(), perMinute.For("ada"))
				require.NoError(t, err)
				require.True(t, d.Allowed)
				r, err := limiter.Reserve(t.Context(), perMinute.For("bob"))
				require.NoError(t, err)

				ctx, cancel := context.WithCancel(t.Context())
				var running sync.WaitGroup
				for range processes {
					running.Go(func() { require.ErrorIs(t, limiter.Maintain(ctx, every, perMinute), context.Canceled) })
				}
				synctest.Wait()
				prunes, _ := h.count()
				require.Equal(t, processes, prunes, "at once")
				time.Sleep(2 * time.Hour)
				synctest.Wait()
				_, rows := h.count()
				require.Equal(t, 2, rows, "both buckets have been full")
				require.ErrorIs(t, limiter.Settle(t.Context(), r.ID), ratelimit.ErrReservationEnded)
				cancel()
				running.Wait()
				require.InDelta(t, 2*time.Hour/every, len(h.pruned)/processes, 2)
				for i := processes; i < len(h.pruned) && processes == 1; i++ {
					interval := h.pruned[i].Sub(h.pruned[i-1])
					require.True(t, interval >= every && interval <= every+every/10, interval)
				}
				require.Less(t, h.pruned[0].Sub(began), time.Second)
				require.Empty(t, h.failed)
			})
		})
	}
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

// TestMaintainGoesOnAfterErrors promises that the Observer receives each error, and that its panic ends nothing.
func TestMaintainGoesOnAfterErrors(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		h := &heard{}
		panics := &broken{panicsAt: func(ratelimit.Event) bool { return true }}
		limiter, err := ratelimit.New(unreachable{}, ratelimit.Config{Observer: ratelimit.Observers(h, panics)})
		require.NoError(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		require.ErrorIs(t, limiter.Maintain(ctx, 25*time.Minute), context.DeadlineExceeded)
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
	require.ErrorIs(t, limiter.Maintain(ended, time.Second, limit), context.Canceled)
}
