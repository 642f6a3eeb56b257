package integration_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// brief is a time that a call which waits for a row does not outlast.
const brief = 50 * time.Millisecond

var (
	// fate is the limit of the calls that share batches here.
	fate = ratelimit.Define("fate", hoard(1e6))

	// leased is a limit on concurrency with more slots than a test takes.
	leased = ratelimit.Define("leased", ratelimit.Concurrency{Slots: 100, Lease: time.Hour})
)

// roomyPool lets a test have a connection for every row that is held.
func roomyPool(c *pgxpool.Config) { c.MaxConns = 32 }

// holdKey has a transaction take from a bucket, and keep its row until the returned function is called. The row is
// there already, or it is the transaction that makes it.
func (b *bundle) holdKey(t *testing.T, request ratelimit.Request, exists bool) (release func()) {
	t.Helper()
	if exists {
		takeOne(t, b.limiter, request)
	}
	tx := b.begin(t, pgx.ReadCommitted)
	takeOne(t, b.limiter.WithTx(tx), request)
	return func() { require.NoError(t, tx.Commit(t.Context())) }
}

func takeOne(t *testing.T, limiter *ratelimit.Limiter, requests ...ratelimit.Request) {
	t.Helper()
	require.NoError(t, limiter.Require(t.Context(), requests...))
}

// byCancelRequest makes pgx send a cancel request for a statement whose context ends, as docs/operations.md recommends.
// pgx closes the connection if the server has not answered after patience.
func byCancelRequest(patience time.Duration) func(*pgxpool.Config) {
	return func(c *pgxpool.Config) {
		c.ConnConfig.BuildContextWatcherHandler = func(conn *pgconn.PgConn) ctxwatch.Handler {
			return &pgconn.CancelRequestContextWatcherHandler{Conn: conn, CancelRequestDelay: 10 * time.Millisecond, DeadlineDelay: patience}
		}
	}
}

// callsAtARow are calls for the row of a request, for its reservation, or for the lease of the same key.
func callsAtARow(lease string) map[string]call {
	all := maps.Clone(everyCall)
	maps.Copy(all, map[string]call{
		"TakeAWindow": func(ctx context.Context, l *ratelimit.Limiter, _ string, r ratelimit.Request) error {
			return errOf(l.Take(ctx, sliced.For("held")))
		},
		"ReserveSeveral": func(ctx context.Context, l *ratelimit.Limiter, _ string, r ratelimit.Request) error {
			return errOf(l.Reserve(ctx, r, roomy.For("free")))
		},
		"ChargeSeveral": func(ctx context.Context, l *ratelimit.Limiter, _ string, r ratelimit.Request) error {
			return l.Charge(ctx, r, roomy.For("free"))
		},
		"InTx": func(ctx context.Context, l *ratelimit.Limiter, _ string, r ratelimit.Request) error {
			return l.InTx(ctx, func(tx pgx.Tx) error { return errOf(l.WithTx(tx).Take(ctx, r)) })
		},
		"Acquire": func(ctx context.Context, l *ratelimit.Limiter, _ string, _ ratelimit.Request) error {
			return errOf(l.Acquire(ctx, leased.For("held")))
		},
		"Release": func(ctx context.Context, l *ratelimit.Limiter, _ string, _ ratelimit.Request) error {
			return l.Release(ctx, lease)
		},
	})
	return all
}

// A call waits for a row that another transaction holds, for example the transaction of its own caller. It returns when
// its time is over, or its caller gives up, and has done nothing. Its error does not leave that open, and its statement
// does not stay at the server; an Acquire's goes on for a second. If pgx sends cancel requests, the connection is kept.
// A call that needs no row of its own does not wait.
func TestACallAtAHeldRow(t *testing.T) {
	t.Parallel()
	names := slices.Sorted(maps.Keys(callsAtARow("")))
	const stands = 4 // for a part of the calls each, one after the other
	for part := range stands {
		for _, keepsConnection := range []bool{false, true} {
			t.Run(fmt.Sprintf("KeepsConnection=%t/%d", keepsConnection, part), func(t *testing.T) {
				t.Parallel()
				held := newHeldStand(t, keepsConnection)
				for i := part; i < len(names); i += stands {
					t.Run(names[i], func(t *testing.T) {
						if keepsConnection {
							representative(t, names[i], "Take", "TakeSeveral", "Settle")
						}
						held.testACallAtAHeldRow(t, names[i], keepsConnection)
					})
				}
			})
		}
	}
}

