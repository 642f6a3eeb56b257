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
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// serializable runs fn in a SERIALIZABLE transaction that it rolls back. It runs fn again after a serialization
// failure, which transactions of other databases of the server can cause.
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

// sireads returns how many SIREAD locks the session holds on our tables and their indexes.
func sireads(t *testing.T, tx pgx.Tx) (n int) {
	t.Helper()
	require.NoError(t, tx.QueryRow(t.Context(), `
		SELECT count(*) FROM pg_locks AS l JOIN pg_class AS c ON c.oid = l.relation WHERE l.mode = 'SIReadLock' AND l.pid = pg_backend_pid()
			AND NOT (l.locktype IN ('tuple', 'page') AND c.relkind = 'r' AND $1) AND c.relnamespace = 'ratelimit'::regnamespace`,
		keepsRowLocks(t, tx.Conn().Config())).Scan(&n))
	return n
}

// keepers caches, by server, what keepsRowLocks returns.
var keepers sync.Map

// keepsRowLocks reports whether an upsert behind a savepoint keeps a SIREAD lock on the row that it has written.
// PostgreSQL 15.18 does not, 15.20 does. Then sireads does not count the locks on rows and pages of tables. A read
// through the snapshot also locks in an index.
func keepsRowLocks(t *testing.T, config *pgx.ConnConfig) (keeps bool) {
	t.Helper()
	server := fmt.Sprint(config.Host, config.Port)
	if known, is := keepers.Load(server); is {
		return known.(bool)
	}
	conn, err := pgx.ConnectConfig(t.Context(), config.Copy())
	require.NoError(t, err)
	defer conn.Close(context.WithoutCancel(t.Context()))
	run := func(statements ...string) {
		for _, sql := range statements {
			_, err := conn.Exec(t.Context(), sql)
			require.NoError(t, err, sql)
		}
	}
	run(`CREATE TABLE IF NOT EXISTS public.sireads (id integer PRIMARY KEY)`, `INSERT INTO public.sireads VALUES (1) ON CONFLICT DO NOTHING`,
		`BEGIN ISOLATION LEVEL SERIALIZABLE`, `SAVEPOINT s`, `INSERT INTO public.sireads AS s VALUES (1) ON CONFLICT (id) DO UPDATE SET id = s.id`)
	require.NoError(t, conn.QueryRow(t.Context(), `
		SELECT count(*) > 0 FROM pg_locks WHERE mode = 'SIReadLock' AND pid = pg_backend_pid() AND relation = 'public.sireads'::regclass`).Scan(&keeps))
	run(`ROLLBACK`)
	keepers.Store(server, keeps)
	return keeps
}

// Two transactions that share no key have nothing to fail over. A read of the table would be found in
// conflict with the neighbours' inserts, or, where the planner prefers to scan it, with every write.
func TestDifferentKeysNeverConflict(t *testing.T) {
	t.Parallel()
	const workers = 8
	jobs := daylong("jobs", 2)
	b := setupQuiet(t)
	if keepsRowLocks(t, b.pool.Config().ConnConfig) {
		b = setupOwn(t, map[string]string{"max_pred_locks_per_page": "64"}) // as docs/operations.md says
	}
	for i := range 5 * workers {
		require.NoError(t, b.limiter.Reset(t.Context(), roomy.For(fmt.Sprint(i))))
	}
	b.exec(t, "ANALYZE ratelimit.buckets, ratelimit.reservations")
	require.NoError(t, atonce.Do(workers, func(worker int) error {
		for n := range testkit.Sized(6, 350) {
			key := fmt.Sprintf("key %06d", n/3*workers+worker) // of three transactions, the first of which makes its row
			requests := []ratelimit.Request{slider.For(key), other.For(key)}
			for i := range 5 { // on one page with the neighbours' rows
				requests = append(requests, roomy.For(fmt.Sprint(5*worker+i)))
			}
			err := pgx.BeginTxFunc(t.Context(), b.pool, pgx.TxOptions{IsoLevel: pgx.Serializable}, func(tx pgx.Tx) error {
				ctx, l := t.Context(), b.limiter.WithTx(tx)
				first, err := l.Reserve(ctx, roomy.For(key).Cost(3), other.For(key))
				second, again := l.Reserve(ctx, roomy.For(key).Cost(3))
				lease, slot := l.Acquire(ctx, jobs.For(key))
				return errors.Join(
					l.Require(ctx, requests...), err, again, slot,
					errOf(l.Start(ctx, first.ID)), l.Settle(ctx, first.ID, roomy.For(key).Cost(2), other.For(key).Cost(2)),
					l.Cancel(ctx, second.ID), l.Credit(ctx, roomy.For(key), other.For(key)),
					errOf(l.RenewLease(ctx, lease.ID)), l.Release(ctx, lease.ID),
				)
			})
			if err != nil {
				return fmt.Errorf("worker %d, transaction %d: %w", worker, n, err)
			}
		}
		return nil
	}))
}

