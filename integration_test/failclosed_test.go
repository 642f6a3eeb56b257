package integration_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

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

// cancelWaiters cancels each statement that waits for a lock, until stop.
func (s *stand) cancelWaiters(t *testing.T) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var cancelling sync.WaitGroup
	cancelling.Go(func() {
		for ctx.Err() == nil {
			_, err := s.outside.pool.Exec(context.WithoutCancel(ctx), `SELECT pg_cancel_backend(pid) FROM pg_stat_activity
				WHERE datname = current_database() AND wait_event_type = 'Lock'`)
			if err != nil {
				t.Errorf("cancel: %v", err)
				return
			}
			time.Sleep(time.Millisecond)
		}
	})
	return func() { cancel(); cancelling.Wait() }
}

func isAny(error) bool { return true }

// If the database or the pool fails in any of these ways, a call returns an error, takes nothing, and leaves no connection behind. When
// the fault ends, calls work again.
func TestCallsFailClosed(t *testing.T) {
	t.Parallel()
	isDeadline := func(err error) bool { return errors.Is(err, context.DeadlineExceeded) }
	isNotMigrated := func(err error) bool {
		return errors.Is(err, ratelimit.ErrNotMigrated) && strings.Contains(err.Error(), "migrations.Up") && strings.Contains(err.Error(), `"elsewhere"`)
	}
	setting := func(name, value string) func(*testing.T, *stand) func() {
		return func(t *testing.T, s *stand) func() {
			t.Helper()
			return s.setDefault(t, name, value)
		}
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
			release, stop := s.hold(t), s.cancelWaiters(t)
			return func() { stop(); release() }
		}, patient, isState("57014"), nil},
		"TableMissing": {func(t *testing.T, s *stand) func() {
			t.Helper()
			s.limiter = s.with(t, ratelimit.Config{Schema: "elsewhere"})
			return func() {
				for _, migrate := range []func(context.Context, *pgxpool.Pool, migrations.Config) error{migrations.Up, migrations.Down} {
					require.NoError(t, migrate(t.Context(), s.outside.pool, migrations.Config{Schema: "elsewhere"}))
				}
				s.requireClosed(t, writes, patient, isNotMigrated)
				require.NoError(t, migrations.Up(t.Context(), s.outside.pool, migrations.Config{Schema: "elsewhere"}))
			}
		}, patient, isNotMigrated, isNotMigrated},
		"PoolExhausted": {func(t *testing.T, s *stand) func() {
			t.Helper()
			conn, err := s.pool.Acquire(t.Context())
			require.NoError(t, err)
			return conn.Release
		}, 50 * time.Millisecond, isDeadline, isDeadline},
		"PoolClosed": {func(_ *testing.T, s *stand) func() { s.pool.Close(); return nil }, patient, isAny, isAny},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newStand(t, oneConnection)
			require.NoError(t, s.takeOutside(t.Context(), "ada"))
			heal := fault.cause(t, s)
			s.requireClosed(t, writes, fault.patience, fault.writes)
			if fault.reads != nil {
				s.requireClosed(t, reads, fault.patience, fault.reads)
			} else {
				for name, read := range reads {
					_, err := read(t.Context(), s.limiter)
					require.NoError(t, err, "%s needs no lock and no right to write", name)
				}
			}
			if heal != nil {
				heal()
				s.requireHealthy(t)
			}
		})
	}
}

func TestWithTxNeedsNoConnectionButTheCallers(t *testing.T) {
	t.Parallel()
	s := newStand(t, oneConnection)
	ctx, cancel := context.WithTimeout(t.Context(), patient)
	defer cancel()
	tx, err := s.pool.Begin(ctx)
	require.NoError(t, err)
	acquired := s.pool.Stat().AcquireCount()
	bound := s.limiter.WithTx(tx)

	once := ratelimit.Define("once", hoard(1))
	for range 2 { // the second is refused, and undone
		_, err = bound.Take(ctx, once.For("ada"), calls.For("ada"))
		require.NoError(t, err)
	}
	d, err := bound.Take(ctx, once.For("ada"))
	require.NoError(t, err)
	require.False(t, d.Allowed)
	_, err = bound.Check(ctx, once.For("ada"), calls.For("ada"))
	require.NoError(t, err)
	_, err = bound.Value(ctx, calls.For("ada"))
	require.NoError(t, err)
	_, err = bound.Reserve(ctx, once.For("ada"), calls.For("ada"))
	require.NoError(t, err)
	require.NoError(t, bound.Reset(ctx, once.For("ada"), calls.For("ada")))
	require.Equal(t, acquired, s.pool.Stat().AcquireCount())
	require.NoError(t, tx.Commit(ctx))
	s.requireHealthy(t)
}
