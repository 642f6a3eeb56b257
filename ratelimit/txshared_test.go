package ratelimit

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
)

// turnsAtHot is what transactions want in these tests, of which those of several processes have conflicted.
var turnsAtHot = Define("hot", TokenBucket{Rate: 100_000, Period: 36525 * Day}).Global()

// sharing is two Limiters, as of two processes.
type sharing struct {
	pool           *pgxpool.Pool
	limiter, other *Limiter
}

// newSharing returns Limiters whose queues never time out, right after a conflict of their transactions on the bucket
// hot.
func newSharing(t *testing.T, configure ...func(*pgxpool.Config)) *sharing {
	t.Helper()
	b := &sharing{pool: postgrestest.New(t, configure...)}
	now := time.Now()
	for _, l := range []**Limiter{&b.limiter, &b.other} {
		var err error
		*l, err = New(b.pool, Config{})
		require.NoError(t, err)
		queues := (*l).queues
		queues.Now, queues.Wait = func() time.Time { return now }, time.Hour
		queues.Conflict(true, bucket.Key{Name: "hot"})
	}
	return b
}

// requireTaken checks the number of tokens taken from the bucket.
func (b *sharing) requireTaken(t *testing.T, want float64) {
	t.Helper()
	v, err := b.limiter.Value(t.Context(), turnsAtHot)
	require.NoError(t, err)
	require.InDelta(t, 100_000-want, v.Tokens, 0.01)
}

func eventually(t *testing.T, what string, done func() bool) {
	t.Helper()
	for deadline, pause := time.Now().Add(time.Minute), time.Millisecond; !done(); pause = min(2*pause, 16*time.Millisecond) {
		require.True(t, time.Now().Before(deadline), what)
		time.Sleep(pause)
	}
}

// turns returns how many sessions hold an advisory lock, and how many wait for one, in the database of the test.
func (b *sharing) turns(t *testing.T) (held, waiting int) {
	t.Helper()
	require.NoError(t, b.pool.QueryRow(t.Context(), `
		SELECT count(DISTINCT pid) FILTER (WHERE granted), count(*) FILTER (WHERE NOT granted) FROM pg_locks
		WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`).Scan(&held, &waiting))
	return held, waiting
}

// awaitWaiting waits until that many sessions wait for a lock.
func (b *sharing) awaitWaiting(t *testing.T, want int) {
	t.Helper()
	eventually(t, "sessions wait in the server", func() bool {
		_, waiting := b.turns(t)
		return waiting == want
	})
}

// requireTurns waits until that many sessions hold a lock, and none waits for one.
func (b *sharing) requireTurns(t *testing.T, want int) {
	t.Helper()
	eventually(t, "locks are held", func() bool {
		held, waiting := b.turns(t)
		return held == want && waiting == 0
	})
}

// takeHot takes one token in a transaction of InTx and does something else.
func (b *sharing) takeHot(ctx context.Context, then func(tx pgx.Tx) error) error {
	return takeHot(ctx, b.limiter, then)
}

func takeHot(ctx context.Context, l *Limiter, then func(tx pgx.Tx) error) error {
	return l.InTx(ctx, func(tx pgx.Tx) error {
		if _, err := l.WithTx(tx).Take(ctx, turnsAtHot); err != nil {
			return err
		}
		if then == nil {
			return nil
		}
		return then(tx)
	})
}

