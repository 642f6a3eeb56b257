package integration_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Two transactions that share no key have nothing to fail over. A read of the table would be found in
// conflict with the neighbours' inserts, or, where the planner prefers to scan it, with every write.
func TestDifferentKeysNeverConflict(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "ten thousand transactions")
	const workers = 8
	tests := []struct {
		name         string
		rows         int // in the table, analyzed, before it starts
		transactions int // of each worker
		requests     func(worker, n int) []ratelimit.Request
	}{
		{"InASmallTable", 10, 450, func(worker, _ int) []ratelimit.Request {
			return []ratelimit.Request{roomy.For(fmt.Sprint("key ", worker))}
		}},
		{"AtTheFirstUseOfEachKey", 0, 450, func(worker, n int) []ratelimit.Request {
			return []ratelimit.Request{roomy.For(fmt.Sprintf("key %06d", n*workers+worker))}
		}},
		{"OfASlidingWindow", 10, 350, func(worker, _ int) []ratelimit.Request {
			return []ratelimit.Request{slider.For(fmt.Sprint("key ", worker))}
		}},
		{"AtTheFirstUseOfASlidingWindow", 0, 350, func(worker, n int) []ratelimit.Request {
			return []ratelimit.Request{slider.For(fmt.Sprintf("key %06d", n*workers+worker))}
		}},
		{"OverASlidingWindowAndABucket", 10, 350, func(worker, n int) []ratelimit.Request {
			return []ratelimit.Request{roomy.For(fmt.Sprint("key ", worker)), slider.For(fmt.Sprintf("key %06d", n*workers+worker))}
		}},
		{"OverTwoLimits", 10, 350, func(worker, n int) []ratelimit.Request {
			return []ratelimit.Request{roomy.For(fmt.Sprint("key ", worker)), other.For(fmt.Sprintf("key %06d", n*workers+worker))}
		}},
		{"OverFiveLimitsOnOnePage", 40, 350, func(worker, _ int) (requests []ratelimit.Request) {
			for i := range 5 {
				requests = append(requests, roomy.For(fmt.Sprint("key ", 5*worker+i)))
			}
			return requests
		}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			b, _ := setupOwn(t, nil) // the transactions of other databases of a server count as neighbours
			if test.name == "OverFiveLimitsOnOnePage" && keepsRowLocks(t, b.pool.Config().ConnConfig) {
				b, _ = setupOwn(t, map[string]string{"max_pred_locks_per_page": "64"}) // as docs/operations.md says
			}
			for i := range test.rows {
				require.NoError(t, b.limiter.Reset(t.Context(), roomy.For(fmt.Sprint("key ", i))))
			}
			b.exec(t, "ANALYZE ratelimit.buckets")
			require.NoError(t, atonce.Do(workers, func(worker int) error {
				for n := range test.transactions {
					requests := test.requests(worker, n)
					err := pgx.BeginTxFunc(t.Context(), b.pool, pgx.TxOptions{IsoLevel: pgx.Serializable}, func(tx pgx.Tx) error {
						return takeAndCheck(t.Context(), b.limiter.WithTx(tx), requests)
					})
					if err != nil {
						return fmt.Errorf("worker %d, transaction %d: %w", worker, n, err)
					}
				}
				return nil
			}))
		})
	}
}

// takeAndCheck takes; a refusal is an error, because none is due.
func takeAndCheck(ctx context.Context, limiter *ratelimit.Limiter, requests []ratelimit.Request) error {
	d, err := limiter.Take(ctx, requests...)
	if err != nil {
		return err
	}
	return d.Err()
}

func TestDecisionsTakeNoSIREADLock(t *testing.T) {
	t.Parallel()
	calls := []struct {
		name    string
		allowed bool
		call    verb
	}{
		{"TakeAllowed", true, taking(roomy.For("here"))},
		{"TakeAllowedOnANewKey", true, taking(roomy.For("new"))},
		{"TakeRefused", false, taking(tight.For("empty"))},
		{"TakeSeveralAllowed", true, taking(roomy.For("here"), roomy.For("new"), other.Global())},
		{"TakeSeveralRefused", false, taking(roomy.For("here"), roomy.For("new"), tight.For("empty"))},
		{"ReserveAllowed", true, reserving(tight.For("empty"))},
		{"ReserveSeveralAllowed", true, reserving(tight.For("empty"), roomy.For("new"))},
		{"ReserveRefused", false, reserving(bounded.For("owing"))},
		{"ReserveSeveralRefused", false, reserving(roomy.For("here"), bounded.For("owing"))},
		{"Reset", true, resetting(tight.For("empty"), roomy.For("new"))},
		{"SlidingAllowed", true, taking(slider.For("here"))},
		{"SlidingAllowedOnANewKey", true, taking(slider.For("new"))},
		{"SlidingRefused", false, taking(slider.For("empty"))},
		{"SlidingAmongSeveral", true, taking(slider.For("here"), roomy.For("here"), slider.For("new"))},
		{"SlidingRefusedAmongSeveral", false, taking(slider.For("empty"), roomy.For("here"), slider.For("new"))},
		{"SlidingReset", true, resetting(slider.For("empty"))},
	}
	for _, mode := range planModes {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			b := setup(t, planning(mode))
			require.NoError(t, b.limiter.Reset(t.Context(), roomy.For("here")))
			takeAll(t, b.limiter, tight.For("empty"))
			require.NoError(t, takeAndCheck(t.Context(), b.limiter, []ratelimit.Request{slider.For("here")}))
			takeAll(t, b.limiter, slider.For("empty"))
			owe(t, b.limiter, bounded.For("owing"))
			b.exec(t, "ANALYZE ratelimit.buckets")
			for _, c := range calls {
				t.Run(c.name, func(t *testing.T) { // not parallel: they share the session
					b.requireNoSIREADs(t, func(tx pgx.Tx) error {
						allowed, err := c.call(t.Context(), b.limiter.WithTx(tx))
						require.True(t, err != nil || allowed == c.allowed)
						return err
					})
				})
			}
			t.Run("WhereASelectWould", func(t *testing.T) { // not parallel: it shares the session
				tx := b.begin(t, pgx.Serializable)
				_, err := b.limiter.WithTx(tx).Value(t.Context(), tight.For("empty"))
				require.NoError(t, err)
				require.NotZero(t, sireads(t, tx))
				require.NoError(t, tx.Rollback(t.Context()))
			})
		})
	}
}
