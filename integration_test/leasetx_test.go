package integration_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// acquire acquires free slots.
func acquire(t *testing.T, l *ratelimit.Limiter, requests ...ratelimit.Request) ratelimit.Lease {
	t.Helper()
	lease, err := l.Acquire(t.Context(), requests...)
	require.NoError(t, err)
	require.True(t, lease.Allowed)
	return lease
}

// refused asks for slots that are not free.
func refused(t *testing.T, l *ratelimit.Limiter, requests ...ratelimit.Request) ratelimit.Lease {
	t.Helper()
	lease, err := l.Acquire(t.Context(), requests...)
	require.NoError(t, err)
	require.False(t, lease.Allowed)
	require.Empty(t, lease.ID)
	require.Zero(t, lease.Fence)
	return lease
}

// requireFree checks how many slots are free.
func requireFree(t *testing.T, l *ratelimit.Limiter, slots float64, r ratelimit.Request) {
	t.Helper()
	v, err := l.Value(t.Context(), r)
	require.NoError(t, err)
	require.Equal(t, slots, v.Tokens)
}

var isolationLevels = []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable}

func TestTheTransactionGoesOnAfterARefusal(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.exec(t, `CREATE TABLE public.done (n int)`)
	job := daylong("jobs", 1).For("k")
	lease := acquire(t, b.limiter, job)
	for _, level := range isolationLevels {
		_, err := atonce.Tx(t.Context(), b.db(), level, func(tx pgx.Tx) error {
			l := b.limiter.WithTx(tx)
			refused(t, l, job)
			require.ErrorIs(t, l.Release(t.Context(), acquireAndRelease(t, l)), ratelimit.ErrLeaseLost)
			_, err := l.RenewLease(t.Context(), "L1")
			require.ErrorIs(t, err, ratelimit.ErrInvalidLease)
			_, err = l.Acquire(t.Context(), job.Cost(2))
			require.ErrorIs(t, err, ratelimit.ErrCostExceedsCapacity)
			_, err = tx.Exec(t.Context(), `INSERT INTO public.done VALUES (1)`)
			return err
		})
		require.NoError(t, err)
	}
	require.Equal(t, len(isolationLevels), b.count(t, `SELECT count(*) FROM public.done`))
	require.NoError(t, b.limiter.Release(t.Context(), lease.ID))
}

// acquireAndRelease returns the ID of a lease that was given back.
func acquireAndRelease(t *testing.T, l *ratelimit.Limiter) string {
	t.Helper()
	lease := acquire(t, l, daylong("others", 1).For("k"))
	require.NoError(t, l.Release(t.Context(), lease.ID))
	return lease.ID
}

// The ID of a lease that was rolled back differs from the ID of the next lease, also if a clock was ahead. Its fencing tokens are
// not used again.
func TestAnIDOfWhatWasRolledBackReleasesNothing(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for _, level := range isolationLevels {
		for _, ahead := range []time.Duration{0, time.Microsecond, time.Second, time.Hour, ratelimit.Week} {
			t.Run(fmt.Sprintf("%s/%v", level, ahead), func(t *testing.T) {
				t.Parallel()
				d, job := b.desk(t, ratelimit.Config{}), daylong("jobs", 1).For(t.Name())
				d.at(ahead)
				require.NoError(t, d.limiter.Release(t.Context(), acquire(t, d.limiter, job).ID))
				d.at(0)
				tx := b.begin(t, level)
				undone := acquire(t, d.limiter.WithTx(tx), job)
				require.NoError(t, tx.Rollback(t.Context()))
				for _, later := range []time.Duration{time.Microsecond, time.Millisecond, 10 * time.Millisecond, time.Minute} {
					d.at(later)
					lease := acquire(t, d.limiter, job)
					require.ErrorIs(t, d.limiter.Release(t.Context(), undone.ID), ratelimit.ErrLeaseLost)
					_, err := d.limiter.RenewLease(t.Context(), undone.ID)
					require.ErrorIs(t, err, ratelimit.ErrLeaseLost)
					requireFree(t, d.limiter, 0, job)
					require.NoError(t, d.limiter.Release(t.Context(), lease.ID))
				}
			})
		}
	}
}
