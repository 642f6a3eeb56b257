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
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// leased is a limit on concurrency with more slots than a test takes.
var leased = ratelimit.Define("leased", ratelimit.Concurrency{Most: 100, Lease: time.Hour})

// byCancelRequest makes pgx send a cancel request for a statement whose context ends, as docs/operations.md recommends. pgx closes the
// connection if the server has not answered after patience.
func byCancelRequest(patience time.Duration) func(*pgxpool.Config) {
	return func(c *pgxpool.Config) {
		c.ConnConfig.BuildContextWatcherHandler = func(conn *pgconn.PgConn) ctxwatch.Handler {
			return &pgconn.CancelRequestContextWatcherHandler{Conn: conn, CancelRequestDelay: 10 * time.Millisecond, DeadlineDelay: patience}
		}
	}
}

// givingUp are calls that wait for the locked rows of the key "held". id is a reservation and lease a lease of that key. No two
// callers have the same number.
var givingUp = map[string]func(ctx context.Context, l *ratelimit.Limiter, caller int, id, lease string) error{
	"Take": func(ctx context.Context, l *ratelimit.Limiter, _ int, _, _ string) error {
		_, err := l.Take(ctx, fate.For("held"))
		return err
	},
	"TakeSeveral": func(ctx context.Context, l *ratelimit.Limiter, caller int, _, _ string) error {
		_, err := l.Take(ctx, fate.For("held"), roomy.For(fmt.Sprint(caller)), other.For(fmt.Sprint(caller)))
		return err
	},
	"TakeUpTo": func(ctx context.Context, l *ratelimit.Limiter, _ int, _, _ string) error {
		_, _, err := l.TakeUpTo(ctx, 3, fate.For("held"))
		return err
	},
	"TakeAWindow": func(ctx context.Context, l *ratelimit.Limiter, _ int, _, _ string) error {
		_, err := l.Take(ctx, sliced.For("held"))
		return err
	},
	"Reserve": func(ctx context.Context, l *ratelimit.Limiter, _ int, _, _ string) error {
		_, err := l.Reserve(ctx, fate.For("held"))
		return err
	},
	"ReserveSeveral": func(ctx context.Context, l *ratelimit.Limiter, caller int, _, _ string) error {
		_, err := l.Reserve(ctx, fate.For("held"), roomy.For(fmt.Sprint(caller)))
		return err
	},
	"Settle": func(ctx context.Context, l *ratelimit.Limiter, _ int, id, _ string) error {
		return l.Settle(ctx, id, fate.For("held").Cost(2))
	},
	"Reset": func(ctx context.Context, l *ratelimit.Limiter, _ int, _, _ string) error {
		return l.Reset(ctx, fate.For("held"))
	},
	"ResetSeveral": func(ctx context.Context, l *ratelimit.Limiter, caller int, _, _ string) error {
		return l.Reset(ctx, fate.For("held"), roomy.For(fmt.Sprint(caller)))
	},
	"Credit": func(ctx context.Context, l *ratelimit.Limiter, _ int, _, _ string) error {
		return l.Credit(ctx, fate.For("held"))
	},
	"ChargeSeveral": func(ctx context.Context, l *ratelimit.Limiter, caller int, _, _ string) error {
		return l.Charge(ctx, fate.For("held"), roomy.For(fmt.Sprint(caller)))
	},
	"Acquire": func(ctx context.Context, l *ratelimit.Limiter, _ int, _, _ string) error {
		_, err := l.Acquire(ctx, leased.For("held"))
		return err
	},
	"Release": func(ctx context.Context, l *ratelimit.Limiter, _ int, _, lease string) error {
		return l.Release(ctx, lease)
	},
}

