package integration_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/internal/pgerr"
	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// writes are the calls that change rows. All want the row of ada.
var writes = map[string]verb{
	"Take":        taking(calls.For("ada")),
	"TakeSeveral": taking(calls.For("grace"), calls.For("ada")),
	"Reserve":     reserving(calls.For("ada")),
	"Reset":       resetting(calls.For("ada")),
	"InTx":        inTx(taking(calls.For("ada"))),
	"InTxSeveral": inTx(taking(calls.For("grace"), calls.For("ada"))),

	"TakeSharded":        taking(shardedCalls.For("ada"), calls.For("ada")),
	"TakeFromAllShards":  taking(calls.For("ada"), shardedCalls.For("ada").Cost(callsCapacity)),
	"InTxSharded":        inTx(taking(shardedCalls.For("ada"), calls.For("ada"))),
	"ReserveSharded":     reserving(calls.For("ada"), shardedCalls.For("ada")),
	"ReserveOwedSharded": reserving(calls.For("ada"), shardedCalls.For("ada").Cost(2*callsCapacity)),
}

// reads are the calls that change nothing.
var reads = map[string]verb{
	"Check": checking(calls.For("ada")),
	"Value": valuing(calls.For("ada")),
}

// inTx is the call in a transaction of the limiter's.
func inTx(call verb) verb {
	return func(ctx context.Context, limiter *ratelimit.Limiter) (allowed bool, err error) {
		err = limiter.InTx(ctx, func(tx pgx.Tx) error {
			allowed, err = call(ctx, limiter.WithTx(tx))
			return err
		})
		return allowed, err
	}
}

// requireClosed checks that each of the calls fails in the way that is wanted and that nothing was written.
func (s *stand) requireClosed(t *testing.T, verbs map[string]verb, patience time.Duration, want func(error) bool) {
	t.Helper()
	before := s.outside.rows(t, "")
	for name, call := range verbs {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		allowed, err := call(ctx, s.limiter)
		cancel()
		require.Error(t, err, name)
		require.False(t, allowed && name != "Reset", name)
		require.NotErrorIs(t, err, ratelimit.ErrLimited, name)
		require.NotErrorIs(t, err, ratelimit.ErrCommitUnknown, name)
		require.True(t, want(err), "%s: %v", name, err)
	}
	require.Equal(t, before, s.outside.rows(t, ""))
}

func isState(code string) func(error) bool {
	return func(err error) bool { return sqlstate(err) == code }
}

// setDefault changes a setting for the sessions that the limiter begins from now on.
func (s *stand) setDefault(t *testing.T, name, value string) (reset func()) {
	t.Helper()
	alter := func(change string) {
		var database string
		require.NoError(t, s.outside.pool.QueryRow(t.Context(), `SELECT current_database()`).Scan(&database))
		s.outside.exec(t, fmt.Sprintf("ALTER DATABASE %s %s", pgx.Identifier{database}.Sanitize(), change))
		s.pool.Reset()
	}
	alter(fmt.Sprintf("SET %s = '%s'", name, value))
	return func() { alter("RESET " + name) }
}

