package ratelimit

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit/event"
)

// stalled is a pool whose statements end with their contexts only. If it begins, BEGIN is answered, and the comparison
// of secrets.
type stalled struct {
	answering
	begins bool
	ends   []time.Time // of statements
	mu     sync.Mutex  // guards ends
}

func (s *stalled) Query(ctx context.Context, sql string, arguments ...any) (pgx.Rows, error) {
	if s.begins && len(arguments) == 2 {
		return (&answering{}).Query(ctx, sql, arguments...)
	}
	return nil, s.stall(ctx)
}

func (s *stalled) stall(ctx context.Context) error {
	<-ctx.Done()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ends = append(s.ends, time.Now())
	return ctx.Err()
}

func (s *stalled) Exec(ctx context.Context, _ string, _ ...any) (tag pgconn.CommandTag, err error) {
	return tag, s.stall(ctx)
}

func (s *stalled) SendBatch(ctx context.Context, _ *pgx.Batch) pgx.BatchResults {
	return failedBatch{err: s.stall(ctx)}
}

func (s *stalled) BeginTx(ctx context.Context, _ pgx.TxOptions) (pgx.Tx, error) {
	if s.begins {
		return &stalledTx{stalled: s}, nil
	}
	<-ctx.Done()
	return nil, ctx.Err()
}

type stalledTx struct {
	endingTx
	*stalled
}

func (tx *stalledTx) Begin(context.Context) (pgx.Tx, error) { return tx, nil }
func (tx *stalledTx) Conn() *pgx.Conn                       { return nil }
func (tx *stalledTx) Exec(ctx context.Context, sql string, arguments ...any) (pgconn.CommandTag, error) {
	return tx.stalled.Exec(ctx, sql, arguments...)
}

func (tx *stalledTx) Query(ctx context.Context, sql string, arguments ...any) (pgx.Rows, error) {
	return tx.stalled.Query(ctx, sql, arguments...)
}

func (tx *stalledTx) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	return tx.stalled.SendBatch(ctx, b)
}

type failedBatch struct {
	pgx.BatchResults
	err error
}

func (b failedBatch) Query() (pgx.Rows, error)                 { return nil, b.err }
func (b failedBatch) Exec() (tag pgconn.CommandTag, err error) { return tag, b.err }
func (b failedBatch) QueryRow() pgx.Row                        { return failedRow{b.err} }
func (b failedBatch) Close() error                             { return b.err }

type failedRow struct{ err error }

func (r failedRow) Scan(...any) error { return r.err }