// No verb leaves a SIREAD lock on our tables, under each plan of the server. But calls that read leases do: an Acquire
// that finds leases that have ended, and Reset.
func TestCallsTakeNoSIREADLock(t *testing.T) {
	t.Parallel()
	for _, mode := range planModes {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			b := setup(t, planning(mode))
			clock := &clock{}
			clock.set(clockNoon)
			b.limiter = b.with(t, ratelimit.Config{StaleAfter: staleAfter, AsOf: clock.now})
			calls := callsForSIREADs(t, b, clock)
			b.exec(t, "ANALYZE ratelimit.buckets, ratelimit.reservations")
			for i, call := range calls {
				for range 7 { // from the sixth execution on the server considers a plan for all parameters
					b.serializable(t, func(tx pgx.Tx) error {
						err := call(t.Context(), b.limiter.WithTx(tx))
						for _, answer := range []error{
							ratelimit.ErrLimited, ratelimit.ErrReservationEnded, ratelimit.ErrNotReserved, ratelimit.ErrLeaseLost, ratelimit.ErrNoReservations,
						} {
							if errors.Is(err, answer) {
								err = nil
							}
						}
						if err == nil {
							require.Zero(t, sireads(t, tx), "call %d", i)
						}
						return err
					})
				}
			}
			tx := b.begin(t, pgx.Serializable)
			require.NoError(t, errOf(b.limiter.WithTx(tx).Value(t.Context(), tight.For("empty"))))
			require.NotZero(t, sireads(t, tx), "where a SELECT would")
			require.NoError(t, tx.Rollback(t.Context()))
		})
	}
}