// However a transaction ends, its turn ends with it, and nothing is left behind in its connection.
func TestASharedTurnEndsWithItsTransaction(t *testing.T) {
	t.Parallel()
	errBody := errors.New("the body failed")
	executing := func(sql string, result error) func(context.Context, pgx.Tx) error {
		return func(ctx context.Context, tx pgx.Tx) error { _, _ = tx.Exec(ctx, sql); return result }
	}
	for name, end := range map[string]func(context.Context, pgx.Tx) error{
		"commit":                               func(context.Context, pgx.Tx) error { return nil },
		"panic":                                func(context.Context, pgx.Tx) error { panic(errBody) },
		"goexit":                               func(context.Context, pgx.Tx) error { runtime.Goexit(); return nil },
		"a commit of its own":                  func(ctx context.Context, tx pgx.Tx) error { return tx.Commit(ctx) },
		"a rollback of its own":                func(ctx context.Context, tx pgx.Tx) error { return tx.Rollback(ctx) },
		"a closed connection":                  func(ctx context.Context, tx pgx.Tx) error { return tx.Conn().Close(ctx) },
		"an ended backend":                     executing(`SELECT pg_terminate_backend(pg_backend_pid())`, errBody),
		"a failed statement":                   executing(`SELECT 1/0`, errBody),
		"a failed statement that is kept back": executing(`SELECT 1/0`, nil),
		"a commit that fails": executing(`CREATE TABLE parent (id int PRIMARY KEY);
			CREATE TABLE child (id int REFERENCES parent DEFERRABLE INITIALLY DEFERRED); INSERT INTO child VALUES (1)`, nil),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newSharing(t)
			for _, ctx := range []context.Context{WithQueue(t.Context(), turnsAtHot), t.Context()} {
				var over sync.WaitGroup
				over.Go(func() { // which panics and exits in its stead
					defer func() { _ = recover() }()
					first := true
					_ = b.takeHot(ctx, func(tx pgx.Tx) error {
						if held, _ := b.turns(t); held != 1 {
							t.Errorf("%d locks are held", held)
						}
						if !first {
							return nil
						}
						first = false
						return end(t.Context(), tx)
					})
				})
				over.Wait()
				b.requireTurns(t, 0)
				require.NoError(t, b.takeHot(ctx, nil), "the next one is not in its way")
			}
			b.requireTurns(t, 0)
		})
	}
}

// A transaction waits in the server, at most one of each process, until the transaction before it has committed. Then
// it runs without a conflict, also if it does not name its buckets.
func TestTurnsAreHandedOverInTheServer(t *testing.T) {
	t.Parallel()
	const workers = 8
	for _, mode := range []string{"cache_statement", "cache_describe", "describe_exec", "exec", "simple_protocol"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			b := newSharing(t, func(c *pgxpool.Config) {
				c.MaxConns = workers + 2
				q, err := pgx.ParseConfig("default_query_exec_mode=" + mode)
				require.NoError(t, err)
				c.ConnConfig.DefaultQueryExecMode = q.DefaultQueryExecMode
			})
			var attempts atomic.Int64
			var others sync.WaitGroup
			require.NoError(t, takeHot(t.Context(), b.other, func(pgx.Tx) error {
				for range workers {
					others.Go(func() {
						err := b.limiter.InTx(t.Context(), func(tx pgx.Tx) error {
							attempts.Add(1)
							_, err := b.limiter.WithTx(tx).Take(t.Context(), turnsAtHot)
							return err
						})
						if err != nil {
							t.Error(err)
						}
					})
				}
				eventually(t, "one of them waits in the server", func() bool {
					_, waiting := b.turns(t)
					require.LessOrEqual(t, waiting, 1)
					return waiting == 1 && attempts.Load() == workers // which wait before they take
				})
				return nil
			}))
			others.Wait()
			require.EqualValues(t, workers, attempts.Load())
			b.requireTaken(t, workers+1)
			b.requireTurns(t, 0)
		})
	}
}

