package integration_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
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

// brief is a time that a call which waits for a row does not outlast.
const brief = 50 * time.Millisecond

// A call on the pool's Limiter in a transaction that holds its row waits for itself. It comes back all the same, with
// what to do about it, and has done nothing.
func TestACallThatWaitsForItsOwnTransactionComesBack(t *testing.T) {
	t.Parallel()
	waiting := map[string]call{"TakeAtOnce": func(ctx context.Context, l *ratelimit.Limiter, _ string, r ratelimit.Request) error {
		return atonce.Do(8, func(int) error { return errOf(l.Take(ctx, r)) })
	}}
	for name, call := range everyCall {
		if !slices.Contains([]string{"Check", "CheckReserve", "Value", "Prune", "Expire"}, name) { // which wait for no row
			waiting[name] = call
		}
	}
	for name, call := range waiting {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t, func(c *pgxpool.Config) { // a cancel request that comes between two statements ends none
				c.ConnConfig.RuntimeParams["client_connection_check_interval"] = "100ms"
			})
			request := roomy.For("key")
			r, err := b.limiter.Reserve(t.Context(), request)
			require.NoError(t, err)
			before := b.rows(t, "")
			tx := b.begin(t, pgx.ReadCommitted)
			requireAllowed(t, taking(request), b.limiter.WithTx(tx))
			require.NoError(t, errOf(b.limiter.WithTx(tx).Started(t.Context(), r.ID)))
			err = call(t.Context(), b.with(t, ratelimit.Config{Timeout: brief}), r.ID, request)
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

// innocents are calls that need no locked row, each for a key of its own.
var innocents = map[string]func(ctx context.Context, limiter *ratelimit.Limiter, key string) (ratelimit.Decision, error){
	"Take": func(ctx context.Context, limiter *ratelimit.Limiter, key string) (ratelimit.Decision, error) {
		return limiter.Take(ctx, fate.For(key))
	},
	"TakeSeveral": func(ctx context.Context, limiter *ratelimit.Limiter, key string) (ratelimit.Decision, error) {
		return limiter.Take(ctx, fate.For(key), roomy.For(key), wide.For(key))
	},
	"TakeAWindow": func(ctx context.Context, limiter *ratelimit.Limiter, key string) (ratelimit.Decision, error) {
		return limiter.Take(ctx, sliced.For(key))
	},
	"Reserve": func(ctx context.Context, limiter *ratelimit.Limiter, key string) (ratelimit.Decision, error) {
		r, err := limiter.Reserve(ctx, fate.For(key), other.For(key))
		return r.Decision, err
	},
	"Check": func(ctx context.Context, limiter *ratelimit.Limiter, _ string) (ratelimit.Decision, error) {
		return limiter.Check(ctx, fate.For("held 0"))
	},
}

// guilty are calls that need a locked row.
var guilty = map[string]func(ctx context.Context, limiter *ratelimit.Limiter, held string) error{
	"Take": func(ctx context.Context, limiter *ratelimit.Limiter, held string) error {
		return errOf(limiter.Take(ctx, fate.For(held)))
	},
	"TakeSeveral": func(ctx context.Context, limiter *ratelimit.Limiter, held string) error {
		_, err := limiter.Take(ctx, fate.For(held), roomy.For(held))
		return err
	},
	"Reserve": func(ctx context.Context, limiter *ratelimit.Limiter, held string) error {
		_, err := limiter.Reserve(ctx, fate.For(held), other.For(held))
		return err
	},
}

// A lock or statement timeout of the session, the database or the role ends calls that wait for a locked row, but not the calls that share
// their batches.
func TestATimeoutOfTheServerHarmsNoInnocent(t *testing.T) {
	t.Parallel()
	for setting, test := range map[string]struct{ value, code string }{
		"lock_timeout":      {"300ms", "55P03"}, // calls for other rows can wait for a lock of the table on a busy machine
		"statement_timeout": {"2s", "57014"},
	} {
		for of, alter := range map[string]string{
			"Database": `ALTER DATABASE %1$I SET %2$I = %3$L`,
			"Role":     `ALTER ROLE CURRENT_USER IN DATABASE %1$I SET %2$I = %3$L`,
			"Session":  "",
		} {
			t.Run(setting+"/Of"+of, func(t *testing.T) {
				t.Parallel()
				if setting == "statement_timeout" {
					testsize.Nightly(t, "a statement of an innocent call may take that long on a busy machine")
				}
				s := newStand(t, roomyPool, func(c *pgxpool.Config) {
					if of == "Session" {
						c.ConnConfig.RuntimeParams[setting] = test.value
					}
				})
				const held = 3
				rounds := testsize.Of(2, 12)
				for key := range held {
					defer s.outside.holdKey(t, fate.For(fmt.Sprint("held ", key)), key > 0)()
				}
				if alter != "" {
					s.alter(t, alter, setting, test.value)
				}
				over := make(chan struct{})
				var waiting sync.WaitGroup
				failed := make(chan error, len(guilty)*held)
				for _, call := range guilty {
					for key := range held {
						waiting.Go(func() { failed <- s.toldUntil(over, call, fmt.Sprint("held ", key), test.code) })
					}
				}
				err := atonce.Do(4*len(innocents), func(caller int) error {
					for round := range rounds {
						for name, call := range innocents {
							d, err := call(t.Context(), s.limiter, fmt.Sprint("free ", caller, " ", round%3))
							if err != nil || !d.Allowed {
								return fmt.Errorf("%s: %+v, %w", name, d, err)
							}
						}
					}
					return nil
				})
				close(over)
				waiting.Wait()
				require.NoError(t, err)
				close(failed)
				for err := range failed {
					require.NoError(t, err)
				}
				require.Zero(t, s.outside.count(t, `SELECT count(*) FROM ratelimit.reservations WHERE keys[1] LIKE 'held%'`))
			})
		}
	}
}

// alter sets a setting by a statement that names the database, the setting and the value, for the sessions that the limiter
// begins from now on.
func (s *stand) alter(t *testing.T, statement, setting, value string) {
	t.Helper()
	var sql string
	require.NoError(t, s.outside.pool.QueryRow(t.Context(),
		`SELECT format($1, current_database(), $2::text, $3::text)`, statement, setting, value).Scan(&sql))
	s.outside.exec(t, sql)
	s.pool.Reset()
	var set string
	require.NoError(t, s.pool.QueryRow(t.Context(), `SELECT current_setting($1)`, setting).Scan(&set))
	require.Equal(t, value, set)
}

// toldUntil repeats a call for a locked row until over is closed, at least once. It returns an error if the call fails with another
// code.
func (s *stand) toldUntil(over chan struct{}, call func(context.Context, *ratelimit.Limiter, string) error, held, code string) error {
	for {
		if err := call(context.Background(), s.limiter, held); sqlstate(err) != code {
			return fmt.Errorf("not told that %s is held: %w", held, err)
		}
		select {
		case <-over:
			return nil
		default:
		}
	}
}

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

// givingUp returns calls that wait for the locked rows of the key "held", or of a lease of that key.
func givingUp() map[string]call {
	calls := map[string]call{
		"TakeAWindow": func(ctx context.Context, l *ratelimit.Limiter, _ string, _ ratelimit.Request) error {
			return errOf(l.Take(ctx, sliced.For("held")))
		},
		"ReserveSeveral": func(ctx context.Context, l *ratelimit.Limiter, _ string, r ratelimit.Request) error {
			return errOf(l.Reserve(ctx, r, roomy.For("free")))
		},
		"ResetSeveral": func(ctx context.Context, l *ratelimit.Limiter, _ string, r ratelimit.Request) error {
			return l.Reset(ctx, r, roomy.For("free"))
		},
		"ChargeSeveral": func(ctx context.Context, l *ratelimit.Limiter, _ string, r ratelimit.Request) error {
			return l.Charge(ctx, r, roomy.For("free"))
		},
		"Acquire": func(ctx context.Context, l *ratelimit.Limiter, _ string, _ ratelimit.Request) error {
			return errOf(l.Acquire(ctx, leased.For("held")))
		},
		"Release": func(ctx context.Context, l *ratelimit.Limiter, id string, _ ratelimit.Request) error {
			return l.Release(ctx, id)
		},
	}
	for _, name := range []string{"Take", "TakeSeveral", "TakeUpTo", "Reserve", "Settle", "Reset", "Credit"} {
		calls[name] = everyCall[name]
	}
	return calls
}

// A caller whose context ends while another transaction holds the row gets the error of its context. With a pool that sends cancel
// requests the call keeps its connection, takes nothing and leaves no row locked.
func TestGiveUpAtAHeldRowKeepsTheConnection(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "callers give up after a tenth of a second, one after the other")
	for name, call := range givingUp() {
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
				id := r.ID
				if name == "Release" {
					id = lease.ID
				}
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
						if err := call(ctx, s.limiter, id, fate.For("held")); !errors.Is(err, want) || !errors.Is(err, ctx.Err()) {
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
				require.NoError(t, call(t.Context(), s.limiter, id, fate.For("held")))
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
