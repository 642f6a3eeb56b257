package integration_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
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

// If the database or the pool fails in any of these ways, a call returns an error, takes nothing, and leaves no connection behind. When
// the fault ends, calls work again.
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
			require.NoError(t, s.takeOutside(t.Context(), "ada"))
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

func TestWithTxNeedsNoConnectionButTheCallers(t *testing.T) {
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