// heldConnections is the size of the pool of newHeldStand.
const heldConnections = 4

// madeTwice are the calls of which a second one comes while the first waits. Most of these form a batch behind it.
var madeTwice = regexp.MustCompile(`^(Take|Reserve|Charge|Credit|Reset)`)

func newHeldStand(t *testing.T, keepsConnection bool) *stand {
	t.Helper()
	return newStand(t, func(c *pgxpool.Config) {
		c.MaxConns = heldConnections
		c.ConnConfig.RuntimeParams["client_connection_check_interval"] = "100ms" // or a statement waits on for a closed connection
		if keepsConnection {
			byCancelRequest(30 * time.Second)(c)
		}
	})
}

func (s *stand) testACallAtAHeldRow(t *testing.T, name string, keepsConnection bool) {
	t.Helper()
	s = s.emptied(t)
	request := fate.For("held")
	r, err := s.limiter.Reserve(t.Context(), request)
	require.NoError(t, err)
	call := callsAtARow(acquire(t, s.limiter, leased.For("held")).ID)[name]
	takeOne(t, s.limiter, sliced.For("held"))
	if keepsConnection {
		require.NoError(t, s.connectAll(t.Context(), heldConnections))
	}
	made, before := s.pool.Stat().NewConnsCount(), s.rows(t, "")
	holder := s.outside.begin(t, pgx.ReadCommitted)
	for _, table := range []string{"buckets WHERE key", "reservations WHERE key"} {
		require.NoError(t, errOf(holder.Exec(t.Context(), `SELECT FROM ratelimit.`+table+` = 'held' FOR UPDATE`)))
	}
	if c, known := world.Calls()[name]; known && !c.Writes {
		require.NoError(t, call(t.Context(), s.limiter, r.ID, request))
		return
	}
	if !keepsConnection && name != "InTx" { // which has no timeout of the Limiter's
		err := call(t.Context(), s.with(t, ratelimit.Config{Timeout: brief}), r.ID, request)
		requireOnePrefix(t, err, context.DeadlineExceeded, name)
		require.ErrorContains(t, err, "a transaction may hold a row")
		require.ErrorContains(t, err, "WithTx")
		s.awaitNoWaiter(t)
	}
	for range testkit.Sized(1, 2) {
		askers := []*asker{askFor(t, func(ctx context.Context) error { return call(ctx, s.limiter, r.ID, request) })}
		s.awaitWaiter(t)
		if madeTwice.MatchString(name) {
			askers = append(askers, askFor(t, func(ctx context.Context) error { return call(ctx, s.limiter, r.ID, request) }))
		}
		takeOne(t, s.limiter, fate.For("free"), roomy.For("free"))
		requireWaiting(t, askers...)
		for _, a := range askers {
			a.cancel()
			<-a.ended
			require.ErrorIs(t, a.err, context.Canceled)
			require.NotErrorIs(t, a.err, ratelimit.ErrCommitUnknown)
		}
		s.awaitNoWaiter(t) // while the row is still held
	}
	s.requireIdle(t)
	eventually(t, "the server has noticed each closed connection", func() bool { // a statement on it could still take
		return s.outside.count(t, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
			AND backend_type = 'client backend' AND application_name <> 'outside'`) == int(s.pool.Stat().TotalConns())
	})
	if keepsConnection {
		require.NoError(t, s.connectAll(t.Context(), heldConnections))
		require.Equal(t, made, s.pool.Stat().NewConnsCount(), "new connections")
	}
	require.NoError(t, holder.Rollback(t.Context()))
	require.Equal(t, before, slices.DeleteFunc(s.rows(t, ""), func(r row) bool { return r.Key == "free" }))
	require.Len(t, s.reserved(t), 1)
	require.NoError(t, call(t.Context(), s.limiter, r.ID, request))
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

// The end of a reservation waits for the buckets that it charges, and for no other.
func TestSettleWaitsOnlyForBucketsThatItChanges(t *testing.T) {
	t.Parallel()
	s := newStand(t)
	r, err := s.limiter.Reserve(t.Context(), calls.For("ada"), roomy.For("a").Cost(3))
	require.NoError(t, err)
	s.hold(t)
	require.NoError(t, s.limiter.Settle(t.Context(), r.ID, roomy.For("a").Cost(2)))
	require.InDelta(t, 1e6-2, s.outside.held(t, "roomy", "a"), 0.01)
	require.Equal(t, 1, s.taken(t))
}

// Config.Timeout is for calls outside a transaction: a transaction has the deadline of its context.
func TestTimeoutIsNotForTransactions(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, on backend) {
		b := on.setup(t)
		limiter := b.with(t, ratelimit.Config{Timeout: time.Nanosecond})
		require.ErrorIs(t, limiter.Require(t.Context(), roomy.For("key")), context.DeadlineExceeded)
		require.NoError(t, limiter.InTx(t.Context(), func(tx pgx.Tx) error { return limiter.WithTx(tx).Require(t.Context(), roomy.For("key")) }))
		require.InDelta(t, roomy.Capacity()-1, b.held(t, roomy.Name(), "key"), 1e-3)
	}, onPostgres, inMemory)
}

// callsOverTwo are calls over two buckets of limits that are locked in the other order.
var callsOverTwo = map[string]func(ctx context.Context, l *ratelimit.Limiter, id string, requests ...ratelimit.Request) error{
	"Take": func(ctx context.Context, l *ratelimit.Limiter, _ string, requests ...ratelimit.Request) error {
		return l.Require(ctx, requests...)
	},
	"Reserve": func(ctx context.Context, l *ratelimit.Limiter, _ string, requests ...ratelimit.Request) error {
		r, err := l.Reserve(ctx, requests...)
		return errors.Join(err, r.Err())
	},
	"Charge": func(ctx context.Context, l *ratelimit.Limiter, _ string, requests ...ratelimit.Request) error {
		return l.Charge(ctx, requests...)
	},
	"Settle": func(ctx context.Context, l *ratelimit.Limiter, id string, requests ...ratelimit.Request) error {
		return l.Settle(ctx, id, requests[0].Cost(2), requests[1].Cost(2))
	},
	"Renew": func(ctx context.Context, l *ratelimit.Limiter, id string, _ ...ratelimit.Request) error {
		return errOf(l.Renew(ctx, id))
	},
}

// user and global are the limits of callsOverTwo. The row of global is locked first.
var user, global = ratelimit.Define("user", hoard(1e6)), ratelimit.Define("global", hoard(1e6))

// A call that waits for the row of a user does not delay other calls on the limit that all share.
func TestACallThatWaitsForARowHoldsNoOtherRow(t *testing.T) {
	t.Parallel()
	for _, exists := range []bool{true, false} {
		for _, batching := range []bool{true, false} {
			for verb, call := range callsOverTwo {
				t.Run(fmt.Sprintf("%s/RowExists=%v/Batching=%v", verb, exists, batching), func(t *testing.T) {
					t.Parallel()
					if !exists || !batching {
						representative(t, verb, "Take")
					}
					b := setup(t, roomyPool)
					limiter := b.with(t, ratelimit.Config{NoBatching: !batching})
					const behind = 3
					reserved := make([]ratelimit.Reservation, behind)
					for i := range reserved {
						var err error
						reserved[i], err = limiter.Reserve(t.Context(), user.For("ada"), global.Global())
						require.NoError(t, err)
					}
					if !exists {
						b.exec(t, `DELETE FROM ratelimit.buckets WHERE name = 'user'`)
					}
					release := b.holdKey(t, user.For("ada"), exists)
					var askers []*asker
					for _, r := range reserved {
						askers = append(askers, askFor(t, func(ctx context.Context) error {
							return call(ctx, limiter, r.ID, user.For("ada"), global.Global())
						}))
					}
					eventually(t, "a call waits for the row", func() bool { return waiting(t, b.pool) > 0 })
					for range 20 {
						takeOne(t, limiter, global.Global())
						takeOne(t, b.limiter, global.Global())
						takeOne(t, limiter, user.For("grace"), global.Global())
					}
					requireWaiting(t, askers...)
					release()
					requireAllAllowed(t, askers...)
					require.InDelta(t, 1e6-behind-60-behind, b.row(t, "global", "").Value, 0.5)
				})
			}
		}
	}
}

// A call that needs a locked row, and another that is being inserted, waits for both in turn. It does not wait for ever
// for the first while others use it.
func TestACallWaitsForEachOfItsRowsInTurn(t *testing.T) {
	t.Parallel()
	for _, verb := range []string{"Take", "Charge"} {
		for _, batching := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s/Batching=%v", verb, batching), func(t *testing.T) {
				t.Parallel()
				b := setup(t, roomyPool)
				limiter := b.with(t, ratelimit.Config{NoBatching: !batching})
				lock := func(tx pgx.Tx) error {
					return errOf(tx.Exec(t.Context(), `SELECT FROM ratelimit.buckets WHERE name = 'global' FOR UPDATE`))
				}
				takeOne(t, b.limiter, global.Global())
				maker, first, second := b.begin(t, pgx.ReadCommitted), b.begin(t, pgx.ReadCommitted), b.begin(t, pgx.ReadCommitted)
				takeOne(t, b.limiter.WithTx(maker), user.For("ada"))
				require.NoError(t, lock(first))
				caller := askFor(t, func(ctx context.Context) error {
					return callsOverTwo[verb](ctx, limiter, "", user.For("ada"), global.Global())
				})
				eventually(t, "the call waits for the first", func() bool { return waitsLong(t, b.pool, first) })
				locked := make(chan error, 1)
				go func() { locked <- lock(second) }()
				eventually(t, "the second comes behind the call", func() bool { return waiting(t, b.pool) == 2 })
				require.NoError(t, first.Rollback(t.Context()))
				require.NoError(t, <-locked)
				eventually(t, "the call waits for the maker", func() bool { return waitsLong(t, b.pool, maker) })
				requireWaiting(t, caller)
				require.NoError(t, maker.Commit(t.Context()))
				require.NoError(t, second.Rollback(t.Context()))
				requireAllAllowed(t, caller)
				require.InDelta(t, 1e6-2, b.row(t, "user", "ada").Value, 0.5)
				require.InDelta(t, 1e6-2, b.row(t, "global", "").Value, 0.5)
			})
		}
	}
}

// Calls that need all rows of a bucket wait for them, however many transactions hold one each and let them go one
// after the other.
func TestCallsWaitForEveryRowOfABucket(t *testing.T) {
	t.Parallel()
	const shards, capacity = 4, 1e6
	limit := ratelimit.Define("fate", ratelimit.TokenBucket{Rate: capacity, Period: century, Shards: shards})
	all := limit.Global().Cost(capacity/shards + 1) // which is more than a row holds
	b := setup(t, roomyPool)
	takeOne(t, b.limiter, all) // makes all rows
	require.NoError(t, b.limiter.Reset(t.Context(), limit.Global()))
	var holders [shards]pgx.Tx
	for shard := range holders {
		holders[shard] = b.begin(t, pgx.ReadCommitted)
		require.NoError(t, errOf(holders[shard].Exec(t.Context(), `SELECT FROM ratelimit.buckets WHERE shard = $1 FOR UPDATE`, shards+shard)))
	}
	askers := []*asker{ask(t, b.limiter, all), ask(t, b.limiter, all), ask(t, b.limiter, all)}
	for shard, holder := range holders {
		eventually(t, fmt.Sprint("a call has waited long for row ", shard), func() bool { return waitsLong(t, b.pool, holder) })
		requireWaiting(t, askers...)
		require.NoError(t, holder.Rollback(t.Context()))
	}
	requireAllAllowed(t, askers...)
}

// waitsLong reports whether a session waits for the transaction's, for longer than a call that holds rows does at
// first.
func waitsLong(t *testing.T, pool *pgxpool.Pool, tx pgx.Tx) (long bool) {
	t.Helper()
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT EXISTS (
		SELECT FROM pg_locks WHERE NOT granted AND $1 = ANY(pg_blocking_pids(pid)) AND clock_timestamp() - waitstart > '100 ms')`,
		tx.Conn().PgConn().PID()).Scan(&long))
	return long
}

// TestRoutedStatementsRefuseWithoutWaiting promises that a refusal outside of a transaction waits for no row of
// several.
func TestRoutedStatementsRefuseWithoutWaiting(t *testing.T) {
	t.Parallel()
	b := setupRouted(t)
	limit := ratelimit.Define("once", hoard(1))
	d, err := b.limiter.Take(t.Context(), limit.For("k"))
	require.NoError(t, err)
	require.True(t, d.Allowed)
	blocker := b.begin(t, pgx.ReadCommitted)
	_, err = blocker.Exec(t.Context(), `SELECT FROM ratelimit.buckets WHERE key = 'k' FOR NO KEY UPDATE`)
	require.NoError(t, err)
	two := ratelimit.Define("twice", hoard(1))
	d, err = b.limiter.Take(t.Context(), limit.For("k"), two.For("k"))
	require.NoError(t, err)
	require.False(t, d.Allowed)
}
