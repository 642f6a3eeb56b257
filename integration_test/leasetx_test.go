package integration_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
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

func TestSlotsOfDifferentKeysNeverConflict(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "a thousand transactions")
	b, _ := setupOwn(t, nil) // transactions of other databases can conflict
	limit, other := daylong("jobs", 2), daylong("others", 2)
	b.exec(t, "ANALYZE ratelimit.buckets")
	require.NoError(t, atonce.Do(racers, func(worker int) error {
		for n := range 120 {
			key := fmt.Sprintf("key %d %d", worker, n/3) // each is used by three transactions, the first of which makes its row
			err := pgx.BeginTxFunc(t.Context(), b.pool, pgx.TxOptions{IsoLevel: pgx.Serializable}, func(tx pgx.Tx) error {
				l := b.limiter.WithTx(tx)
				lease, err := l.Acquire(t.Context(), limit.For(key), other.For(key))
				if err != nil || !lease.Allowed {
					return errors.Join(err, lease.Err())
				}
				if _, err := l.RenewLease(t.Context(), lease.ID); err != nil {
					return err
				}
				return l.Release(t.Context(), lease.ID)
			})
			if err != nil {
				return fmt.Errorf("worker %d, transaction %d: %w", worker, n, err)
			}
		}
		return nil
	}))
}

func TestLeasesTakeNoSIREADLock(t *testing.T) {
	t.Parallel()
	for _, mode := range planModes {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			b := setup(t, planning(mode))
			limit, second := daylong("jobs", 2), daylong("second", 1)
			lease := acquire(t, b.limiter, limit.For("here"), second.For("here"))
			lost := acquireAndRelease(t, b.limiter)
			b.exec(t, "ANALYZE ratelimit.buckets")
			for name, call := range map[string]func(context.Context, *ratelimit.Limiter) error{
				"Acquire": func(ctx context.Context, l *ratelimit.Limiter) error {
					_, err := l.Acquire(ctx, limit.For("here"), limit.For("new"))
					return err
				},
				"AcquireRefused": func(ctx context.Context, l *ratelimit.Limiter) error {
					_, err := l.Acquire(ctx, second.For("here"))
					return err
				},
				"Renew": func(ctx context.Context, l *ratelimit.Limiter) error {
					_, err := l.RenewLease(ctx, lease.ID)
					return err
				},
				"Release": func(ctx context.Context, l *ratelimit.Limiter) error { return l.Release(ctx, lease.ID) },
				"Lost": func(ctx context.Context, l *ratelimit.Limiter) error {
					if err := l.Release(ctx, lost); !errors.Is(err, ratelimit.ErrLeaseLost) {
						return fmt.Errorf("not lost: %w", err)
					}
					return nil
				},
				"Reset": func(ctx context.Context, l *ratelimit.Limiter) error { return l.Reset(ctx, limit.For("here")) },
			} {
				t.Run(name, func(t *testing.T) { // not parallel: they share the session
					b.requireNoSIREADs(t, func(tx pgx.Tx) error { return call(t.Context(), b.limiter.WithTx(tx)) })
				})
			}
		})
	}
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
