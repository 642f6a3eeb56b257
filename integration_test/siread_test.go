package integration_test

import (
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
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