// callsForSIREADs returns calls of each verb, for buckets of each kind, which have a row or none, and allow or refuse.
func callsForSIREADs(t *testing.T, b *bundle, clock *clock) (calls []func(ctx context.Context, l *ratelimit.Limiter) error) {
	t.Helper()
	jobs, full := daylong("jobs", 2), daylong("full", 1)
	takeOne(t, b.limiter, roomy.For("here"), slider.For("here"))
	for _, limit := range []ratelimit.Limit{tight, slider} {
		takeAll(t, b.limiter, limit.For("empty"))
	}
	require.NoError(t, b.limiter.Reset(t.Context(), wide.For("here")))
	reserve := func(requests ...ratelimit.Request) string {
		r, err := b.limiter.Reserve(t.Context(), requests...)
		require.NoError(t, err)
		return r.ID
	}
	two := []ratelimit.Request{lookups.For("key").Cost(8), roomy.For("key")}
	owing := reserve(append(two, mortgaged.For("key").Cost(10))...)
	stale, ended := reserve(two...), reserve(two...)
	clock.set(clockNoon.Add(2 * staleAfter))
	fresh := reserve(two...)
	reserve(mortgaged.For("key").Cost(30)) // no more may be owed
	require.NoError(t, b.limiter.Cancel(t.Context(), ended))
	acquire(t, b.limiter, full.For("here"))
	held, lost := acquire(t, b.limiter, jobs.For("here")), acquireAndRelease(t, b.limiter)
	both := acquire(t, b.limiter, jobs.For("both"), full.For("both"))
	add := func(name, id string, r ratelimit.Request) {
		calls = append(calls, func(ctx context.Context, l *ratelimit.Limiter) error { return everyCall[name](ctx, l, id, r) })
	}
	for _, request := range []ratelimit.Request{
		roomy.For("here"), roomy.For("new"), tight.For("empty"), slider.For("here"), slider.For("new"), slider.For("empty"),
		wide.For("here"), wide.For("new"), wide.For("here").Cost(4e5), wide.For("new").Cost(4e5),
		mortgaged.For("key"), lookups.For("key").Cost(8),
	} {
		for _, name := range []string{"Require", "Reset", "Reserve"} {
			add(name, "", request)
		}
	}
	for _, id := range []string{fresh, stale, owing, ended, unknownID} {
		for _, name := range []string{"Settle", "Cancel", "Start", "Renew"} {
			add(name, id, roomy.For("key"))
		}
	}
	for _, requests := range [][]ratelimit.Request{
		{roomy.For("here"), roomy.For("new"), other.Global()},
		{roomy.For("here"), roomy.For("new"), tight.For("empty")},
		{slider.For("here"), roomy.For("here"), slider.For("new")},
		{slider.For("empty"), roomy.For("here"), slider.For("new")},
		{wide.For("here"), wide.For("new"), other.For("key")},
		append(two, words.For("new")),
		{roomy.For("here"), mortgaged.For("key")},
	} {
		calls = append(calls,
			func(ctx context.Context, l *ratelimit.Limiter) error { return l.Require(ctx, requests...) },
			func(ctx context.Context, l *ratelimit.Limiter) error { return l.Reset(ctx, requests...) },
			func(ctx context.Context, l *ratelimit.Limiter) error { return errOf(l.Reserve(ctx, requests...)) })
	}
	return append(calls,
		func(ctx context.Context, l *ratelimit.Limiter) error { return l.Charge(ctx, two...) },
		func(ctx context.Context, l *ratelimit.Limiter) error { return l.Credit(ctx, two...) },
		func(ctx context.Context, l *ratelimit.Limiter) error { return errOf(l.Acquire(ctx, jobs.For("here"))) },
		func(ctx context.Context, l *ratelimit.Limiter) error { return errOf(l.Acquire(ctx, jobs.For("new"))) },
		func(ctx context.Context, l *ratelimit.Limiter) error { return errOf(l.Acquire(ctx, full.For("here"))) },
		func(ctx context.Context, l *ratelimit.Limiter) error {
			return errOf(l.Acquire(ctx, jobs.For("here"), daylong("more", 2).For("new")))
		},
		func(ctx context.Context, l *ratelimit.Limiter) error {
			return errOf(l.Acquire(ctx, jobs.For("both"), full.For("both"), roomy.For("here")))
		},
		func(ctx context.Context, l *ratelimit.Limiter) error { return errOf(l.RenewLease(ctx, both.ID)) },
		func(ctx context.Context, l *ratelimit.Limiter) error { return l.Release(ctx, both.ID) },
		func(ctx context.Context, l *ratelimit.Limiter) error { return errOf(l.RenewLease(ctx, held.ID)) },
		func(ctx context.Context, l *ratelimit.Limiter) error { return errOf(l.RenewLease(ctx, lost)) },
		func(ctx context.Context, l *ratelimit.Limiter) error { return l.Release(ctx, held.ID) },
		func(ctx context.Context, l *ratelimit.Limiter) error { return l.Release(ctx, lost) })
}
