package integration_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Two transactions that share no bucket and no reservation have nothing to fail over.
func TestDifferentReservationsNeverConflict(t *testing.T) {
	t.Parallel()
	const workers = 8
	transactions := testsize.Of(6, 60)
	b, _ := setupOwn(t, nil, func(c *pgxpool.Config) { c.MaxConns = workers }) // transactions of other databases can conflict
	limiter := b.with(t, ratelimit.Config{StaleAfter: 1})                      // so that all are late
	for worker := range workers {
		require.NoError(t, lifeOfReservations(t.Context(), limiter, fmt.Sprint("key ", worker)))
	}
	b.exec(t, "ANALYZE ratelimit.buckets, ratelimit.reservations")
	require.NoError(t, atonce.Do(workers, func(worker int) error {
		for n := range transactions {
			err := pgx.BeginTxFunc(t.Context(), b.pool, pgx.TxOptions{IsoLevel: pgx.Serializable}, func(tx pgx.Tx) error {
				return lifeOfReservations(t.Context(), limiter.WithTx(tx), fmt.Sprint("key ", worker))
			})
			if err != nil {
				return fmt.Errorf("worker %d, transaction %d: %w", worker, n, err)
			}
		}
		return nil
	}))
	for worker := range workers {
		require.InDelta(t, float64(1e6-(1+transactions)*4), b.row(t, "roomy", fmt.Sprint("key ", worker)).Value, 0.1)
	}
}

// lifeOfReservations makes one reservation and settles it, and makes another and cancels it. It costs four roomy: three and, as the
// first is started late, three again, of which one is settled and one is credited back.
func lifeOfReservations(ctx context.Context, limiter *ratelimit.Limiter, key string) error {
	first, err := limiter.Reserve(ctx, roomy.For(key).Cost(3), other.For(key))
	if err != nil {
		return err
	}
	second, err := limiter.Reserve(ctx, roomy.For(key).Cost(3))
	if err != nil {
		return err
	}
	if _, err := limiter.Start(ctx, first.ID); err != nil {
		return err
	}
	if err := limiter.Settle(ctx, first.ID, roomy.For(key).Cost(2), other.For(key).Cost(2)); err != nil {
		return err
	}
	if err := limiter.Cancel(ctx, second.ID); err != nil {
		return err
	}
	return limiter.Credit(ctx, roomy.For(key).Cost(1), other.For(key))
}

func TestReservationsTakeNoSIREADLock(t *testing.T) {
	t.Parallel()
	const unknown = "2b1f8a5e-9c47-4d0a-b3e6-7f1c2d9e8a40"
	for _, mode := range planModes {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			b := setup(t, planning(mode))
			d := b.desk(t, ratelimit.Config{StaleAfter: staleAfter})
			requests := []ratelimit.Request{lookups.For("key").Cost(8), roomy.For("key")}
			owing := d.reserve(t, append(requests, mortgaged.For("key").Cost(10))...)
			stale := d.reserve(t, requests...)
			ended := d.reserve(t, requests...)
			d.at(2 * staleAfter)
			fresh := d.reserve(t, requests...)
			owe(t, d.limiter, mortgaged.For("key").Cost(1))
			requireAllowed(t, reserving(mortgaged.For("key").Cost(10)), d.limiter)
			require.NoError(t, d.limiter.Cancel(t.Context(), ended.ID))
			b.exec(t, "ANALYZE ratelimit.buckets, ratelimit.reservations")
			verbs := map[string]struct {
				make change
				id   string
				err  error
			}{
				"Reserve": {func(ctx context.Context, l *ratelimit.Limiter, _, _ string) error {
					_, err := l.Reserve(ctx, append(requests, words.For("new"))...)
					return err
				}, "", nil},
				"Settle": {settling, fresh.ID, nil}, "Cancel": {cancelling, fresh.ID, nil},
				"Start": {starting, fresh.ID, nil}, "StartStale": {starting, stale.ID, nil}, "StartRefused": {starting, owing.ID, nil},
				"Renew": {renewing, fresh.ID, nil}, "RenewRefused": {renewing, owing.ID, nil}, "RenewCancelled": {renewing, ended.ID, nil},
				"SettleEnded": {settling, ended.ID, ratelimit.ErrReservationEnded}, "CancelEnded": {cancelling, ended.ID, nil},
				"SettleUnknown": {settling, unknown, ratelimit.ErrNotReserved}, "StartUnknown": {starting, unknown, ratelimit.ErrNotReserved},
				"Charge": {func(ctx context.Context, l *ratelimit.Limiter, _, _ string) error { return l.Charge(ctx, requests...) }, "", nil},
				"Credit": {func(ctx context.Context, l *ratelimit.Limiter, _, _ string) error { return l.Credit(ctx, requests...) }, "", nil},
			}
			for name, verb := range verbs {
				t.Run(name, func(t *testing.T) { // not parallel: they share the session
					d.requireNoSIREADs(t, func(tx pgx.Tx) error {
						err := verb.make(t.Context(), d.limiter.WithTx(tx), "key", verb.id)
						if sqlstate(err) == "40001" {
							return err
						}
						require.ErrorIs(t, err, verb.err)
						return nil
					})
				})
			}
			t.Run("WhereASelectWould", func(t *testing.T) { // not parallel: it shares the session
				tx := d.begin(t, pgx.Serializable)
				_, err := tx.Exec(t.Context(), "SELECT FROM ratelimit.reservations WHERE id = $1 FOR UPDATE", fresh.ID)
				require.NoError(t, err)
				require.NotZero(t, reservationSIREADs(t, tx))
				require.NoError(t, tx.Rollback(t.Context()))
			})
		})
	}
}