// After the longest wait a transaction continues without a turn.
func TestAWaitForASharedTurnIsBounded(t *testing.T) {
	t.Parallel()
	b := newSharing(t)
	b.limiter.queues.Wait = time.Millisecond
	stranger, err := b.pool.Acquire(t.Context())
	require.NoError(t, err)
	defer stranger.Release()
	var lock int64
	require.NoError(t, b.takeHot(WithQueue(t.Context(), turnsAtHot), func(tx pgx.Tx) error { // which has it
		return tx.QueryRow(t.Context(), `SELECT (classid::bigint << 32) | objid::bigint FROM pg_locks
			WHERE locktype = 'advisory' AND pid = pg_backend_pid()`).Scan(&lock)
	}))
	_, err = stranger.Exec(t.Context(), `SELECT pg_advisory_lock($1)`, lock)
	require.NoError(t, err)

	require.NoError(t, b.takeHot(WithQueue(t.Context(), turnsAtHot), nil), "before the first statement")
	require.NoError(t, b.takeHot(t.Context(), nil), "with it")
	require.NoError(t, b.limiter.InTx(t.Context(), func(tx pgx.Tx) error { // several statements at once
		_, err := b.limiter.WithTx(tx).Take(t.Context(), turnsAtHot, Define("other", PerHour(10)).Global())
		return err
	}))
	b.requireTaken(t, 4)
	b.requireTurns(t, 1) // the stranger's
}

// A caller who gives up waiting leaves no waiting session in the server.
func TestACancelledWaitForASharedTurnLeavesNoSession(t *testing.T) {
	t.Parallel()
	b := newSharing(t)
	for _, named := range []bool{true, false} {
		err := takeHot(WithQueue(t.Context(), turnsAtHot), b.other, func(pgx.Tx) error {
			ctx, giveUp := context.WithCancel(t.Context())
			if named {
				ctx = WithQueue(ctx, turnsAtHot)
			}
			done := make(chan error, 1)
			go func() { done <- b.takeHot(ctx, nil) }()
			b.awaitWaiting(t, 1)
			giveUp()
			require.ErrorIs(t, <-done, context.Canceled)
			b.awaitWaiting(t, 0)
			return nil
		})
		require.NoError(t, err)
		b.requireTurns(t, 0)
	}
	b.requireTaken(t, 2)
}

// A transaction inside another one, on a connection of its own, has a turn of its own.
func TestSharedTurnsOfATransactionInsideAnother(t *testing.T) {
	t.Parallel()
	b := newSharing(t)
	inner := Define("inner", PerHour(100)).Global()
	b.limiter.queues.Conflict(true, bucket.Key{Name: "inner"})
	require.NoError(t, b.takeHot(WithQueue(t.Context(), turnsAtHot), func(pgx.Tx) error {
		return b.limiter.InTx(WithQueue(t.Context(), inner), func(tx pgx.Tx) error {
			held, _ := b.turns(t)
			require.Equal(t, 2, held)
			_, err := b.limiter.WithTx(tx).Take(t.Context(), inner)
			return err
		})
	}))
	b.requireTurns(t, 0)
	require.NoError(t, b.limiter.InTx(WithQueue(t.Context(), turnsAtHot), func(tx pgx.Tx) error {
		return pgx.BeginFunc(t.Context(), tx, func(nested pgx.Tx) error { // a savepoint
			_, err := b.limiter.WithTx(nested).Take(t.Context(), turnsAtHot)
			return err
		})
	}))
	b.requireTurns(t, 0)
	require.NoError(t, b.limiter.InTx(t.Context(), func(tx pgx.Tx) error {
		_, err := b.limiter.WithTx(tx).Take(t.Context(), Define("quiet", PerHour(100)).Global())
		held, _ := b.turns(t)
		require.Zero(t, held, "no transactions have conflicted there")
		return err
	}))
	err := b.limiter.InTx(WithQueue(t.Context(), Define("hot", PerHour(1)).For("")), func(pgx.Tx) error { return nil })
	require.ErrorIs(t, err, ErrInvalidKey)
}