// A caller whose context ends while another transaction holds the row gets the error of its context. With a pool that sends cancel
// requests the call keeps its connection, takes nothing and leaves no row locked.
func TestGiveUpAtAHeldRowKeepsTheConnection(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "callers give up after a tenth of a second, one after the other")
	for name, call := range givingUp {
		for _, callers := range []int{1, 3} {
			if callers > 1 && !strings.HasPrefix(name, "Take") && !strings.HasPrefix(name, "Reserve") {
				continue // only these calls form batches
			}
			t.Run(fmt.Sprintf("%s/Callers=%d", name, callers), func(t *testing.T) {
				t.Parallel()
				if callers == 1 {
					representative(t, name, "Take", "Reset", "Reserve", "Settle")
				} else {
					representative(t, name, "TakeSeveral")
				}
				const connections = 6
				s := newStand(t, byCancelRequest(30*time.Second), func(c *pgxpool.Config) { c.MaxConns = connections })
				r, err := s.limiter.Reserve(t.Context(), fate.For("held"))
				require.NoError(t, err)
				lease, err := s.limiter.Acquire(t.Context(), leased.For("held"))
				require.NoError(t, err)
				takeOne(t, s.limiter, sliced.For("held"))
				require.NoError(t, s.connectAll(t.Context(), connections))
				before := s.rows(t, "")
				holder := s.outside.begin(t, pgx.ReadCommitted)
				_, err = holder.Exec(t.Context(), `SELECT FROM ratelimit.buckets WHERE key = 'held' FOR UPDATE`)
				require.NoError(t, err)
				made := s.pool.Stat().NewConnsCount()
				for round := range 3 {
					// Callers of a batch end at different times, and the last of them by a cancelled context.
					require.NoError(t, atonce.Do(callers, func(caller int) error {
						patience := 150*time.Millisecond + time.Duration(caller)*20*time.Millisecond
						ctx, cancel := context.WithTimeout(t.Context(), patience)
						want := context.DeadlineExceeded
						if round == 2 {
							want = context.Canceled
							ctx, cancel = context.WithCancel(t.Context())
							time.AfterFunc(patience, cancel)
						}
						defer cancel()
						if err := call(ctx, s.limiter, round*callers+caller, r.ID, lease.ID); !errors.Is(err, want) || !errors.Is(err, ctx.Err()) {
							return fmt.Errorf("not the error of the context: %w", err)
						}
						return nil
					}))
				}
				s.requireIdle(t)
				s.awaitNoWaiter(t)
				require.NoError(t, s.connectAll(t.Context(), connections))
				require.Equal(t, made, s.pool.Stat().NewConnsCount(), "new connections")
				require.NoError(t, holder.Rollback(t.Context()))
				require.Equal(t, before, s.rows(t, ""), "something was taken")
				require.NoError(t, call(t.Context(), s.limiter, 0, r.ID, lease.ID))
			})
		}
	}
}

// A cancel request ends the statement of the caller who gave up, but no later statement on the same connection. Callers of other
// keys share the few connections of the pool, and none of their calls fails. A cancel request that reaches the server between two
// statements ends none; then pgx closes the connection.
func TestGiveUpHarmsNoCallOnTheSameConnection(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "callers give up after a tenth of a second, one after the other")
	const givers, innocents = 12, 6
	rounds := testsize.Of(15, 200)
	for _, noBatching := range []bool{false, true} {
		t.Run(fmt.Sprintf("NoBatching=%t", noBatching), func(t *testing.T) {
			t.Parallel()
			s := newStand(t, byCancelRequest(time.Second), func(c *pgxpool.Config) { c.MaxConns = givers + 4 })
			limiter := s.with(t, ratelimit.Config{NoBatching: noBatching})
			for giver := range givers {
				takeOne(t, limiter, fate.For(fmt.Sprint("held", giver)))
			}
			require.NoError(t, s.connectAll(t.Context(), givers+4))
			holder := s.outside.begin(t, pgx.ReadCommitted)
			_, err := holder.Exec(t.Context(), `SELECT FROM ratelimit.buckets WHERE starts_with(key, 'held') FOR UPDATE`)
			require.NoError(t, err)
			before := s.rows(t, "held")
			working, done := context.WithCancel(t.Context())
			defer done()
			var giving sync.WaitGroup
			giving.Add(givers)
			go func() { giving.Wait(); done() }()
			require.NoError(t, atonce.Do(givers+innocents, func(worker int) error {
				if worker < givers {
					defer giving.Done()
					for round := range rounds {
						// Some contexts end before the statement waits, or while it is sent.
						ctx, cancel := context.WithTimeout(t.Context(), time.Duration(1+(round*7+worker)%40)*time.Millisecond)
						_, err := limiter.Take(ctx, fate.For(fmt.Sprint("held", worker)))
						cancel()
						if !errors.Is(err, context.DeadlineExceeded) {
							return fmt.Errorf("giver %d: %w", worker, err)
						}
					}
					return nil
				}
				for n := 0; working.Err() == nil; n++ {
					if _, err := limiter.Take(t.Context(), fate.For(fmt.Sprint("free", worker))); err != nil {
						return fmt.Errorf("innocent %d, call %d: %w", worker, n, err)
					}
				}
				return nil
			}))
			s.requireIdle(t)
			s.awaitNoWaiter(t)
			require.NoError(t, holder.Rollback(t.Context()))
			require.Equal(t, before, s.rows(t, "held"), "something was taken")
		})
	}
}

// connectAll makes all connections of the pool.
func (b *bundle) connectAll(ctx context.Context, connections int) error {
	var connected sync.WaitGroup
	connected.Add(connections)
	return atonce.Do(connections, func(int) error {
		conn, err := b.pool.Acquire(ctx)
		connected.Done()
		if err != nil {
			return err
		}
		defer conn.Release()
		connected.Wait()
		return nil
	})
}
