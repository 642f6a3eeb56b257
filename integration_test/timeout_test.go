package integration_test

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// brief is a time that a call which waits for a row does not outlast.
const brief = 50 * time.Millisecond

// A call on the pool's Limiter in a transaction that holds its row waits for itself. It comes back all the same, with
// what to do about it, and has done nothing.
func TestACallThatWaitsForItsOwnTransactionComesBack(t *testing.T) {
	t.Parallel()
	for name, call := range rowWaits {
		for how, end := range map[string]func(t *testing.T, b *bundle) (context.Context, *ratelimit.Limiter){
			"Timeout": func(t *testing.T, b *bundle) (context.Context, *ratelimit.Limiter) {
				t.Helper()
				return context.WithoutCancel(t.Context()), b.with(t, ratelimit.Config{Timeout: brief})
			},
			"Deadline": func(t *testing.T, b *bundle) (context.Context, *ratelimit.Limiter) {
				t.Helper()
				ctx := &expiring{Context: t.Context(), expired: make(chan struct{})}
				apart, err := pgx.ConnectConfig(t.Context(), b.pool.Config().ConnConfig) // calls may use up the pool
				require.NoError(t, err)
				waits := 1 // the sessions of the call: a session cancelled before its statement begins still takes
				if name == "TakeAtOnce" {
					waits = min(atOnce, int(b.pool.Config().MaxConns)-1)
				}
				go func() {
					defer close(ctx.expired)
					defer apart.Close(context.WithoutCancel(t.Context()))
					for t.Context().Err() == nil { // until they wait for a lock
						var do bool
						const ask = `SELECT count(*) >= $1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`
						if apart.QueryRow(t.Context(), ask, waits).Scan(&do) != nil || do {
							return
						}
					}
				}()
				return ctx, b.with(t, ratelimit.Config{Timeout: -1, NoBatching: true})
			},
		} {
			t.Run(name+"/"+how, func(t *testing.T) {
				t.Parallel()
				if how == "Deadline" {
					testsize.Long(t, "a database for each verb, as with a Timeout")
				}
				b := setup(t, func(c *pgxpool.Config) { // a cancel request that comes between two statements ends none
					c.ConnConfig.RuntimeParams["client_connection_check_interval"] = "100ms"
				})
				request := roomy.For("key")
				r, err := b.limiter.Reserve(t.Context(), request)
				require.NoError(t, err)
				before := b.rows(t, "")
				ctx, limiter := end(t, b)

				tx := b.begin(t, pgx.ReadCommitted)
				requireAllowed(t, taking(request), b.limiter.WithTx(tx))
				_, err = b.limiter.WithTx(tx).Started(t.Context(), r.ID)
				require.NoError(t, err)
				err = call(ctx, limiter, r.ID, request)
				require.ErrorIs(t, err, context.DeadlineExceeded)
				if name != "TakeAtOnce" { // which joins several
					requireOnePrefix(t, err, context.DeadlineExceeded, name)
				}
				require.ErrorContains(t, err, "a transaction may hold a row")
				require.ErrorContains(t, err, "WithTx")

				eventually(t, "the statement is given up", func() bool { // also if it has not begun to wait
					return b.waiters(t) == 0 && b.pool.Stat().AcquiredConns() == 1 && b.sessions(t) == int(b.pool.Stat().TotalConns())
				})
				require.NoError(t, tx.Rollback(t.Context()))
				eventually(t, "the connections are idle", func() bool { return b.pool.Stat().AcquiredConns() == 0 })
				require.Equal(t, before, b.rows(t, ""))
			})
		}
	}
}

// waiters returns how many sessions wait for a lock.
func (b *bundle) waiters(t *testing.T) (n int) {
	t.Helper()
	require.NoError(t, b.pool.QueryRow(t.Context(), `
		SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`).Scan(&n))
	return n
}

// sessions returns the number of sessions of the database. It exceeds the pool's connections while the server has not ended a
// closed one.
func (b *bundle) sessions(t *testing.T) (n int) {
	t.Helper()
	require.NoError(t, b.pool.QueryRow(t.Context(), `
		SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND backend_type = 'client backend'`).Scan(&n))
	return n
}

// The first call of a Limiter compares the fingerprint of the secret, in the time of the call. If that uses up the time, the error
// is the same as for a call whose time ended later.
func TestTimeThatTheFingerprintUsesUp(t *testing.T) {
	t.Parallel()
	slow := &slowFingerprint{}
	b := setup(t, func(c *pgxpool.Config) { c.ConnConfig.Tracer = slow })
	r, err := b.limiter.Reserve(t.Context(), roomy.For("key"))
	require.NoError(t, err)
	before := b.rows(t, "")
	slow.on.Store(true)
	err = b.with(t, ratelimit.Config{Timeout: brief}).Settle(t.Context(), r.ID, roomy.For("key").Cost(9))
	require.ErrorIs(t, err, context.DeadlineExceeded)
	requireOnePrefix(t, err, context.DeadlineExceeded, "Settle")
	require.ErrorContains(t, err, "a transaction may hold a row")
	require.ErrorContains(t, err, r.ID)
	require.Equal(t, before, b.rows(t, ""))
}

// slowFingerprint holds the end of the statement that reads the fingerprint up until the time of its context ends.
type slowFingerprint struct{ on atomic.Bool }

type fingerprintStatement struct{}

func (*slowFingerprint) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	return context.WithValue(ctx, fingerprintStatement{}, strings.Contains(data.SQL, `"fingerprint"`))
}

func (s *slowFingerprint) TraceQueryEnd(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryEndData) {
	if ours, _ := ctx.Value(fingerprintStatement{}).(bool); ours && s.on.Load() {
		<-ctx.Done()
	}
}

// Config.Timeout is for calls outside a transaction: a transaction has the deadline of its context.
func TestTimeoutIsNotForTransactions(t *testing.T) {
	t.Parallel()
	onEach(t, testTimeoutIsNotForTransactions, onPostgres, inMemory)
}

func testTimeoutIsNotForTransactions(t *testing.T, on backend) {
	b := on.setup(t)
	limiter := b.with(t, ratelimit.Config{Timeout: time.Nanosecond})
	_, err := limiter.Take(t.Context(), roomy.For("key"))
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.NoError(t, limiter.InTx(t.Context(), func(tx pgx.Tx) error {
		_, err := limiter.WithTx(tx).Take(t.Context(), roomy.For("key"))
		return err
	}))
	require.InDelta(t, roomy.Capacity()-1, b.row(t, roomy.Name(), "key").Value, 1e-3)
}
