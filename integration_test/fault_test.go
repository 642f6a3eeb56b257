package integration_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

const callsCapacity = 1000

var (
	calls = ratelimit.Define("calls", hoard(callsCapacity))

	// shardedCalls is calls over eight rows; by its name these are locked after the row of calls.
	shardedCalls = ratelimit.Define("callsSharded", ratelimit.TokenBucket{Rate: callsCapacity, Period: century, Shards: 8})
)

// stand is a bundle that faults are done to: its pool is the one to cut, exhaust and starve.
type stand struct {
	*bundle
	outside *bundle // connections without faults, to cause faults and to check their effects
}

// newStand also has the table of an application: messages, with a row for each allowed call.
func newStand(t *testing.T, configure ...func(*pgxpool.Config)) *stand {
	t.Helper()
	inside := setup(t, configure...)
	s := &stand{bundle: inside, outside: openOutside(t, inside.pool.Config().ConnString())}
	s.makeMessages(t)
	return s
}

func (s *stand) makeMessages(t *testing.T) {
	t.Helper()
	s.outside.exec(t, `CREATE TABLE public.messages (id bigint GENERATED ALWAYS AS IDENTITY, key text NOT NULL)`)
}

// openOutside connects in a way that the settings of the database, which a fault may change, do not reach.
func openOutside(t *testing.T, url string) *bundle {
	t.Helper()
	config, err := pgxpool.ParseConfig(url)
	require.NoError(t, err)
	config.MaxConns = 4
	for name, value := range map[string]string{
		"default_transaction_isolation": "read committed", "default_transaction_read_only": "off", "lock_timeout": "0", "statement_timeout": "0", "role": "none", "application_name": "outside",
	} {
		config.ConnConfig.RuntimeParams[name] = value
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	outside := &bundle{pool: pool, schema: "ratelimit"}
	outside.limiter = outside.with(t, ratelimit.Config{})
	return outside
}

// send is what the application does in a transaction: take, then write.
func (s *stand) send(ctx context.Context, tx pgx.Tx, key string) error {
	if err := s.limiter.WithTx(tx).Require(ctx, calls.For(key)); err != nil {
		return err
	}
	_, err := tx.Exec(ctx, `INSERT INTO public.messages (key) VALUES ($1)`, key)
	return err
}

// takeOutside takes one token in another, finished transaction.
func (s *stand) takeOutside(ctx context.Context, key string) error {
	d, err := s.outside.limiter.Take(ctx, calls.For(key))
	if err != nil {
		return err
	}
	return d.Err()
}

// taken returns how many tokens are missing from all buckets of calls.
func (s *stand) taken(t *testing.T) int {
	t.Helper()
	taken := 0.0
	for _, r := range s.outside.rows(t, "") {
		if r.Name == calls.Name() {
			taken += callsCapacity - r.Value
		}
	}
	return int(math.Round(taken)) // without the fraction that arrived meanwhile
}

func (s *stand) messages(t *testing.T) int {
	t.Helper()
	return s.outside.count(t, `SELECT count(*) FROM public.messages`)
}

func (b *bundle) count(t *testing.T, sql string, arguments ...any) int {
	t.Helper()
	var n int
	require.NoError(t, b.pool.QueryRow(t.Context(), sql, arguments...).Scan(&n))
	return n
}

// requireSent checks that n calls were allowed, each with its token and its message.
func (s *stand) requireSent(t *testing.T, n int) {
	t.Helper()
	require.Equal(t, n, s.taken(t), "tokens taken")
	require.Equal(t, n, s.messages(t), "messages written")
}

// requireHealthy checks that no connection was leaked and that the limiter works on those there are.
func (s *stand) requireHealthy(t *testing.T) {
	t.Helper()
	s.requireIdle(t)
	d, err := s.limiter.Take(t.Context(), calls.For("the next caller"))
	require.NoError(t, err)
	require.True(t, d.Allowed)
	require.NoError(t, s.limiter.InTx(t.Context(), func(tx pgx.Tx) error { return s.send(t.Context(), tx, "the next caller") }))
	s.requireIdle(t)
}

// requireIdle checks that the limiter holds no connection and has left none in a transaction.
func (s *stand) requireIdle(t *testing.T) {
	t.Helper()
	eventually(t, "every connection is back in the pool", func() bool { return s.pool.Stat().AcquiredConns() == 0 })
	eventually(t, "no transaction is left open", func() bool {
		return s.outside.count(t, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
			AND application_name <> 'outside' AND state LIKE 'idle in transaction%'`) == 0
	})
}

// hold locks the row of ada in a transaction outside, until release is called.
func (s *stand) hold(t *testing.T) (release func()) {
	t.Helper()
	tx, err := s.outside.pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), `SELECT FROM ratelimit.buckets WHERE name = $1 AND key = $2 FOR UPDATE`, calls.Name(), "ada")
	require.NoError(t, err)
	released := false
	release = func() {
		if !released {
			released = true
			_ = tx.Rollback(context.WithoutCancel(t.Context()))
		}
	}
	t.Cleanup(release)
	return release
}

// awaitWaiter returns when one session of the database waits for a lock.
func (s *stand) awaitWaiter(t *testing.T) (pid uint32) {
	t.Helper()
	eventually(t, "one session waits for a lock", func() bool {
		pids := s.waiters(t, 20*time.Millisecond)
		if len(pids) != 1 {
			return false
		}
		pid = pids[0]
		return true
	})
	return pid
}

// awaitNoWaiter returns when no session of the database waits for a lock.
func (s *stand) awaitNoWaiter(t *testing.T) {
	t.Helper()
	eventually(t, "no session waits for a lock", func() bool { return len(s.waiters(t, 0)) == 0 })
}

// endWaiters ends the sessions that wait for a lock. After a call that gave up, one may wait on: a cancel request that comes before the
// statement does nothing.
func (s *stand) endWaiters(t *testing.T) {
	t.Helper()
	eventually(t, "no session waits for a lock", func() bool {
		waiters := s.waiters(t, 0)
		for _, pid := range waiters {
			s.outside.exec(t, `SELECT pg_terminate_backend($1)`, pid)
		}
		return len(waiters) == 0
	})
}

// waiters returns the sessions of the database that wait for a lock, in a statement that began so long ago.
func (s *stand) waiters(t *testing.T, since time.Duration) []uint32 {
	t.Helper()
	found, err := s.outside.pool.Query(t.Context(), `SELECT pid FROM pg_stat_activity
		WHERE datname = current_database() AND wait_event_type = 'Lock' AND query_start <= clock_timestamp() - $1::interval`, since)
	require.NoError(t, err)
	pids, err := pgx.CollectRows(found, pgx.RowTo[uint32])
	require.NoError(t, err)
	return pids
}

// awaitEnd returns when the backend has ended.
func (s *stand) awaitEnd(t *testing.T, pid uint32) {
	t.Helper()
	eventually(t, "the backend ends", func() bool {
		return s.outside.count(t, `SELECT count(*) FROM pg_stat_activity WHERE pid = $1`, pid) == 0
	})
}

// terminate ends a backend and returns when it has.
func (s *stand) terminate(ctx context.Context, pid uint32) error {
	var ended bool
	err := s.outside.pool.QueryRow(ctx, `SELECT pg_terminate_backend($1, $2)`, pid, patient.Milliseconds()).Scan(&ended)
	if err == nil && !ended {
		err = fmt.Errorf("backend %d does not end", pid)
	}
	return err
}

// closeGate makes every COMMIT that wrote a message wait at a gate, which stands open only
// while open has been called.
func (s *stand) closeGate(t *testing.T) (open func()) {
	t.Helper()
	s.outside.exec(t, `CREATE FUNCTION public.pass_gate() RETURNS trigger LANGUAGE plpgsql AS
		$$ BEGIN PERFORM pg_advisory_xact_lock_shared(1); RETURN NULL; END $$`)
	s.outside.exec(t, `CREATE CONSTRAINT TRIGGER gate AFTER INSERT ON public.messages
		DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION public.pass_gate()`)
	gate, err := s.outside.pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = gate.Exec(t.Context(), `SELECT pg_advisory_xact_lock(1)`)
	require.NoError(t, err)
	open = func() { _ = gate.Rollback(context.WithoutCancel(t.Context())) }
	t.Cleanup(open)
	return open
}

// sqlstate returns the code of the server's error that err wraps, or "".
func sqlstate(err error) string {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) {
		return pgErr.Code
	}
	return ""
}