// If the database or the pool fails in any way below, a call returns an error, takes nothing, and leaves no connection
// behind. When the fault ends, calls work again.
func TestCallsFailClosed(t *testing.T) {
	t.Parallel()
	isDeadline := func(err error) bool { return errors.Is(err, context.DeadlineExceeded) }
	isRefused := func(err error) bool { return errors.Is(err, syscall.ECONNREFUSED) }
	setting := func(name, value string) func(*testing.T, *stand) func() {
		return func(t *testing.T, s *stand) func() { t.Helper(); return s.setDefault(t, name, value) }
	}
	for name, fault := range map[string]struct {
		cause    func(t *testing.T, s *stand) (heal func())
		patience time.Duration
		writes   func(error) bool
		reads    func(error) bool // nil: they work
	}{
		"ReadOnlyByDefault":  {setting("default_transaction_read_only", "on"), patient, isState("25006"), nil},
		"MayNotWrite":        {setting("role", "pg_read_all_data"), patient, isState("42501"), nil},
		"MayNotUseTheSchema": {setting("role", "pg_monitor"), patient, isState("42501"), isState("42501")},
		"LockTimeout": {func(t *testing.T, s *stand) func() {
			t.Helper()
			heal, release := s.setDefault(t, "lock_timeout", "20ms"), s.hold(t)
			return func() { release(); heal() }
		}, patient, isState("55P03"), nil},
		"Cancelled": {func(t *testing.T, s *stand) func() { // as a statement_timeout does
			t.Helper()
			ctx, stop := context.WithCancel(t.Context())
			release, cancelling := s.hold(t), sync.WaitGroup{}
			cancelling.Go(func() {
				for ctx.Err() == nil {
					_, err := s.outside.pool.Exec(t.Context(), `SELECT pg_cancel_backend(pid) FROM pg_stat_activity
						WHERE datname = current_database() AND wait_event_type = 'Lock'`)
					assert.NoError(t, err)
				}
			})
			return func() { stop(); cancelling.Wait(); release() }
		}, patient, isState("57014"), nil},
		"PoolExhausted": {func(t *testing.T, s *stand) func() {
			t.Helper()
			conn, err := s.pool.Acquire(t.Context())
			require.NoError(t, err)
			return conn.Release
		}, brief, isDeadline, isDeadline},
		"ServerDown": {func(t *testing.T, s *stand) func() {
			t.Helper()
			healthy := s.limiter
			s.limiter = world.Open(t, s.pool.Config().ConnString(), func(c *pgxpool.Config) { c.ConnConfig.Port = 1 }).Limiter
			return func() { s.limiter = healthy }
		}, patient, isRefused, isRefused},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newStand(t, oneConnection)
			require.NoError(t, s.takeOutside(t.Context()))
			heal := fault.cause(t, s)
			s.requireClosed(t, writes, fault.patience, fault.writes)
			if fault.reads != nil {
				s.requireClosed(t, reads, fault.patience, fault.reads)
			} else {
				for name, read := range reads {
					require.NoError(t, errOf(read(t.Context(), s.limiter)), "%s needs no lock and no right to write", name)
				}
			}
			heal()
			s.requireHealthy(t)
		})
	}
}

func TestWithTxUsesOnlyTheCallersConnection(t *testing.T) {
	t.Parallel()
	s := newStand(t, oneConnection)
	tx := s.begin(t, pgx.ReadCommitted)
	acquired, bound := s.pool.Stat().AcquireCount(), s.limiter.WithTx(tx)
	r, err := bound.Reserve(t.Context(), calls.For("ada"))
	require.NoError(t, err)
	for name, call := range everyCall {
		if err := call(t.Context(), bound, r.ID, calls.For("ada")); name != "Prune" && !errors.Is(err, ratelimit.ErrReservationEnded) {
			require.NoError(t, err, name)
		}
	}
	takeOne(t, bound, tight.For("ada"))
	require.ErrorIs(t, bound.Require(t.Context(), roomy.For("ada"), tight.For("ada")), ratelimit.ErrLimited)
	require.Equal(t, acquired, s.pool.Stat().AcquireCount())
	require.NoError(t, tx.Commit(t.Context()))
	s.requireHealthy(t)
}

// requireOnePrefix checks that the text of an error says once where it comes from.
func requireOnePrefix(t *testing.T, err, want error, name string) {
	t.Helper()
	require.ErrorIs(t, err, want, name)
	require.Equal(t, 1, strings.Count(err.Error(), "ratelimit: "), "%s: %v", name, err)
	require.True(t, strings.HasPrefix(err.Error(), "ratelimit: "), "%s: %v", name, err)
}

