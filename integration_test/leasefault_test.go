package integration_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// holdRow locks the row of a bucket until release is called.
func (b *bundle) holdRow(t *testing.T, name, key string) (release func()) {
	t.Helper()
	tx := b.begin(t, pgx.ReadCommitted)
	_, err := tx.Exec(t.Context(), `SELECT FROM ratelimit.buckets WHERE name = $1 AND key = $2 FOR UPDATE`, name, key)
	require.NoError(t, err)
	return func() { require.NoError(t, tx.Rollback(context.WithoutCancel(t.Context()))) }
}

// A call waits for a locked row up to Config.Timeout. A refusal does not wait.
func TestARowOfSlotsThatSomebodyHolds(t *testing.T) {
	t.Parallel()
	s := newStand(t)
	one, two := daylong("one", 2), daylong("two", 2)
	full := daylong("full", 1)
	for name, requests := range map[string][]ratelimit.Request{
		"OneLimit": {one.For("ada")}, "TwoLimits": {one.For("bob"), two.For("bob")},
	} {
		t.Run(name, func(t *testing.T) { // not parallel: each waits for the only session that waits
			key := map[string]string{"OneLimit": "ada", "TwoLimits": "bob"}[name]
			lease := acquire(t, s.limiter, requests...)
			release := s.outside.holdRow(t, "one", key)
			impatient := s.with(t, ratelimit.Config{Timeout: 50 * time.Millisecond})
			require.ErrorIs(t, impatient.Release(t.Context(), lease.ID), context.DeadlineExceeded)
			_, err := impatient.RenewLease(t.Context(), lease.ID)
			require.ErrorIs(t, err, context.DeadlineExceeded)
			_, err = impatient.Acquire(t.Context(), requests...)
			require.ErrorIs(t, err, context.DeadlineExceeded)

			s.awaitNoWaiter(t) // otherwise an abandoned statement might get the row after all
			released := make(chan error, 1)
			go func() { released <- s.limiter.Release(t.Context(), lease.ID) }()
			s.awaitWaiter(t)
			release()
			require.NoError(t, <-released)
			s.requireHealthy(t)
		})
	}
	t.Run("Refusal", func(t *testing.T) {
		acquire(t, s.limiter, full.For("ada"))
		release := s.outside.holdRow(t, "full", "ada")
		defer release()
		refused(t, s.limiter, full.For("ada"))
		refused(t, s.limiter, full.For("ada"), one.For("new"))
		require.Zero(t, s.outside.count(t, `SELECT count(*) FROM ratelimit.buckets WHERE key = 'new'`))
	})
}
