package integration_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/internal/test/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Each reservation is settled by two callers at once, with different costs, alone and in transactions of each isolation
// level, of which a third roll back. The tokens that are gone are what the reservations say that their work has cost.
func TestAReservationIsSettledOnce(t *testing.T) {
	t.Parallel()
	const workers, keys, capacity = 6, 2, 100_000
	limit, second := ratelimit.Define("settled", hoard(capacity)), ratelimit.Define("settled/second", hoard(capacity))
	for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			undo := errors.New("roll back")
			inTx := func(rolledBack bool, fn func(l *ratelimit.Limiter) error) error {
				_, err := atonce.Tx(t.Context(), b.db(), level, func(tx pgx.Tx) error {
					if err := fn(b.limiter.WithTx(tx)); err != nil || !rolledBack {
						return err
					}
					return undo
				})
				if errors.Is(err, undo) {
					return nil
				}
				return err
			}
			require.NoError(t, atonce.Do(workers, func(worker int) error {
				for n := range testsize.Of(8, 100) {
					request := limit.For(fmt.Sprint((worker + n) % keys)).Cost(2)
					requests := []ratelimit.Request{request, second.For("all")}[:1+worker%2]
					var id string
					reserve := func(l *ratelimit.Limiter) error {
						r, err := l.Reserve(t.Context(), requests...)
						id = r.ID
						return err
					}
					err := reserve(b.limiter)
					if n%2 == 0 {
						err = inTx(n%3 == 0, reserve)
					}
					if err != nil {
						return err
					}
					end := func(l *ratelimit.Limiter) error {
						var err error
						if rand.N(4) == 0 {
							err = l.Cancel(t.Context(), id)
						} else {
							err = l.Settle(t.Context(), id, request.Cost(float64(rand.N(5))))
						}
						if errors.Is(err, ratelimit.ErrReservationEnded) || errors.Is(err, ratelimit.ErrNotReserved) {
							return nil
						}
						return err
					}
					var both errgroup.Group
					both.Go(func() error { return end(b.limiter) })
					both.Go(func() error { return inTx(n%3 == 1, end) })
					if err := errors.Join(both.Wait(), end(b.limiter)); err != nil {
						return err
					}
				}
				return nil
			}))
			var gone, cost float64
			var open int
			require.NoError(t, b.pool.QueryRow(t.Context(), `SELECT (SELECT sum($1 - value) FROM ratelimit.buckets),
				sum(CASE WHEN state = 'open' THEN cost ELSE coalesce(settled, 0) END + (
					SELECT coalesce(sum(CASE WHEN state = 'open' THEN o.cost ELSE coalesce(o.settled, 0) END), 0)
					FROM jsonb_to_recordset(others) AS o (cost float8, settled float8))), count(*) FILTER (WHERE state = 'open') FROM ratelimit.reservations`,
				float64(capacity)).Scan(&gone, &cost, &open))
			require.InDelta(t, cost, gone, 0.01)
			require.Positive(t, cost)
		})
	}
}