func TestErrorsNameTheirPackageOnce(t *testing.T) {
	t.Parallel()
	b := setup(t)
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	closed, unmade := b.with(t, ratelimit.Config{}), b.with(t, ratelimit.Config{Schema: "unmade"})
	release := b.holdKey(t, roomy.For("held"), true)
	waits := ask(t, closed, roomy.For("held"))
	eventually(t, "the call waits", func() bool { return waiting(t, b.pool) == 1 })
	requireOnePrefix(t, closed.Close(cancelled), context.Canceled, "Close")
	release()
	requireAllAllowed(t, waits)
	require.NoError(t, closed.Close(t.Context()))
	expired, stop := context.WithTimeout(t.Context(), 0)
	stop()
	settled, err := b.limiter.Reserve(t.Context(), roomy.For("key"))
	require.NoError(t, err)
	require.NoError(t, closed.Settle(t.Context(), settled.ID), "what is under way can be ended")
	require.NoError(t, errOf(inTx(taking(roomy.For("key")))(t.Context(), closed)))
	for name, call := range everyCall {
		requireOnePrefix(t, call(t.Context(), unmade, unknownID, roomy.For("key")), ratelimit.ErrNotMigrated, name)
		requireOnePrefix(t, call(cancelled, b.limiter, unknownID, roomy.For("key")), context.Canceled, name)
		requireOnePrefix(t, call(expired, b.limiter, unknownID, roomy.For("key")), context.DeadlineExceeded, name)
		requireOnePrefix(t, call(t.Context(), &ratelimit.Limiter{}, unknownID, roomy.For("key")), ratelimit.ErrInvalidConfig, name)
		switch name {
		case "Take", "TakeSeveral", "Check", "Value", "Reserve":
			requireOnePrefix(t, call(t.Context(), closed, "", roomy.For("key")), ratelimit.ErrClosed, name)
			fallthrough
		case "Reset", "Credit", "CreditTaken", "Charge":
			requireOnePrefix(t, call(t.Context(), b.limiter, "", roomy.For("")), ratelimit.ErrInvalidKey, name)
		case "Settle":
			requireOnePrefix(t, call(t.Context(), b.limiter, settled.ID, roomy.For("")), ratelimit.ErrInvalidKey, name)
			requireOnePrefix(t, call(t.Context(), b.limiter, "nonsense", roomy.For("key")), ratelimit.ErrNotReserved, name)
		case "Cancel":
			requireOnePrefix(t, call(t.Context(), b.limiter, settled.ID, roomy.For("key")), ratelimit.ErrReservationEnded, name)
			fallthrough
		case "Start", "Started", "Renew":
			requireOnePrefix(t, call(t.Context(), b.limiter, unknownID, roomy.For("key")), ratelimit.ErrNotReserved, name)
		}
	}
}

// A call that needs a missing function says so, takes nothing, also in a transaction of the caller, and works after the
// next Up.
func TestAMissingFunction(t *testing.T) {
	t.Parallel()
	b := setup(t)
	functions, err := migrations.Functions(migrations.Config{})
	require.NoError(t, err)
	r, err := b.limiter.Reserve(t.Context(), roomy.For("key"))
	require.NoError(t, err)
	requireAllowed(t, taking(roomy.For("key")), b.limiter)
	calls := maps.Clone(everyCall)
	calls["InTx"] = func(ctx context.Context, limiter *ratelimit.Limiter, id string, request ratelimit.Request) error {
		return limiter.InTx(ctx, func(tx pgx.Tx) error { return limiter.WithTx(tx).Require(ctx, request) })
	}
	numbered := regexp.MustCompile(`_[0-9]+$`) // which programs call
	for _, f := range functions {
		if numbered.MatchString(f.Name) {
			b.exec(t, "DROP FUNCTION ratelimit."+f.Name)
		}
	}
	for name, call := range calls {
		before := b.rows(t, "")
		err := call(t.Context(), b.limiter, r.ID, roomy.For("key"))
		if err == nil || errors.Is(err, ratelimit.ErrReservationEnded) {
			continue // it calls none
		}
		requireOnePrefix(t, err, ratelimit.ErrNotMigrated, name)
		require.Equal(t, pgerr.UndefinedFunction, sqlstate(err), name)
		require.Equal(t, before, b.rows(t, ""), name)
	}
	require.NoError(t, migrations.Up(t.Context(), b.pool, migrations.Config{}))
	for name, call := range calls {
		if err := call(t.Context(), b.limiter, r.ID, roomy.For("key")); !errors.Is(err, ratelimit.ErrReservationEnded) {
			require.NoError(t, err, name)
		}
	}
}

