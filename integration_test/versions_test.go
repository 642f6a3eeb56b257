package integration_test

import (
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Programs of two versions, which call functions of two names, share a row: together they get its tokens, and no more,
// at each isolation level, also if some roll back. The other version here is an update, as a program without functions
// sends it.
func TestTwoVersionsOfADecisionShareARow(t *testing.T) {
	t.Parallel()
	const capacity, workers = 60, 6
	limit := ratelimit.Define("versions", ratelimit.TokenBucket{Rate: capacity, Period: century})
	undo := errors.New("roll back")
	for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			limiter := b.with(t, ratelimit.Config{AsOf: func() time.Time { return clockNoon }})
			var taken atomic.Int64
			takes := func(tx pgx.Tx, worker int) (allowed bool, err error) {
				if worker%2 == 0 {
					d, err := limiter.WithTx(tx).Take(t.Context(), limit.For("key"))
					return d.Allowed, err
				}
				tag, err := tx.Exec(t.Context(), `UPDATE ratelimit.buckets SET value = value - 1 WHERE name = 'versions' AND key = 'key' AND value >= 1`)
				return tag.RowsAffected() == 1, err
			}
			first, err := limiter.Take(t.Context(), limit.For("key")) // or the other version finds no row
			require.NoError(t, err)
			require.True(t, first.Allowed)
			require.NoError(t, atonce.Do(workers, func(worker int) error {
				for n := range capacity {
					allowed := false
					_, err := atonce.Tx(t.Context(), b.pool, level, func(tx pgx.Tx) (err error) {
						allowed, err = takes(tx, worker)
						if err == nil && n%4 == 0 {
							err = undo
						}
						return err
					})
					if err != nil && !errors.Is(err, undo) {
						return err
					}
					if allowed && err == nil {
						taken.Add(1)
					}
				}
				return nil
			}))
			require.EqualValues(t, capacity-1, taken.Load())
			require.Zero(t, b.row(t, "versions", "key").Value)
		})
	}
}
