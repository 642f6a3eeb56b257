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

// Two transactions that share no key have nothing to fail over. A read of the table would be found in
// conflict with the neighbours' inserts, or, where the planner prefers to scan it, with every write.
func TestDifferentKeysNeverConflict(t *testing.T) {
	t.Parallel()
	const workers = 8
	key := func(worker, _ int) string { return fmt.Sprint("key ", worker) }
	fresh := func(worker, n int) string { return fmt.Sprintf("key %06d", n*workers+worker) }
	jobs, others := daylong("jobs", 2), daylong("others", 2)
	take := func(requests func(worker, n int) []ratelimit.Request) func(context.Context, *ratelimit.Limiter, int, int) error {
		return func(ctx context.Context, l *ratelimit.Limiter, worker, n int) error {
			return takeAndCheck(ctx, l, requests(worker, n))
		}
	}
	for name, test := range map[string]struct {
		rows int // in the table, analyzed, before it starts
		call func(ctx context.Context, l *ratelimit.Limiter, worker, n int) error
	}{
		"InASmallTable": {10, take(func(worker, n int) []ratelimit.Request { return []ratelimit.Request{roomy.For(key(worker, n))} })},
		"AtTheFirstUse": {0, take(func(worker, n int) []ratelimit.Request { return []ratelimit.Request{roomy.For(fresh(worker, n))} })},
		"OfAWindow":     {10, take(func(worker, n int) []ratelimit.Request { return []ratelimit.Request{slider.For(key(worker, n))} })},
		"OverAWindowAndTwoLimits": {10, take(func(worker, n int) []ratelimit.Request {
			return []ratelimit.Request{roomy.For(key(worker, n)), slider.For(fresh(worker, n)), other.For(fresh(worker, n))}
		})},
		"OverFiveLimitsOnOnePage": {40, take(func(worker, _ int) (requests []ratelimit.Request) {
			for i := range 5 {
				requests = append(requests, roomy.For(fmt.Sprint("key ", 5*worker+i)))
			}
			return requests
		})},
		"OfReservations": {0, func(ctx context.Context, l *ratelimit.Limiter, worker, n int) error {
			return lifeOfReservations(ctx, l, key(worker, n))
		}},
		"OfSlots": {0, func(ctx context.Context, l *ratelimit.Limiter, worker, n int) error {
			key := fresh(worker, n/3) // each is used by three transactions, the first of which makes its row
			lease, err := l.Acquire(ctx, jobs.For(key), others.For(key))
			if err != nil || !lease.Allowed {
				return errors.Join(err, lease.Err())
			}
			_, err = l.RenewLease(ctx, lease.ID)
			return errors.Join(err, l.Release(ctx, lease.ID))
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			representative(t, name, "OfReservations")
			b, _ := setupOwn(t, nil) // the transactions of other databases of a server count as neighbours
			if name == "OverFiveLimitsOnOnePage" && keepsRowLocks(t, b.pool.Config().ConnConfig) {
				b, _ = setupOwn(t, map[string]string{"max_pred_locks_per_page": "64"}) // as docs/operations.md says
			}
			limiter := b.with(t, ratelimit.Config{StaleAfter: 1}) // so that all reservations are late
			for i := range test.rows {
				require.NoError(t, limiter.Reset(t.Context(), roomy.For(fmt.Sprint("key ", i))))
			}
			b.exec(t, "ANALYZE ratelimit.buckets, ratelimit.reservations")
			require.NoError(t, atonce.Do(workers, func(worker int) error {
				for n := range testsize.Of(6, 350) {
					err := pgx.BeginTxFunc(t.Context(), b.pool, pgx.TxOptions{IsoLevel: pgx.Serializable}, func(tx pgx.Tx) error {
						return test.call(t.Context(), limiter.WithTx(tx), worker, n)
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

// No verb leaves a SIREAD lock on our tables, under each plan of the server.
func TestCallsTakeNoSIREADLock(t *testing.T) {
	t.Parallel()
	jobs, second := daylong("jobs", 2), daylong("second", 1)
	for _, mode := range planModes {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			b := setup(t, planning(mode))
			d := b.desk(t, ratelimit.Config{StaleAfter: staleAfter})
			require.NoError(t, takeAndCheck(t.Context(), d.limiter, []ratelimit.Request{roomy.For("here"), slider.For("here")}))
			takeAll(t, d.limiter, tight.For("empty"))
			takeAll(t, d.limiter, slider.For("empty"))
			require.NoError(t, d.limiter.Reset(t.Context(), wide.For("here")))
			drain(t, d.limiter, wide.For("low"), 0.5)
			requests := []ratelimit.Request{lookups.For("key").Cost(8), roomy.For("key")}
			owing := d.reserve(t, append(requests, mortgaged.For("key").Cost(10))...)
			stale, ended := d.reserve(t, requests...), d.reserve(t, requests...)
			d.at(2 * staleAfter)
			fresh := d.reserve(t, requests...)
			d.reserve(t, mortgaged.For("key").Cost(30)) // no more may be owed
			require.NoError(t, d.limiter.Cancel(t.Context(), ended.ID))
			held, lost := acquire(t, d.limiter, jobs.For("here"), second.For("here")), acquireAndRelease(t, d.limiter)
			b.exec(t, "ANALYZE ratelimit.buckets, ratelimit.reservations")
			on := func(c change, id string, want error) verb {
				return func(ctx context.Context, l *ratelimit.Limiter) (bool, error) {
					err := c(ctx, l, "key", id)
					if want != nil && errors.Is(err, want) {
						return false, nil
					}
					return true, err
				}
			}
			acquiring := func(requests ...ratelimit.Request) verb {
				return func(ctx context.Context, l *ratelimit.Limiter) (bool, error) {
					lease, err := l.Acquire(ctx, requests...)
					return lease.Allowed, err
				}
			}
			release := func(ctx context.Context, l *ratelimit.Limiter, _, id string) error { return l.Release(ctx, id) }
			for name, c := range map[string]struct {
				call    verb
				refused bool
			}{
				"Take":                   {taking(roomy.For("here")), false},
				"TakeOnANewKey":          {taking(roomy.For("new")), false},
				"TakeRefused":            {taking(tight.For("empty")), true},
				"TakeSeveral":            {taking(roomy.For("here"), roomy.For("new"), other.Global()), false},
				"TakeSeveralRefused":     {taking(roomy.For("here"), roomy.For("new"), tight.For("empty")), true},
				"Reserve":                {reserving(tight.For("empty")), false},
				"ReserveSeveral":         {reserving(append(requests, words.For("new"))...), false},
				"ReserveRefused":         {reserving(mortgaged.For("key")), true},
				"ReserveSeveralRefused":  {reserving(roomy.For("here"), mortgaged.For("key")), true},
				"Reset":                  {resetting(tight.For("empty"), roomy.For("new")), false},
				"Window":                 {taking(slider.For("here")), false},
				"WindowOnANewKey":        {taking(slider.For("new")), false},
				"WindowRefused":          {taking(slider.For("empty")), true},
				"WindowAmongSeveral":     {taking(slider.For("here"), roomy.For("here"), slider.For("new")), false},
				"WindowRefusedOfSeveral": {taking(slider.For("empty"), roomy.For("here"), slider.For("new")), true},
				"WindowReset":            {resetting(slider.For("empty")), false},
				"Row":                    {taking(wide.For("here")), false},
				"RowOfANewKey":           {taking(wide.For("new")), false},
				"AllRows":                {taking(wide.For("here").Cost(4e5)), false},
				"AllRowsOfANewKey":       {taking(wide.For("new").Cost(4e5)), false},
				"RowsRefused":            {taking(wide.For("low")), true},
				"RowsAmongSeveral":       {taking(wide.For("here"), wide.For("new"), other.For("key")), false},
				"RowsRefusedOfSeveral":   {taking(wide.For("here"), wide.For("low"), other.For("key")), true},
				"RowsReserved":           {reserving(wide.For("low"), other.For("key")), false},
				"RowsReset":              {resetting(wide.For("low"), other.For("key")), false},
				"Settle":                 {on(settling, fresh.ID, nil), false},
				"SettleEnded":            {on(settling, ended.ID, ratelimit.ErrReservationEnded), true},
				"SettleUnknown":          {on(settling, unknownID, ratelimit.ErrNotReserved), true},
				"Cancel":                 {on(cancelling, fresh.ID, nil), false},
				"CancelEnded":            {on(cancelling, ended.ID, nil), false},
				"Start":                  {on(starting, fresh.ID, nil), false},
				"StartStale":             {on(starting, stale.ID, nil), false},
				"StartRefused":           {on(starting, owing.ID, nil), false},
				"StartUnknown":           {on(starting, unknownID, ratelimit.ErrNotReserved), true},
				"Renew":                  {on(renewing, fresh.ID, nil), false},
				"RenewRefused":           {on(renewing, owing.ID, nil), false},
				"RenewCancelled":         {on(renewing, ended.ID, nil), false},
				"Charge":                 {on(func(ctx context.Context, l *ratelimit.Limiter, _, _ string) error { return l.Charge(ctx, requests...) }, "", nil), false},
				"Credit":                 {on(func(ctx context.Context, l *ratelimit.Limiter, _, _ string) error { return l.Credit(ctx, requests...) }, "", nil), false},
				"Acquire":                {acquiring(jobs.For("here"), jobs.For("new")), false},
				"AcquireRefused":         {acquiring(second.For("here")), true},
				"RenewLease": {on(func(ctx context.Context, l *ratelimit.Limiter, _, id string) error {
					return errOf(l.RenewLease(ctx, id))
				}, held.ID, nil), false},
				"Release":     {on(release, held.ID, nil), false},
				"ReleaseLost": {on(release, lost, ratelimit.ErrLeaseLost), true},
				"ResetSlots":  {resetting(jobs.For("here")), false},
			} {
				t.Run(name, func(t *testing.T) { // not parallel: they share the session
					d.requireNoSIREADs(t, func(tx pgx.Tx) error {
						allowed, err := c.call(t.Context(), d.limiter.WithTx(tx))
						require.True(t, err != nil || allowed != c.refused)
						return err
					})
				})
			}
			t.Run("WhereASelectWould", func(t *testing.T) { // not parallel: it shares the session
				tx := d.begin(t, pgx.Serializable)
				_, err := d.limiter.WithTx(tx).Value(t.Context(), tight.For("empty"))
				require.NoError(t, err)
				require.NotZero(t, sireads(t, tx))
				require.NoError(t, tx.Rollback(t.Context()))
			})
		})
	}
}