// The error for a role without privileges names them, and with these every call works.
func TestAMissingGrantIsNamed(t *testing.T) {
	t.Parallel()
	const role = "pg_monitor" // a role that every server has, without privileges on tables; grants belong to the database
	b := setup(t)
	requireAllowed(t, taking(roomy.For("other")), b.limiter) // or there is nothing to prune
	config := b.pool.Config()
	config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error { return errOf(conn.Exec(ctx, `SET ROLE `+role)) }
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	defer pool.Close()
	limiter, err := ratelimit.New(pool, ratelimit.Config{})
	require.NoError(t, err)

	for _, grant := range []string{`GRANT USAGE ON SCHEMA ratelimit TO `, ``} { // none, the first of two, both
		for name, call := range everyCall {
			err := call(t.Context(), limiter, unknownID, roomy.For("key"))
			require.Equal(t, "42501", sqlstate(err), "%s: %v", name, err)
			require.ErrorContains(t, err, `on schema "ratelimit" the role needs USAGE, and SELECT, INSERT, UPDATE and DELETE on its tables buckets, leases and reservations, and SELECT, INSERT and UPDATE on fingerprint, and EXECUTE on its functions`, name)
		}
		if grant != "" {
			b.exec(t, grant+role)
		}
	}
	b.exec(t, `GRANT SELECT, INSERT, UPDATE, DELETE ON ratelimit.buckets, ratelimit.leases, ratelimit.reservations TO `+role)
	b.exec(t, `GRANT SELECT, INSERT ON ratelimit.fingerprint TO `+role)
	b.exec(t, `GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA ratelimit TO `+role)
	r, err := limiter.Reserve(t.Context(), roomy.For("key"))
	require.NoError(t, err)
	for name, call := range everyCall {
		if err := call(t.Context(), limiter, r.ID, roomy.For("key")); !errors.Is(err, ratelimit.ErrReservationEnded) {
			require.NoError(t, err, name)
		}
	}
}

// The error of a read-only session says where to connect, and the pool closes its connections, except a connection with
// a caller's transaction.
func TestAReadOnlyServerIsReportedAndItsConnectionsAreClosed(t *testing.T) {
	t.Parallel()
	became := 0 // sessions, of which the first is on a server that became read-only
	b := setup(t, func(c *pgxpool.Config) {
		c.MaxConns = 1
		c.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
			if became++; became > 1 {
				return nil
			}
			_, err := conn.Exec(ctx, `SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY`)
			return err
		}
	})
	tx := b.begin(t, pgx.ReadCommitted)
	_, err := b.limiter.WithTx(tx).Take(t.Context(), roomy.For("key"))
	require.Equal(t, "25006", sqlstate(err))
	require.False(t, tx.Conn().IsClosed())
	require.NoError(t, tx.Rollback(t.Context()))
	require.NoError(t, errOf(b.limiter.Check(t.Context(), roomy.For("key"))))
	require.Equal(t, 1, became)

	_, err = b.limiter.Take(t.Context(), roomy.For("key"))
	require.Equal(t, "25006", sqlstate(err))
	require.ErrorContains(t, err, "target_session_attrs=read-write")
	requireAllowed(t, taking(roomy.For("key")), b.limiter)
	require.Equal(t, 2, became)
}

// A server that is read-only for good is not connected to anew for each call that fails: one search in a second closes
// 16 connections at most.
func TestAReadOnlyServerGetsNoConnectionForEachCall(t *testing.T) {
	t.Parallel()
	const calls = 200
	config, err := pgxpool.ParseConfig(postgrestest.NewDatabase(t))
	require.NoError(t, err)
	var sessions atomic.Int64
	config.MaxConns = 1
	config.ConnConfig.RuntimeParams["default_transaction_read_only"] = "on"
	config.AfterConnect = func(context.Context, *pgx.Conn) error { sessions.Add(1); return nil }
	synctest.Test(t, func(t *testing.T) { // in which all calls are made in one second, as no time passes
		pool, err := pgxpool.NewWithConfig(t.Context(), config)
		require.NoError(t, err)
		t.Cleanup(pool.Close)
		limiter, err := ratelimit.New(pool, ratelimit.Config{})
		require.NoError(t, err)
		began := time.Now()
		for range calls {
			_, err := limiter.Take(t.Context(), roomy.For("key"))
			require.Equal(t, "25006", sqlstate(err))
		}
		require.Less(t, time.Since(began), time.Second)
		require.LessOrEqual(t, sessions.Load(), int64(1+16))
	})
}
