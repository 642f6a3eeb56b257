package integration_test

import (
	"context"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// A caller who loses a conflict inside a savepoint of its own gets the server's error once, and can continue from the savepoint.
// Earlier writes stay, and other buckets work, but the lost bucket fails for this snapshot.
func TestAConflictInASavepointIsTheCallers(t *testing.T) {
	t.Parallel()
	for level, iso := range map[string]pgx.TxIsoLevel{"RepeatableRead": pgx.RepeatableRead, "Serializable": pgx.Serializable} {
		for verb, call := range map[string]verb{
			"Take":          taking(calls.For("lost")),
			"TakeSeveral":   taking(calls.For("lost"), roomy.For("lost")),
			"TakeFromShard": taking(shardedCalls.For("lost").Cost(callsCapacity/8+1), calls.For("lost")),
			"Reserve":       reserving(calls.For("lost")),
		} {
			t.Run(level+"/"+verb, func(t *testing.T) {
				t.Parallel()
				seen := &tracer{}
				s, ctx := newStand(t, func(c *pgxpool.Config) { c.ConnConfig.Tracer = seen }), t.Context()
				require.NoError(t, s.takeOutside(ctx, "lost"))
				takeOne(t, s.outside.limiter, shardedCalls.For("lost"))
				tx := s.begin(t, iso)
				require.NoError(t, s.send(ctx, tx, "kept"))
				require.NoError(t, s.takeOutside(ctx, "lost")) // after the snapshot
				takeOne(t, s.outside.limiter, shardedCalls.For("lost").Cost(callsCapacity/2))
				for range 2 {
					savepoint, err := tx.Begin(ctx)
					require.NoError(t, err)
					require.NoError(t, s.send(ctx, savepoint, "undone"))
					batches, alone := seen.sent()
					allowed, err := call(ctx, s.limiter.WithTx(savepoint))
					require.False(t, allowed)
					require.Equal(t, "40001", sqlstate(err))
					require.True(t, ratelimit.IsRetryable(err))
					require.NotErrorIs(t, err, ratelimit.ErrContended, "nothing was tried again")
					require.NotErrorIs(t, err, ratelimit.ErrCommitUnknown)
					batchesAfter, aloneAfter := seen.sent()
					require.LessOrEqual(t, batchesAfter+aloneAfter-batches-alone, 4, "it was asked for once")
					_, err = savepoint.Exec(ctx, `SELECT 1`)
					require.Equal(t, "25P02", sqlstate(err), "the savepoint is spoilt, as after any error")
					require.NoError(t, savepoint.Rollback(ctx))
				}
				require.NoError(t, s.send(ctx, tx, "after"))
				require.NoError(t, tx.Commit(ctx))
				s.requireTakenFrom(t, map[string]int{"kept": 1, "after": 1, "undone": 0, "lost": 2})
				require.Equal(t, 2, s.messages(t))
				require.Zero(t, s.outside.count(t, `SELECT count(*) FROM ratelimit.reservations`))
				s.requireHealthy(t)
			})
		}
	}
}

// InTx does not run its function again for a conflict that this has undone by itself.
func TestInTxLeavesAConflictInASavepointToItsFunction(t *testing.T) {
	t.Parallel()
	s, ctx := newStand(t), t.Context()
	require.NoError(t, s.takeOutside(ctx, "lost"))
	runs := 0
	err := s.limiter.InTx(ctx, func(tx pgx.Tx) error {
		runs++
		if err := s.send(ctx, tx, "kept"); err != nil {
			return err
		}
		if err := s.takeOutside(context.WithoutCancel(ctx), "lost"); err != nil {
			return err
		}
		err := pgx.BeginFunc(ctx, tx, func(savepoint pgx.Tx) error { return s.send(ctx, savepoint, "lost") })
		if sqlstate(err) != "40001" {
			return errors.Join(errors.New("it did not lose"), err)
		}
		return s.send(ctx, tx, "after")
	})
	require.NoError(t, err)
	require.Equal(t, 1, runs)
	s.requireTakenFrom(t, map[string]int{"kept": 1, "after": 1, "lost": 2})
	require.Equal(t, 2, s.messages(t))
	s.requireHealthy(t)
}

// requireTakenFrom checks how many tokens of calls are missing from the bucket of each key.
func (s *stand) requireTakenFrom(t *testing.T, taken map[string]int) {
	t.Helper()
	for key, want := range taken {
		require.Equal(t, want, s.outside.count(t, `SELECT coalesce(round(sum($1 - value)), 0)::integer FROM ratelimit.buckets
			WHERE name = 'calls' AND key = $2`, callsCapacity, key), key)
	}
}
