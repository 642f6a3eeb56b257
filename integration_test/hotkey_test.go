package integration_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// TestHotKey is about transactions of one process that want the same bucket all the time.
func TestHotKey(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "thousands of transactions on one key")

	const workers, rounds = 32, 20
	hot := ratelimit.Define("hot", hoard(workers*rounds/2))
	wide := func(c *pgxpool.Config) { c.MaxConns = workers }

	t.Run("TransactionsQueueInsteadOfFailing", func(t *testing.T) {
		t.Parallel()
		b := setup(t, wide)
		var attempts, allowed atomic.Int64
		require.NoError(t, atonce.Do(workers, func(int) error {
			for range rounds {
				var d ratelimit.Decision
				err := b.limiter.InTx(t.Context(), func(tx pgx.Tx) (err error) {
					attempts.Add(1)
					if d, err = b.limiter.WithTx(tx).Take(t.Context(), hot.Global()); err != nil {
						return err
					}
					_, err = tx.Exec(t.Context(), `SELECT pg_sleep(0.002)`)
					return err
				})
				if err != nil {
					return err
				}
				if d.Allowed {
					allowed.Add(1)
				}
			}
			return nil
		}))
		require.EqualValues(t, workers*rounds/2, allowed.Load())
		perCommit := float64(attempts.Load()) / (workers * rounds)
		t.Logf("%.3f attempts per commit", perCommit)
		require.Less(t, perCommit, 1.5, "jitter alone takes more than 2")
	})

	t.Run("ATransactionThatReadFirstIsRunTwiceAtMost", func(t *testing.T) {
		t.Parallel()
		b := setup(t, wide)
		var attempts atomic.Int64
		require.NoError(t, atonce.Do(workers, func(int) error {
			for range rounds {
				err := b.limiter.InTx(t.Context(), func(tx pgx.Tx) error {
					attempts.Add(1)
					if _, err := tx.Exec(t.Context(), `SELECT count(*) FROM pg_class`); err != nil {
						return err
					}
					_, err := b.limiter.WithTx(tx).Take(t.Context(), hot.Global())
					return err
				})
				if err != nil {
					return err
				}
			}
			return nil
		}))
		perCommit := float64(attempts.Load()) / (workers * rounds)
		t.Logf("%.3f attempts per commit", perCommit)
		require.Less(t, perCommit, 2.5)
	})

	t.Run("TransactionsThatHoldWhatEachOtherWantsGoOn", func(t *testing.T) {
		t.Parallel()
		b := setup(t, wide)
		b.exec(t, `CREATE TABLE app (id int PRIMARY KEY, n int NOT NULL DEFAULT 0)`)
		b.exec(t, `INSERT INTO app SELECT generate_series(1, 4)`)
		limits := []ratelimit.Request{hot.For("a"), hot.For("b"), hot.For("c")}
		require.NoError(t, atonce.Do(4, func(worker int) error {
			for round := range 3 {
				err := b.limiter.InTx(t.Context(), func(tx pgx.Tx) error {
					for i := range limits { // each in an order of its own, with a row of the application between
						at := (worker + i*(1+round%2)) % len(limits)
						if _, err := b.limiter.WithTx(tx).Take(t.Context(), limits[at]); err != nil {
							return err
						}
						if _, err := tx.Exec(t.Context(), `UPDATE app SET n = n + 1 WHERE id = $1`, 1+at); err != nil {
							return err
						}
					}
					return nil
				})
				if err != nil {
					return fmt.Errorf("worker %d: %w", worker, err)
				}
			}
			return nil
		}))
		var total int
		require.NoError(t, b.pool.QueryRow(t.Context(), `SELECT sum(n) FROM app`).Scan(&total))
		require.Equal(t, 4*3*len(limits), total)
	})

	t.Run("WhoeverGivesUpWaitingLeavesTheQueueToTheOthers", func(t *testing.T) {
		t.Parallel()
		b := setup(t, wide)
		take := func(ctx context.Context, then func() error) error {
			return b.limiter.InTx(ctx, func(tx pgx.Tx) error {
				if _, err := b.limiter.WithTx(tx).Take(ctx, hot.For("queue")); err != nil {
					return err
				}
				return then()
			})
		}
		nothing := func() error { return nil }
		// Two transactions that meet make it a bucket to queue for.
		first := true
		require.NoError(t, take(t.Context(), func() error {
			if !first {
				return nil
			}
			first = false
			_, err := b.limiter.Take(t.Context(), ratelimit.Define("other", hoard(1)).Global())
			return err
		}))
		require.NoError(t, atonce.Do(8, func(int) error { return take(t.Context(), nothing) }))

		inside, leave := make(chan struct{}), make(chan struct{})
		done := make(chan error, 1)
		go func() {
			done <- take(t.Context(), func() error {
				select {
				case inside <- struct{}{}:
				default:
				}
				<-leave
				return nil
			})
		}()
		<-inside
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		require.ErrorIs(t, take(ctx, nothing), context.DeadlineExceeded)
		close(leave)
		require.NoError(t, <-done)
		require.NoError(t, take(t.Context(), nothing))
	})
}
