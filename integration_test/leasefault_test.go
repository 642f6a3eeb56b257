package integration_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// commitMessage is how COMMIT is sent: "begin isolation level read committed" is not it.
const commitMessage = "commit\x00"

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

// Where the connection is lost at the end of a call the caller hears an error. A slot that was taken all the same comes back
// with the end of the lease.
func TestALeaseWhoseCallWasLost(t *testing.T) {
	t.Parallel()
	brief, beside := ratelimit.Define("brief", ratelimit.Concurrency{Most: 1, Lease: 50 * time.Millisecond}), daylong("a-beside", 9)
	free := func(t *testing.T, s *stand) {
		t.Helper()
		eventually(t, "the lease ends", func() bool {
			lease, err := s.outside.limiter.Acquire(t.Context(), brief.For("ada"))
			require.NoError(t, err)
			return lease.Allowed
		})
	}
	for name, loss := range losses {
		t.Run("AtTheCommit/"+name, func(t *testing.T) {
			t.Parallel()
			s, cutter := newCutStand(t)
			cutter.arm(commitMessage, loss.side, 1)
			_, err := s.limiter.Acquire(t.Context(), beside.For("ada"), brief.For("ada"))
			require.ErrorIs(t, err, ratelimit.ErrCommitUnknown)
			require.Equal(t, 1, cutter.seen())
			requireFree(t, s.outside.limiter, float64(9-loss.done), beside.For("ada"))
			free(t, s)
			s.requireHealthy(t)
		})
		t.Run("InTx/"+name, func(t *testing.T) {
			t.Parallel()
			s, cutter := newCutStand(t)
			cutter.arm(commitMessage, loss.side, 1)
			err := s.limiter.InTx(t.Context(), func(tx pgx.Tx) error {
				_, err := s.limiter.WithTx(tx).Acquire(t.Context(), brief.For("ada"))
				return err
			})
			require.ErrorIs(t, err, ratelimit.ErrCommitUnknown)
			free(t, s)
		})
		t.Run("OneRow/"+name, func(t *testing.T) {
			t.Parallel()
			s, cutter := newCutStand(t)
			if generalPath {
				cutter.arm(commitMessage, loss.side, 1)
			} else {
				acquireAndRelease(t, s.limiter) // prepares the statement, on the one connection that is idle
				cutter.arm("brief", loss.side, 3)
			}
			_, err := s.limiter.Acquire(t.Context(), brief.For("ada"))
			require.Error(t, err)
			cutter.arm("", 0, 0)
			free(t, s)
			s.requireHealthy(t)
		})
		t.Run("Release/"+name, func(t *testing.T) {
			t.Parallel()
			s, cutter := newCutStand(t)
			long := daylong("long", 1)
			lease := acquire(t, s.limiter, long.For("ada"), beside.For("ada"))
			cutter.arm(commitMessage, loss.side, 1)
			require.ErrorIs(t, s.limiter.Release(t.Context(), lease.ID), ratelimit.ErrCommitUnknown)
			err := s.outside.limiter.Release(t.Context(), lease.ID)
			if loss.done == 1 {
				require.ErrorIs(t, err, ratelimit.ErrLeaseLost, "it was released")
			} else {
				require.NoError(t, err)
			}
		})
	}
}

// A context that ends between the two statements of a release in a transaction leaves nothing half done.
func TestAContextThatEndsInARelease(t *testing.T) {
	t.Parallel()
	onEach(t, testAContextThatEndsInARelease, onPostgres, inMemory)
}

func testAContextThatEndsInARelease(t *testing.T, on backend) {
	b := on.setup(t)
	limit := daylong("jobs", 1)
	lease := acquire(t, b.limiter, limit.For("ada"))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, b.limiter.Release(ctx, lease.ID), context.Canceled)
	_, err := b.limiter.Acquire(ctx, limit.For("ada"))
	require.ErrorIs(t, err, context.Canceled)
	require.NoError(t, b.limiter.Release(t.Context(), lease.ID))
}
