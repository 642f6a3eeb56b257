package ratelimit_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

// slotEvents are what an Observer hears of slots.
type slotEvents struct {
	mu  sync.Mutex
	all []string
}

func (s *slotEvents) Observe(_ context.Context, e event.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch e := e.(type) {
	case event.LeaseChanged:
		s.all = append(s.all, fmt.Sprint(e.Verb, " of ", e.Slots))
	case event.Failed:
		s.all = append(s.all, fmt.Sprint(e.Verb, " failed"))
	}
}

// TestAcquireWhoseCallerLeaves promises that a call that is being decided when its caller leaves goes on, and releases
// the slots that it gets. An interrupted one could have taken them for a lease that nobody knows.
func TestAcquireWhoseCallerLeaves(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		exports := ratelimit.Define("exports", ratelimit.Concurrency{Slots: 5, Lease: time.Hour})
		tokens := ratelimit.Define("tokens", ratelimit.PerMinute(5))
		db, heard := ratelimittest.NewDB(), &slotEvents{}
		limiter, err := ratelimit.New(db, ratelimit.Config{AsOf: time.Now, Observer: heard})
		require.NoError(t, err)
		tx, err := db.BeginTx(t.Context(), pgx.TxOptions{})
		require.NoError(t, err)
		require.NoError(t, limiter.WithTx(tx).Require(t.Context(), tokens.For("ada"))) // whose row it then holds
		ctx, leave := context.WithCancel(t.Context())
		left := make(chan error)
		go func() {
			_, err := limiter.Acquire(ctx, exports.For("ada").Cost(2), tokens.For("ada"))
			left <- err
		}()
		synctest.Wait()
		leave()
		require.ErrorIs(t, <-left, context.Canceled)
		require.NoError(t, tx.Commit(t.Context()))
		synctest.Wait()
		require.Equal(t, []string{"acquire failed", "release of 2"}, heard.all)
		free, err := limiter.Value(t.Context(), exports.For("ada"))
		require.NoError(t, err)
		require.InDelta(t, 5, free.Tokens, 0)
	})
}
