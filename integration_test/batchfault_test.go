package integration_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// If a batch fails for any reason, all of its calls get the error at once, nothing was taken, and the next batch works.
func TestABatchThatFailsRefusesAllOfIt(t *testing.T) {
	t.Parallel()
	for name, fault := range map[string]struct {
		end, code string
	}{
		"BackendKilled":      {"pg_terminate_backend", "57P01"},
		"StatementCancelled": {"pg_cancel_backend", "57014"}, // as a statement_timeout does
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newStand(t)
			first, others, release := s.crowd(t, 6)
			several := ask(t, s.limiter, calls.For("ada"), calls.For("grace"))
			reserving := askFor(t, func(ctx context.Context) (ratelimit.Decision, error) {
				r, err := s.limiter.Reserve(ctx, calls.For("ada"))
				return r.Decision, err
			})
			for _, a := range append([]*asker{first, several, reserving}, others...) {
				eventually(t, "the call fails", func() bool {
					s.outside.exec(t, `SELECT `+fault.end+`(pid) FROM pg_stat_activity
						WHERE datname = current_database() AND wait_event_type = 'Lock'`)
					return a.hasEnded()
				})
				a.requireError(t, isState(fault.code))
			}
			release()
			require.Equal(t, 1, s.taken(t), "what was taken before")
			require.Zero(t, s.outside.count(t, `SELECT count(*) FROM ratelimit.reservations`))
			s.requireHealthy(t)
		})
	}
}

func TestABatchWithoutItsTableFails(t *testing.T) {
	t.Parallel()
	s := newStand(t)
	require.NoError(t, s.takeOutside(t.Context(), "ada"))
	rename, err := s.outside.pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = rename.Exec(t.Context(), `ALTER TABLE ratelimit.buckets RENAME TO elsewhere`)
	require.NoError(t, err)
	var askers []*asker
	for range 6 {
		askers = append(askers, ask(t, s.limiter, calls.For("ada")))
	}
	s.awaitWaiter(t)
	require.NoError(t, rename.Commit(t.Context()))
	for _, a := range askers {
		a.requireError(t, isError(ratelimit.ErrNotMigrated))
	}
	s.outside.exec(t, `ALTER TABLE ratelimit.elsewhere RENAME TO buckets`)
	require.Equal(t, 1, s.taken(t))
	s.requireHealthy(t)
}

// An application that takes in a transaction, in another order than calls lock in, cannot deadlock with calls outside of it. These
// take from both buckets, or share a batch with calls for the other.
func TestABatchIsPartOfNoDeadlock(t *testing.T) {
	t.Parallel()
	s := newStand(t)
	heal := s.setDefault(t, "deadlock_timeout", "50ms") // Postgres ends one of those in a deadlock with an error
	defer heal()
	const rounds = 5
	for round := range rounds {
		tx := s.begin(t, pgx.ReadCommitted)
		bound := s.limiter.WithTx(tx)
		_, err := bound.Take(t.Context(), calls.For("z")) // makes the row in the first round
		require.NoError(t, err)
		both := ask(t, s.limiter, calls.For("a"), calls.For("z"))
		s.awaitWaiter(t)
		behind := ask(t, s.limiter, calls.For("z"))
		ask(t, s.limiter, calls.For("a")).requireAllowed(t)
		_, err = bound.Take(t.Context(), calls.For("a"))
		require.NoError(t, err, "round %d", round)
		both.requireWaits(t)
		behind.requireWaits(t)
		require.NoError(t, tx.Commit(t.Context()))
		both.requireAllowed(t)
		behind.requireAllowed(t)
	}
	require.Equal(t, 6*rounds, s.taken(t))
	s.requireHealthy(t)
}

// The application's own transactions have all connections, and batched calls wait for one, each as long as
// its caller does.
func TestBatchedCallsWaitForAConnection(t *testing.T) {
	t.Parallel()
	s := newStand(t, oneConnection)
	tx, err := s.pool.Begin(t.Context())
	require.NoError(t, err)
	patient := make([]*asker, 5)
	for i := range patient {
		patient[i] = ask(t, s.limiter, calls.For("ada"))
	}
	for _, key := range []string{"ada", "grace"} {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		_, err := s.limiter.Take(ctx, calls.For(key))
		cancel()
		require.ErrorIs(t, err, context.DeadlineExceeded)
	}
	for _, a := range patient {
		a.requireWaits(t)
	}
	require.NoError(t, tx.Rollback(t.Context()))
	for _, a := range patient {
		a.requireAllowed(t)
	}
	require.Equal(t, len(patient), s.taken(t))
	s.requireHealthy(t)
}

// A call whose context has ended gets that error; calls at the same time do not.
func TestCallersWithEndedContextsHarmNobody(t *testing.T) {
	t.Parallel()
	const callers, each = 32, 20
	s := newStand(t)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	require.NoError(t, atonce.Do(callers, func(caller int) error {
		for i := range each {
			switch caller % 4 {
			case 0:
				if _, err := s.limiter.Take(ended, calls.For("ada")); !errors.Is(err, context.Canceled) {
					return fmt.Errorf("with an ended context: %w", err)
				}
			case 1: // it ends at some time during the call, so it is unknown whether the call took
				ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i*50)*time.Microsecond)
				_, err := s.limiter.Take(ctx, calls.For("grace"))
				cancel()
				if err != nil && !errors.Is(err, context.DeadlineExceeded) {
					return err
				}
			default:
				if d, err := s.limiter.Take(t.Context(), calls.For("ada")); err != nil || !d.Allowed {
					return fmt.Errorf("without an end: %+v, %w", d, err)
				}
			}
		}
		return nil
	}))
	require.InDelta(t, callsCapacity-callers/2*each, s.outside.row(t, calls.Name(), "ada").Value, 1e-3)
	s.requireHealthy(t)
}