// TestCallersThatLeaveAStalledDatabaseAreReported promises one Failed for each call whose caller leaves, with the time
// that it waited, for every verb. A Take of the same bucket waits in a batch.
func TestCallersThatLeaveAStalledDatabaseAreReported(t *testing.T) {
	t.Parallel()
	limit, slots := Define("limit", PerMinute(10)), Define("slots", Concurrency{Slots: 2})
	request := limit.For("ada")
	lease, err := StoredLeaseID(slots.ForStoredKey("ada"), 1)
	require.NoError(t, err)
	const reservation = "0198c0de-0000-7000-8000-000000000000"
	inTx := func(use func(ctx context.Context, l *Limiter, tx pgx.Tx) error) func(context.Context, *Limiter) error {
		return func(ctx context.Context, l *Limiter) error {
			return l.InTx(ctx, func(tx pgx.Tx) error { return use(ctx, l, tx) })
		}
	}
	for name, c := range map[string]struct {
		verb, limit string
		begins      bool
		call        func(ctx context.Context, l *Limiter) error
	}{
		"take":         {"take", "limit", true, func(ctx context.Context, l *Limiter) error { return l.Require(ctx, request) }},
		"check":        {"check", "limit", true, func(ctx context.Context, l *Limiter) error { _, err := l.Check(ctx, request); return err }},
		"value":        {"value", "limit", true, func(ctx context.Context, l *Limiter) error { _, err := l.Value(ctx, request); return err }},
		"reserve":      {"reserve", "limit", true, func(ctx context.Context, l *Limiter) error { _, err := l.Reserve(ctx, request); return err }},
		"acquire":      {"acquire", "slots", true, func(ctx context.Context, l *Limiter) error { _, err := l.Acquire(ctx, slots.For("ada")); return err }},
		"hold":         {"acquire", "slots", true, func(ctx context.Context, l *Limiter) error { return l.Hold(ctx, nil, slots.For("ada")) }},
		"release":      {"release", "slots", true, func(ctx context.Context, l *Limiter) error { return l.Release(ctx, lease) }},
		"renew lease":  {"renew_lease", "slots", true, func(ctx context.Context, l *Limiter) error { _, err := l.RenewLease(ctx, lease); return err }},
		"credit":       {"credit", "limit", true, func(ctx context.Context, l *Limiter) error { return l.Credit(ctx, request) }},
		"credit taken": {"credit_taken", "limit", true, func(ctx context.Context, l *Limiter) error { return l.CreditTaken(ctx, time.Now(), request) }},
		"charge until": {"charge_until", "limit", true, func(ctx context.Context, l *Limiter) error {
			_, err := l.ChargeUntil(ctx, time.Now(), request)
			return err
		}},
		"charge": {"charge", "limit", true, func(ctx context.Context, l *Limiter) error { return l.Charge(ctx, request) }},
		"reset":  {"reset", "limit", true, func(ctx context.Context, l *Limiter) error { return l.Reset(ctx, request) }},
		"cancel": {"cancel", "", true, func(ctx context.Context, l *Limiter) error { return l.Cancel(ctx, reservation) }},
		"begin":  {"transaction", "", false, inTx(nil)},
		"take in a transaction": {"take", "limit", true, inTx(func(ctx context.Context, l *Limiter, tx pgx.Tx) error {
			return l.WithTx(tx).Require(ctx, request)
		})},
		"own statement in a transaction": {"transaction", "", true, inTx(func(ctx context.Context, _ *Limiter, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, "")
			return err
		})},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				heard := &heardEvents{}
				limiter, err := New(&stalled{begins: c.begins}, Config{Observer: heard, Timeout: time.Minute})
				require.NoError(t, err)
				ctx, leave := context.WithCancel(t.Context())
				const callers = 2
				errs := make(chan error, callers)
				for range callers {
					go func() { errs <- c.call(ctx, limiter) }()
				}
				time.Sleep(500 * time.Millisecond)
				leave()
				for range callers {
					require.ErrorIs(t, <-errs, context.Canceled)
				}
				var failed []event.Failed
				for _, e := range heard.events {
					if e, ok := e.(event.Failed); ok {
						failed = append(failed, e)
					}
				}
				require.Len(t, failed, callers)
				for _, e := range failed {
					require.Equal(t, c.verb, e.Verb)
					require.Equal(t, c.limit, e.Limit)
					require.GreaterOrEqual(t, e.Elapsed, 500*time.Millisecond) // and a rollback may stall, too
					require.ErrorIs(t, e.Err, context.Canceled)
				}
				time.Sleep(time.Minute) // a call that takes slots goes on without its caller
			})
		})
	}
}

// TestAcquireReturnsAtItsTimeout promises that a call that takes slots returns after Config.Timeout, also beside calls
// that came later. Its statement goes on for a second, because it may have taken the slots, which are then released.
func TestAcquireReturnsAtItsTimeout(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		pool := &stalled{begins: true}
		limiter, err := New(pool, Config{Timeout: time.Minute})
		require.NoError(t, err)
		began, slots := time.Now(), Define("slots", Concurrency{Slots: 2}).For("ada")
		errs := make(chan error, 6)
		last := 50 * time.Second // it's in a batch with the one before
		for _, after := range []time.Duration{0, 20 * time.Second, last} {
			for _, ctx := range []context.Context{t.Context(), context.Background()} {
				time.AfterFunc(after, func() {
					_, err := limiter.Acquire(ctx, slots)
					assert.Equal(t, after+time.Minute, time.Since(began))
					errs <- err
				})
			}
		}
		time.Sleep(time.Hour)
		synctest.Wait()
		for range cap(errs) {
			require.ErrorIs(t, <-errs, context.DeadlineExceeded)
		}
		require.NotEmpty(t, pool.ends)
		require.Equal(t, last+time.Minute+leaveGrace, pool.ends[len(pool.ends)-1].Sub(began))
	})
}

