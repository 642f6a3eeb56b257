package integration_test

import (
	"context"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// A wrong clock is reported once, by the call that finds it.
func TestAWrongClockIsToldOfOnce(t *testing.T) {
	t.Parallel()
	b := setup(t)
	sharded := ratelimit.Define("sharded", ratelimit.TokenBucket{Rate: 8, Period: century, Shards: 8})
	for name, call := range map[string]call{
		"Take": everyCall["Take"],
		"AtOnce": func(ctx context.Context, limiter *ratelimit.Limiter, _ string, request ratelimit.Request) error {
			return atonce.Do(32, func(int) error { return errOf(limiter.Take(ctx, request)) })
		},
		"InTx": func(ctx context.Context, limiter *ratelimit.Limiter, _ string, request ratelimit.Request) error {
			return limiter.InTx(ctx, func(tx pgx.Tx) error { return errOf(limiter.WithTx(tx).Take(ctx, request)) })
		},
	} {
		for _, limit := range []ratelimit.Limit{pinch, sharded} {
			t.Run(name+"/"+limit.Name(), func(t *testing.T) {
				t.Parallel()
				var mended atomic.Int64
				limiter, request := b.with(t, ratelimit.Config{Observer: observing(func(event ratelimit.Event) {
					if _, is := event.(ratelimit.Mended); is {
						mended.Add(1)
					}
				})}), limit.For(t.Name())
				takeAll(t, limiter, request)
				b.exec(t, `UPDATE ratelimit.buckets SET ts = ts + $1 WHERE key = $2 AND shard = 0`, ratelimit.Day.Microseconds(), t.Name())
				for range 2 {
					require.NoError(t, call(t.Context(), limiter, "", request))
					require.EqualValues(t, 1, mended.Load())
				}
			})
		}
	}
}

// forgetful is a pool that deletes a row before a transaction begins, as Prune or a user may.
type forgetful struct {
	ratelimit.Pool
	key string
}

func (p forgetful) BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error) {
	if _, err := p.Exec(ctx, `DELETE FROM ratelimit.buckets WHERE key = $1`, p.key); err != nil {
		return nil, err
	}
	return p.Pool.BeginTx(ctx, options)
}

// A row that is deleted before its clock can be put right stands for a full bucket as it did. With Shards the call is decided on locked
// rows, which puts their clocks right.
func TestAWrongClockIsNotMendedIntoAnEmptyBucket(t *testing.T) {
	t.Parallel()
	fastPathOnly(t, "it deletes the row between two statements of the fast path")
	b := setup(t)
	request := pinch.For(t.Name())
	takeAll(t, b.limiter, request)
	b.exec(t, `UPDATE ratelimit.buckets SET ts = ts + $1 WHERE key = $2`, ratelimit.Day.Microseconds(), t.Name())
	limiter, err := ratelimit.New(forgetful{b.pool, t.Name()}, ratelimit.Config{NoBatching: true})
	require.NoError(t, err)
	requireRefused(t, limiter, []ratelimit.Request{request})
	require.InDelta(t, pinch.Capacity(), tokens(t, b.limiter, request), 1e-3)
	require.Empty(t, b.rows(t, t.Name()))
}

// What puts the clock of a row right concerns that row alone: it waits for no other, and makes none.
func TestAWrongClockIsPutRightWhereItIs(t *testing.T) {
	t.Parallel()
	for name, config := range map[string]ratelimit.Config{"Batching": {}, "NoBatching": {NoBatching: true}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			fastPathOnly(t, "the general path locks every row of a call")
			b := setup(t)
			limiter, other := b.with(t, config), ratelimit.Define("zother", hoard(2))
			for _, request := range []ratelimit.Request{pinch.For("wrong a"), pinch.For("wrong b"), other.For("held")} {
				takeAll(t, b.limiter, request)
			}
			b.exec(t, `UPDATE ratelimit.buckets SET ts = ts + $1 WHERE starts_with(key, 'wrong')`, ratelimit.Day.Microseconds())
			_, err := b.begin(t, pgx.ReadCommitted).Exec(t.Context(), `SELECT FROM ratelimit.buckets WHERE key = 'held' FOR UPDATE`)
			require.NoError(t, err)
			for _, requests := range [][]ratelimit.Request{
				{pinch.For("wrong a"), other.For("missing")},
				{pinch.For("wrong b"), other.For("held")},
			} {
				d, err := limiter.Take(t.Context(), requests...)
				require.NoError(t, err)
				require.False(t, d.Allowed)
			}
			require.Empty(t, b.rows(t, "missing"))
		})
	}
}
