package integration_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
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
		{"OneOfSeveralRows", true, taking(wide.For("here"))},
		{"OneOfSeveralRowsOfANewKey", true, taking(wide.For("new"))},
		{"AllOfSeveralRows", true, taking(wide.For("here").Cost(4e5))},
		{"AllOfSeveralRowsOfANewKey", true, taking(wide.For("new").Cost(4e5))},
		{"SeveralRowsRefused", false, taking(wide.For("low"))},
		{"SeveralRowsAmongOthers", true, taking(wide.For("here"), wide.For("new"), other.For("key"))},
		{"SeveralRowsRefusedAmongOthers", false, taking(wide.For("here"), wide.For("low"), other.For("key"))},
		{"SeveralRowsReserved", true, reserving(wide.For("low"), other.For("key"))},
		{"SeveralRowsReset", true, resetting(wide.For("low"), other.For("key"))},
		{"Charge", true, func(ctx context.Context, l *ratelimit.Limiter) (bool, error) {
			return true, l.Charge(ctx, wide.For("low"), other.For("key"))
		}},
		{"Credit", true, func(ctx context.Context, l *ratelimit.Limiter) (bool, error) {
			return true, l.Credit(ctx, wide.For("low"), other.For("key"))
		}},
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
			require.NoError(t, b.limiter.Reset(t.Context(), wide.For("here")))
			drain(t, b.limiter, wide.For("low"), 0.5)
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

// serializable runs fn in a SERIALIZABLE transaction that it rolls back. It runs fn again after a serialization failure, which
// transactions of other databases of the server can cause.
func (b *bundle) serializable(t *testing.T, fn func(tx pgx.Tx) error) {
	t.Helper()
	undo := errors.New("roll back")
	_, err := atonce.Tx(t.Context(), b.db(), pgx.Serializable, func(tx pgx.Tx) error {
		if err := fn(tx); err != nil {
			return err
		}
		return undo
	})
	require.Equal(t, undo, err)
}

// requireNoSIREADs makes a call in SERIALIZABLE transactions, so often that the server considers a plan for all parameters, which it does from
// the sixth execution on. The call leaves no SIREAD lock on our tables and their indexes.
func (b *bundle) requireNoSIREADs(t *testing.T, call func(tx pgx.Tx) error) {
	t.Helper()
	for range 7 {
		b.serializable(t, func(tx pgx.Tx) error {
			err := call(tx)
			if err == nil {
				require.Zero(t, reservationSIREADs(t, tx))
			}
			return err
		})
	}
}

// sireads returns how many SIREAD locks, on the table of buckets or its index, the session holds.
func sireads(t *testing.T, tx pgx.Tx) int {
	t.Helper()
	return countSIREADs(t, tx, `c.relname LIKE 'buckets%'`)
}

// reservationSIREADs returns how many SIREAD locks the session holds on our tables and their indexes.
func reservationSIREADs(t *testing.T, tx pgx.Tx) int {
	t.Helper()
	return countSIREADs(t, tx, `c.relnamespace = 'ratelimit'::regnamespace`)
}

// countSIREADs counts SIREAD locks, without locks on rows and pages of tables if the server keeps these for rows that the session
// itself has written. A read through the snapshot also locks in an index.
func countSIREADs(t *testing.T, tx pgx.Tx, of string) (n int) {
	t.Helper()
	require.NoError(t, tx.QueryRow(t.Context(), `
		SELECT count(*) FROM pg_locks AS l JOIN pg_class AS c ON c.oid = l.relation
		WHERE l.mode = 'SIReadLock' AND l.pid = pg_backend_pid() AND NOT (l.locktype IN ('tuple', 'page') AND c.relkind = 'r' AND $1) AND `+of,
		keepsRowLocks(t, tx.Conn().Config())).Scan(&n))
	return n
}

// server is an address.
type server struct {
	host string
	port uint16
}

// keepers caches, by server, whether it keeps such locks.
var keepers = struct {
	mu  sync.Mutex
	are map[server]bool
}{are: make(map[server]bool)}

// keepsRowLocks reports whether an upsert behind a savepoint keeps a SIREAD lock on the row that it has written. PostgreSQL 15.18
// does not, 15.20 does.
func keepsRowLocks(t *testing.T, config *pgx.ConnConfig) bool {
	t.Helper()
	keepers.mu.Lock()
	defer keepers.mu.Unlock()
	at := server{config.Host, config.Port}
	if keeps, known := keepers.are[at]; known {
		return keeps
	}
	conn, err := pgx.ConnectConfig(t.Context(), config.Copy())
	require.NoError(t, err)
	defer conn.Close(context.WithoutCancel(t.Context()))
	var keeps bool
	for _, sql := range []string{
		`CREATE TABLE IF NOT EXISTS public.sireads (id integer PRIMARY KEY)`,
		`INSERT INTO public.sireads VALUES (1) ON CONFLICT DO NOTHING`,
		`BEGIN ISOLATION LEVEL SERIALIZABLE`,
		`SAVEPOINT s`,
		`INSERT INTO public.sireads AS s VALUES (1) ON CONFLICT (id) DO UPDATE SET id = s.id`,
	} {
		_, err := conn.Exec(t.Context(), sql)
		require.NoError(t, err, sql)
	}
	require.NoError(t, conn.QueryRow(t.Context(), `
		SELECT count(*) > 0 FROM pg_locks WHERE mode = 'SIReadLock' AND pid = pg_backend_pid() AND relation = 'public.sireads'::regclass`).Scan(&keeps))
	for _, sql := range []string{`ROLLBACK`, `DROP TABLE public.sireads`} {
		_, err := conn.Exec(t.Context(), sql)
		require.NoError(t, err, sql)
	}
	keepers.are[at] = keeps
	return keeps
}