// TestLostConnectionsAreNoConflicts promises that a transaction that cannot begin reports a Failed, and no conflict.
func TestLostConnectionsAreNoConflicts(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		heard := &heardEvents{}
		limiter, err := New(&beginningPool{Pool: &answering{}, err: &pgconn.ConnectError{}}, Config{Observer: heard})
		require.NoError(t, err)
		require.Error(t, limiter.InTx(t.Context(), func(pgx.Tx) error { return nil }))
		require.Len(t, heard.events, 1)
		require.IsType(t, event.Failed{}, heard.events[0])
	})
}

// TestTransactionsAreReported promises a Transacted for a transaction that its function commits or rolls back.
func TestTransactionsAreReported(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		heard := &heardEvents{}
		limiter, err := New(&beginningPool{Pool: &answering{}, tx: &endingTx{}}, Config{Observer: heard})
		require.NoError(t, err)
		began := time.Now()
		require.NoError(t, limiter.InTx(t.Context(), func(pgx.Tx) error { time.Sleep(time.Second); return nil }))
		require.ErrorIs(t, limiter.InTx(t.Context(), func(pgx.Tx) error { return ErrNotReserved }), ErrNotReserved)
		require.Equal(t, []event.Event{
			event.Transacted{Committed: true, Attempts: 1, Began: began, Elapsed: time.Second},
			event.Transacted{Attempts: 1, Began: began.Add(time.Second)},
		}, heard.events)
	})
}

// TestErrorsOfContextsSayWhichEnded promises that an error names the limit, and the deadline that passed.
func TestErrorsOfContextsSayWhichEnded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		limiter, err := New(&stalled{begins: true}, Config{Timeout: 3 * time.Second})
		require.NoError(t, err)
		request := Define("limit", PerMinute(10)).For("ada")
		require.ErrorContains(t, limiter.Require(t.Context(), request),
			`ratelimit: take "limit": context deadline exceeded (Config.Timeout, 3s); `)
		bounded, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		require.ErrorContains(t, limiter.Require(bounded, request),
			`ratelimit: take "limit": context deadline exceeded (the deadline of the call's context); `)
		require.EqualError(t, limiter.Require(bounded, request),
			`ratelimit: take "limit": the context ended before the call: context deadline exceeded`)
	})
}

// TestABusyConnectionIsExplained promises that the error of open rows says to close them.
func TestABusyConnectionIsExplained(t *testing.T) {
	t.Parallel()
	limiter, err := New(&answering{}, Config{})
	require.NoError(t, err)
	busy := errors.New("conn busy") // as pgx has it
	require.ErrorContains(t, explained(t.Context(), limiter, "take", busy), "close them before you call the Limiter")
}

// TestPruneReportsItsFailures promises that a Prune that fails is one Failed, also for a program that calls Prune
// itself.
func TestPruneReportsItsFailures(t *testing.T) {
	t.Parallel()
	pool, err := pgxpool.New(t.Context(), "postgres://nobody@127.0.0.1:1/none?sslmode=disable")
	require.NoError(t, err)
	pool.Close()
	heard := &heardEvents{}
	limiter, err := New(pool, Config{Observer: heard})
	require.NoError(t, err)
	_, err = limiter.Prune(t.Context(), Define("limit", PerMinute(10)))
	require.Error(t, err)
	require.Len(t, heard.events, 1)
	failed, is := heard.events[0].(event.Failed)
	require.True(t, is)
	require.Equal(t, "prune", failed.Verb)
	require.Equal(t, err, failed.Err)
}
