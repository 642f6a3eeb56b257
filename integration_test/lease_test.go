package integration_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// daylong returns a limit on concurrency whose leases outlive any test.
func daylong(name string, most int) ratelimit.Limit {
	return ratelimit.Define(name, ratelimit.Concurrency{Most: most, Lease: 24 * time.Hour})
}

// slots returns a limit on concurrency with a long lease.
func slots(name string, most int) ratelimit.Limit {
	return ratelimit.Define(name, ratelimit.Concurrency{Most: most, Lease: time.Hour})
}

// The ID of a lease of another schema, or of no bucket here, is a lost lease, and makes no row.
func TestALeaseOfAnotherSchema(t *testing.T) {
	t.Parallel()
	b := setup(t)
	require.NoError(t, migrations.Up(t.Context(), b.pool, migrations.Config{Schema: "another"}))
	foreign := b.with(t, ratelimit.Config{Schema: "another"})
	job := daylong("jobs", 2).For("ada")
	elsewhere, here := acquire(t, foreign, job), acquire(t, b.limiter, job)
	stranger := acquire(t, foreign, daylong("strange", 1).For("bob"))
	for _, id := range []string{elsewhere.ID, stranger.ID} {
		require.ErrorIs(t, b.limiter.Release(t.Context(), id), ratelimit.ErrLeaseLost)
		require.ErrorIs(t, errOf(b.limiter.RenewLease(t.Context(), id)), ratelimit.ErrLeaseLost)
	}
	require.Equal(t, 1, b.count(t, `SELECT count(*) FROM ratelimit.buckets`))
	require.NoError(t, b.limiter.Release(t.Context(), here.ID))
	require.NoError(t, foreign.Release(t.Context(), elsewhere.ID))
}

// acquire acquires free slots.
func acquire(t *testing.T, l *ratelimit.Limiter, requests ...ratelimit.Request) ratelimit.Lease {
	t.Helper()
	lease, err := l.Acquire(t.Context(), requests...)
	require.NoError(t, err)
	require.True(t, lease.Allowed)
	return lease
}

// refused asks for slots that are not free.
func refused(t *testing.T, l *ratelimit.Limiter, requests ...ratelimit.Request) {
	t.Helper()
	lease, err := l.Acquire(t.Context(), requests...)
	require.NoError(t, err)
	require.False(t, lease.Allowed)
	require.Empty(t, lease.ID)
	require.Zero(t, lease.Fence)
}

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
	one, two, full := daylong("one", 2).For("ada"), daylong("two", 2).For("ada"), daylong("full", 1).For("ada")
	lease := acquire(t, s.limiter, one, two)
	release := s.outside.holdRow(t, "one", "ada")
	impatient := s.with(t, ratelimit.Config{Timeout: 50 * time.Millisecond})
	require.ErrorIs(t, impatient.Release(t.Context(), lease.ID), context.DeadlineExceeded)
	require.ErrorIs(t, errOf(impatient.RenewLease(t.Context(), lease.ID)), context.DeadlineExceeded)
	require.ErrorIs(t, errOf(impatient.Acquire(t.Context(), one)), context.DeadlineExceeded)
	s.endWaiters(t) // otherwise an abandoned statement might get the row after all
	released := make(chan error, 1)
	go func() { released <- s.limiter.Release(t.Context(), lease.ID) }()
	s.awaitWaiter(t)
	release()
	require.NoError(t, <-released)
	s.requireHealthy(t)

	acquire(t, s.limiter, full)
	defer s.outside.holdRow(t, "full", "ada")()
	refused(t, s.limiter, full)
	refused(t, s.limiter, full, daylong("one", 2).For("new"))
	require.Zero(t, s.outside.count(t, `SELECT count(*) FROM ratelimit.buckets WHERE key = 'new'`))
}

// acquireAndRelease returns the ID of a lease that was given back.
func acquireAndRelease(t *testing.T, l *ratelimit.Limiter) string {
	t.Helper()
	lease := acquire(t, l, daylong("others", 1).For("k"))
	require.NoError(t, l.Release(t.Context(), lease.ID))
	return lease.ID
}
