package waitlist

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

// TestCallersAfterAFailureBeginAnotherQueue has a caller come right after the callers of a queue got an error, before
// the queue's goroutine has ended.
func TestCallersAfterAFailureBeginAnotherQueue(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		limit := ratelimit.Define("exports", ratelimit.Concurrency{Slots: 1, Lease: time.Minute})
		limiter := ratelimittest.New(t, nil)
		s, err := New(limiter, limit, Config{})
		require.NoError(t, err)
		key, err := limiter.StoredKey(limit.For("acme"))
		require.NoError(t, err)
		failed := &waiter{done: make(chan answer, 1)}
		q := &queue{key: key, waiting: []*waiter{failed}, wake: make(chan struct{}, 1)}
		s.queues[key] = q

		broken := errors.New("broken")
		s.fail(q, broken)
		require.Equal(t, answer{err: broken}, <-failed.done)
		_, err = s.Acquire(t.Context(), limit.For("acme"))
		require.NoError(t, err)
	})
}
