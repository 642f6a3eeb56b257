package integration_test

import (
	"context"
	"fmt"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// exits are the ways in which a hook of the application ends the goroutine that runs it.
var exits = map[string]func(){
	"Panic":  func() { panic("out of cheese") },
	"Goexit": runtime.Goexit,
}

// ended runs call on a goroutine that may end in it, and reports whether it did.
func ended(call func()) bool {
	returned := false
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer func() { _ = recover() }()
		call()
		returned = true
	}()
	<-done
	return !returned
}

// requireNothingOpen checks that no connection is lent, and no session in a transaction.
func (b *bundle) requireNothingOpen(t *testing.T) {
	t.Helper()
	require.Zero(t, b.pool.Stat().AcquiredConns())
	var open int
	require.NoError(t, b.pool.QueryRow(t.Context(), `
		SELECT count(*) FROM pg_stat_activity
		WHERE datname = current_database() AND pid <> pg_backend_pid() AND state LIKE 'idle in transaction%'`).Scan(&open))
	require.Zero(t, open)
}

// A clock that panics, or ends its goroutine, leaves no transaction open, at any of its calls.
func TestAHookThatEndsItsGoroutineLeavesNoTransactionOpen(t *testing.T) {
	t.Parallel()
	const most = 20 // times that a call asks for the time
	b := setup(t)
	for name, call := range map[string]func(ctx context.Context, limiter *ratelimit.Limiter, id, key string) error{
		"Reserve": func(ctx context.Context, limiter *ratelimit.Limiter, _, key string) error {
			_, err := limiter.Reserve(ctx, roomy.For(key), other.For(key))
			return err
		},
		"Settle": func(ctx context.Context, limiter *ratelimit.Limiter, id, key string) error {
			return limiter.Settle(ctx, id, roomy.For(key).Cost(3))
		},
		"Cancel": func(ctx context.Context, limiter *ratelimit.Limiter, id, _ string) error {
			return limiter.Cancel(ctx, id)
		},
		"Renew": func(ctx context.Context, limiter *ratelimit.Limiter, id, _ string) error {
			_, err := limiter.Renew(ctx, id)
			return err
		},
		"ShardedTake": func(ctx context.Context, limiter *ratelimit.Limiter, _, key string) error {
			_, err := limiter.Take(ctx, wide.For(key).Cost(wide.Capacity()/2))
			return err
		},
		"ShardedCharge": func(ctx context.Context, limiter *ratelimit.Limiter, _, key string) error {
			return limiter.Charge(ctx, wide.For(key))
		},
		"Prune": func(ctx context.Context, limiter *ratelimit.Limiter, _, _ string) error {
			_, err := limiter.Prune(ctx, roomy)
			return err
		},
		"InTx": func(ctx context.Context, limiter *ratelimit.Limiter, _, key string) error {
			return limiter.InTx(ctx, func(tx pgx.Tx) error {
				_, err := limiter.WithTx(tx).Take(ctx, roomy.For(key), other.For(key))
				return err
			})
		},
	} {
		for exit, end := range exits {
			t.Run(name+exit, func(t *testing.T) { // not parallel: they share the pool
				finished := false
				for nth := int64(1); !finished && nth <= most; nth++ {
					key := fmt.Sprint(t.Name(), nth)
					r, err := b.limiter.Reserve(t.Context(), roomy.For(key))
					require.NoError(t, err)
					var asked atomic.Int64
					limiter := b.with(t, ratelimit.Config{AsOf: func() time.Time {
						if asked.Add(1) == nth {
							end()
						}
						return time.Now()
					}})
					finished = !ended(func() { err = call(t.Context(), limiter, r.ID, key) })
					if err != nil && strings.Contains(err.Error(), "the goroutine of the batch has exited") {
						finished, err = false, nil // it was not the caller's
					}
					require.NoError(t, err)
					b.requireNothingOpen(t)
				}
				require.True(t, finished, "a call asks for the time fewer than %d times", most)
			})
		}
	}
}

// trap is a tracer that ends the goroutine once, at a statement.
type trap struct {
	at    string
	end   func()
	armed atomic.Bool
}

func (h *trap) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	if data.SQL == h.at && h.armed.CompareAndSwap(true, false) {
		h.end()
	}
	return ctx
}

func (h *trap) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func (h *trap) TraceBatchStart(ctx context.Context, conn *pgx.Conn, data pgx.TraceBatchStartData) context.Context {
	for _, q := range data.Batch.QueuedQueries {
		h.TraceQueryStart(ctx, conn, pgx.TraceQueryStartData{SQL: q.SQL})
	}
	return ctx
}

func (h *trap) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}

func (h *trap) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}

// A tracer may panic at COMMIT, too, which then was not sent.
func TestATracerThatEndsTheGoroutineAtCommitLeavesNoTransactionOpen(t *testing.T) {
	t.Parallel()
	for exit, end := range exits {
		t.Run(exit, func(t *testing.T) {
			t.Parallel()
			hook := &trap{at: "commit", end: end}
			b := setup(t, func(c *pgxpool.Config) { c.ConnConfig.Tracer = hook })
			for name, call := range map[string]func(){
				"Reserve": func() { _, _ = b.limiter.Reserve(t.Context(), roomy.For("key")) },
				"InTx": func() {
					_ = b.limiter.InTx(t.Context(), func(tx pgx.Tx) error {
						_, err := b.limiter.WithTx(tx).Take(t.Context(), roomy.For("key"))
						return err
					})
				},
			} {
				hook.armed.Store(true)
				require.True(t, ended(call), name)
				b.requireNothingOpen(t)
				require.Empty(t, b.rows(t, "key"), name)
			}
		})
	}
}
