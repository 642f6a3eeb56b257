package integration_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// fate is the limit of the calls that share batches here.
var fate = ratelimit.Define("fate", hoard(1e6))

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
	d, err := b.limiter.WithTx(tx).Take(t.Context(), request)
	require.NoError(t, err)
	require.True(t, d.Allowed)
	return func() { require.NoError(t, tx.Commit(t.Context())) }
}

func takeOne(t *testing.T, limiter *ratelimit.Limiter, requests ...ratelimit.Request) {
	t.Helper()
	d, err := limiter.Take(t.Context(), requests...)
	require.NoError(t, err)
	require.True(t, d.Allowed)
}

// A call that waits for the row of a user does not delay other calls on the limit that all share.
func TestACallBehindAHeldRowHoldsNoOther(t *testing.T) {
	t.Parallel()
	user, global := ratelimit.Define("user", hoard(1e6)), ratelimit.Define("global", hoard(1e6)) // global is locked first
	for _, exists := range []bool{true, false} {
		for _, batching := range []bool{true, false} {
			for verb, call := range map[string]func(ctx context.Context, l *ratelimit.Limiter, id string, requests ...ratelimit.Request) error{
				"Take": func(ctx context.Context, l *ratelimit.Limiter, _ string, requests ...ratelimit.Request) error {
					d, err := l.Take(ctx, requests...)
					return errors.Join(err, d.Err())
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
					_, err := l.Renew(ctx, id)
					return err
				},
			} {
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
					var waiters []*asker
					for i := range behind {
						waiters = append(waiters, askFor(t, func(ctx context.Context) (ratelimit.Decision, error) {
							err := call(ctx, limiter, reserved[i].ID, user.For("ada"), global.Global())
							return ratelimit.Decision{Allowed: err == nil}, err
						}))
					}
					eventually(t, "a call waits for the row", func() bool { return waiting(t, b.pool) > 0 })
					for range 20 {
						takeOne(t, limiter, global.Global())
						takeOne(t, b.limiter, global.Global())
						takeOne(t, limiter, user.For("grace"), global.Global())
					}
					for _, w := range waiters {
						w.requireWaits(t)
					}
					release()
					for _, w := range waiters {
						w.requireAllowed(t)
					}
					require.InDelta(t, 1e6-behind-60-behind, b.row(t, "global", "").Value, 0.5)
				})
			}
		}
	}
}

// A call that needs a locked row, and another that is being inserted, waits for both in turn. It does not wait for ever for the
// first while others use it.
func TestACallWaitsForEachOfItsRowsInTurn(t *testing.T) {
	t.Parallel()
	user, global := ratelimit.Define("user", hoard(1e6)), ratelimit.Define("global", hoard(1e6)) // global is locked first
	for verb, call := range map[string]func(ctx context.Context, l *ratelimit.Limiter) error{
		"Take": func(ctx context.Context, l *ratelimit.Limiter) error {
			d, err := l.Take(ctx, user.For("ada"), global.Global())
			return errors.Join(err, d.Err())
		},
		"Charge": func(ctx context.Context, l *ratelimit.Limiter) error {
			return l.Charge(ctx, user.For("ada"), global.Global())
		},
	} {
		for _, batching := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s/Batching=%v", verb, batching), func(t *testing.T) {
				t.Parallel()
				b := setup(t, roomyPool)
				limiter := b.with(t, ratelimit.Config{NoBatching: !batching})
				lock := func(tx pgx.Tx) error {
					_, err := tx.Exec(t.Context(), `SELECT FROM ratelimit.buckets WHERE name = 'global' FOR UPDATE`)
					return err
				}
				takeOne(t, b.limiter, global.Global())
				maker, first, second := b.begin(t, pgx.ReadCommitted), b.begin(t, pgx.ReadCommitted), b.begin(t, pgx.ReadCommitted)
				takeOne(t, b.limiter.WithTx(maker), user.For("ada"))
				require.NoError(t, lock(first))
				caller := askFor(t, func(ctx context.Context) (ratelimit.Decision, error) {
					err := call(ctx, limiter)
					return ratelimit.Decision{Allowed: err == nil}, err
				})
				eventually(t, "the call waits for the first", func() bool { return waitsLong(t, b.pool, first) })
				locked := make(chan error, 1)
				go func() { locked <- lock(second) }()
				eventually(t, "the second comes behind the call", func() bool { return waiting(t, b.pool) == 2 })
				require.NoError(t, first.Rollback(t.Context()))
				require.NoError(t, <-locked)
				eventually(t, "the call waits for the maker", func() bool { return waitsLong(t, b.pool, maker) })
				caller.requireWaits(t)
				require.NoError(t, maker.Commit(t.Context()))
				require.NoError(t, second.Rollback(t.Context()))
				caller.requireAllowed(t)
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
	const callers, capacity, cost = 3, 1e6, 300_000.0 // which is more than a shard holds
	shards := testsize.Of(4, 8)
	limit := ratelimit.Define("fate", ratelimit.TokenBucket{Rate: capacity, Period: century, Shards: shards})
	b := setup(t, roomyPool)
	takeOne(t, b.limiter, limit.Global().Cost(capacity/float64(shards)+1)) // makes all rows
	require.NoError(t, b.limiter.Reset(t.Context(), limit.Global()))
	holders := make([]pgx.Tx, shards)
	for shard := range shards {
		holders[shard] = b.begin(t, pgx.ReadCommitted)
		_, err := holders[shard].Exec(t.Context(), `SELECT FROM ratelimit.buckets WHERE name = 'fate' AND shard = $1 FOR UPDATE`, shard)
		require.NoError(t, err)
	}
	var waiters []*asker
	for range callers {
		waiters = append(waiters, ask(t, b.limiter, limit.Global().Cost(cost)))
	}
	for shard, holder := range holders {
		eventually(t, fmt.Sprint("a call has waited long for row ", shard), func() bool {
			for _, w := range waiters {
				w.requireWaits(t)
			}
			return waitsLong(t, b.pool, holder)
		})
		require.NoError(t, holder.Rollback(t.Context()))
	}
	for _, w := range waiters {
		w.requireAllowed(t)
	}
}

// waitsLong reports whether a session waits for the transaction's, for longer than a call that holds rows does at first.
func waitsLong(t *testing.T, pool *pgxpool.Pool, tx pgx.Tx) (long bool) {
	t.Helper()
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT EXISTS (
		SELECT FROM pg_locks WHERE NOT granted AND $1 = ANY(pg_blocking_pids(pid)) AND clock_timestamp() - waitstart > '100 ms')`,
		tx.Conn().PgConn().PID()).Scan(&long))
	return long
}