// The body of a transaction runs once, before its turn and after it. Its SET LOCAL stays in effect, and a lock timeout
// of the wait does not.
func TestSettingsMadeBeforeATurnStay(t *testing.T) {
	t.Parallel()
	b := newSharing(t)
	settings := func(tx pgx.Tx, want ...string) error {
		got := make([]string, 3)
		err := tx.QueryRow(t.Context(), `SELECT current_setting('transaction_isolation'), current_setting('lock_timeout'),
			current_setting('application_name')`).Scan(&got[0], &got[1], &got[2])
		require.Equal(t, want, got[:len(want)])
		return err
	}
	require.NoError(t, b.limiter.InTx(t.Context(), func(tx pgx.Tx) error {
		if _, err := tx.Exec(t.Context(), `SET LOCAL application_name = 'mine'`); err != nil {
			return err
		}
		if _, err := b.limiter.WithTx(tx).Take(t.Context(), turnsAtHot); err != nil {
			return err
		}
		return settings(tx, "serializable", "0", "mine")
	}))
	require.NoError(t, b.takeHot(WithQueue(t.Context(), turnsAtHot), func(tx pgx.Tx) error { return settings(tx, "serializable", "0") }))
	var pgErr *pgconn.PgError
	_, err := b.pool.Exec(t.Context(), `ALTER TABLE ratelimit.buckets RENAME TO elsewhere`)
	require.NoError(t, err)
	err = b.takeHot(t.Context(), nil)
	require.ErrorIs(t, err, ErrNotMigrated)
	require.ErrorAs(t, err, &pgErr)
	b.requireTurns(t, 0)
}

// Every verb waits before its first statement, and the answer is the same as without a wait.
func TestEveryVerbWaitsForItsSharedTurn(t *testing.T) {
	t.Parallel()
	bucketed := Define("bucketed", TokenBucket{Rate: 10, Period: 36525 * Day, MaxReserved: 10}).For("key")
	other := Define("other", PerHour(10)).For("key")
	sliding := Define("sliding", SlidingWindow{Rate: 10, Period: time.Hour}).For("key")
	sharded := Define("sharded", TokenBucket{Rate: 10, Period: 36525 * Day, Shards: 2}).For("key")
	slots := Define("slots", Concurrency{Slots: 10}).For("key")
	takes := func(requests ...Request) func(context.Context, *Limiter) error {
		return func(ctx context.Context, l *Limiter) error { return l.Require(ctx, requests...) }
	}
	for name, verb := range map[string]func(context.Context, *Limiter) error{
		"take": takes(bucketed),
		"two":  takes(bucketed, other),
		"one after the other": func(ctx context.Context, l *Limiter) error {
			return errors.Join(l.Require(ctx, bucketed), l.Require(ctx, other))
		},
		"sliding": takes(sliding),
		"sharded": takes(sharded),
		"credit":  func(ctx context.Context, l *Limiter) error { return l.Credit(ctx, bucketed) },
		"charge":  func(ctx context.Context, l *Limiter) error { return l.Charge(ctx, bucketed) },
		"reset":   func(ctx context.Context, l *Limiter) error { return l.Reset(ctx, bucketed) },
		"refused": func(ctx context.Context, l *Limiter) error {
			err := l.Require(ctx, bucketed.Cost(5), other.Cost(10))
			require.ErrorIs(t, l.Require(ctx, bucketed, other.Cost(10)), ErrLimited)
			return err
		},
		"reserve": func(ctx context.Context, l *Limiter) error {
			r, err := l.Reserve(ctx, bucketed.Cost(10))
			return errors.Join(err, r.Err())
		},
		"acquire": func(ctx context.Context, l *Limiter) error {
			lease, err := l.Acquire(ctx, slots)
			return errors.Join(err, lease.Err())
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeExec} {
				b := newSharing(t, func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = mode })
				for _, limit := range []string{"bucketed", "other", "sliding", "sharded", "slots"} {
					for shard := range int32(4) { // two rows are 2 and 3
						b.limiter.queues.Conflict(true, bucket.Key{Name: limit, Key: "key", Shard: shard})
					}
				}
				require.NoError(t, b.limiter.InTx(t.Context(), func(tx pgx.Tx) error {
					err := verb(t.Context(), b.limiter.WithTx(tx))
					held, _ := b.turns(t)
					require.Equal(t, 1, held)
					return err
				}))
				b.requireTurns(t, 0)
			}
		})
	}
}
