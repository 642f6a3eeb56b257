package store

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
)

func TestPickShards(t *testing.T) {
	t.Parallel()
	narrow := tokenBucket("narrow", 8, time.Second, 8, 100)
	wide := tokenBucket("wide", 8, time.Second, 8, 100).over(8)
	pair := tokenBucket("pair", 8, time.Second, 8, 0).over(2) // which may owe nothing

	t.Run("AsksAnotherRowTheSecondTime", func(t *testing.T) {
		t.Parallel()
		asks := []bucket.Ask{narrow.ask("a", 1), pair.ask("a", 1), wide.ask("a", 1), wide.ask("b", 1)}
		seeds, random := testsize.Of(4_000, 8_000), testsize.Rand(t)
		var asked [2][8]int
		for range seeds {
			seed := random.Uint64()
			first, second := pickShards(asks, seed, 0), pickShards(asks, seed, 1)
			require.Equal(t, first, pickShards(asks, seed, 0), "the same seed leads to the same row")
			for i, a := range asks {
				if !a.Sharded() {
					require.Equal(t, a, first[i])
					require.Equal(t, a, second[i])
					continue
				}
				require.NotEqual(t, first[i].Key.Shard, second[i].Key.Shard)
				for _, row := range []bucket.Ask{first[i], second[i]} {
					require.Equal(t, a.Key, row.Key.Whole())
					require.Equal(t, a.Terms.OfShard(), row.Terms)
					require.Equal(t, a.Cost, row.Cost)
				}
			}
			asked[0][first[3].Key.Shard]++
			asked[1][second[3].Key.Shard]++
		}
		for attempt := range asked {
			for shard, n := range asked[attempt] {
				require.InDelta(t, seeds/8, n, float64(seeds)/40, "attempt %d asks row %d as often as the others", attempt, shard)
			}
		}
	})
	t.Run("LeavesToAllRowsWhatOneCannotHold", func(t *testing.T) {
		t.Parallel()
		for _, attempt := range []int{0, 1} {
			require.NotNil(t, pickShards([]bucket.Ask{wide.ask("a", 1)}, 0, attempt))
			require.Nil(t, pickShards([]bucket.Ask{wide.ask("a", 1.5)}, 0, attempt))
			require.Nil(t, pickShards([]bucket.Ask{pair.ask("a", 4.5), wide.ask("a", 1)}, 0, attempt))
			require.NotNil(t, pickShards([]bucket.Ask{narrow.ask("a", 8), pair.ask("a", 4)}, 0, attempt))
		}
	})
	t.Run("OwesNothingOnOneRow", func(t *testing.T) {
		t.Parallel()
		asks := reserving(wide.ask("a", 1)).Asks
		require.Negative(t, asks[0].Lowest)
		require.Zero(t, pickShards(asks, 0, 0)[0].Lowest)
		require.Nil(t, pickShards(asks, 0, 1), "what is not there is owed by all")
		require.NotNil(t, pickShards(reserving(pair.ask("a", 1)).Asks, 0, 1), "which this limit does not allow")
		require.Nil(t, pickShards(reserving(wide.ask("a", 9)).Asks, 0, 0))
	})
}

// waitingRoom is a Queue.
type waitingRoom struct{ _ int }

func (*waitingRoom) Enter(context.Context, []bucket.Ask) {}

func TestTheSeedOfTheRows(t *testing.T) {
	t.Parallel()
	type transaction struct{ pgx.Tx }
	store := New(DefaultSchema, standing)
	seed := func(s Session) uint64 { return s.seed() }
	inTx := func(tx Conn, queue Queue) uint64 { return seed(store.InTx(tx, owner{}, queue)) }

	t.Run("IsTheSameInATransaction", func(t *testing.T) {
		t.Parallel()
		tx := &transaction{}
		first, second := inTx(tx, nil), inTx(tx, nil)
		require.Equal(t, first, second)
		require.NotEqual(t, first, inTx(&transaction{&transaction{}}, nil))
		onPool := store.OnPool(&transaction{}, owner{})
		first, second = seed(onPool.BoundTo(tx, owner{})), seed(onPool.BoundTo(tx, owner{}))
		require.Equal(t, first, second)
	})
	t.Run("IsTheSameInAllAttemptsThatQueue", func(t *testing.T) {
		t.Parallel()
		queue := &waitingRoom{}
		first, second := &transaction{}, &transaction{&transaction{}}
		require.Equal(t, inTx(first, queue), inTx(second, queue))
		require.NotEqual(t, inTx(first, queue), inTx(first, &waitingRoom{}))
	})
	t.Run("IsAnyOutsideOfOne", func(t *testing.T) {
		t.Parallel()
		onPool := store.OnPool(&transaction{}, owner{})
		first, second := seed(onPool), seed(onPool)
		require.NotEqual(t, first, second)
		byValue := transaction{} // which no address tells from another
		first, second = inTx(byValue, nil), inTx(byValue, nil)
		require.NotEqual(t, first, second)
	})
	t.Run("SpreadsTransactionsEvenly", func(t *testing.T) {
		t.Parallel()
		const transactions = 8000
		var all []*transaction
		var taken [8]int
		for range transactions {
			all = append(all, &transaction{})
			taken[inTx(all[len(all)-1], nil)%8]++
		}
		for shard, n := range taken {
			require.InDelta(t, transactions/8, n, transactions/40, "shard %d", shard)
		}
	})
}
