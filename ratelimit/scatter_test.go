package ratelimit

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

// planOf returns the plan of a call.
func planOf(t *testing.T, reserve bool, requests ...Request) *plan {
	t.Helper()
	p, err := new(Limiter).plan(requests, reserve)
	require.NoError(t, err)
	return p
}

func TestScatter(t *testing.T) {
	t.Parallel()
	narrow := Define("narrow", PerSecond(8))
	wide := Define("wide", TokenBucket{Rate: 8, Period: time.Second, Shards: 8})
	pair := Define("pair", TokenBucket{Rate: 8, Period: time.Second, MaxReserved: NoDebt, Shards: 2})

	t.Run("AsksAnotherRowTheSecondTime", func(t *testing.T) {
		t.Parallel()
		p := planOf(t, false, wide.For("a"), wide.For("b"), narrow.For("a"), pair.For("a"))
		const lanes = 8000
		var asked [2][8]int
		for range lanes {
			lane := rand.Uint64()
			first, second := p.scatter(lane, 0), p.scatter(lane, 1)
			require.Equal(t, first, p.scatter(lane, 0), "the same lane leads to the same row")
			for i, b := range p.buckets {
				if !b.sharded() {
					require.Equal(t, b, first.buckets[i])
					require.Equal(t, b, second.buckets[i])
					continue
				}
				require.NotEqual(t, first.buckets[i].shard, second.buckets[i].shard)
				require.Equal(t, b.terms.OfShard(), first.buckets[i].terms)
				require.Equal(t, b.cost, first.buckets[i].cost)
			}
			asked[0][first.buckets[2].shard]++
			asked[1][second.buckets[2].shard]++
		}
		for try := range asked {
			for shard, n := range asked[try] {
				require.InDelta(t, lanes/8, n, lanes/40, "try %d asks row %d as often as the others", try, shard)
			}
		}
	})
	t.Run("LeavesToAllRowsWhatOneCannotHold", func(t *testing.T) {
		t.Parallel()
		require.NotNil(t, planOf(t, false, wide.For("a").Cost(1)).scatter(0, 0))
		require.Nil(t, planOf(t, false, wide.For("a").Cost(1.5)).scatter(0, 0))
		require.Nil(t, planOf(t, false, wide.For("a").Cost(1), pair.For("a").Cost(4.5)).scatter(0, 0))
		require.NotNil(t, planOf(t, false, narrow.For("a").Cost(8), pair.For("a").Cost(4)).scatter(0, 0))
	})
	t.Run("OwesNothingOnOneRow", func(t *testing.T) {
		t.Parallel()
		p := planOf(t, true, wide.For("a"))
		require.Zero(t, p.scatter(0, 0).buckets[0].lowest)
		require.Nil(t, p.scatter(0, 1), "what is not there is owed by all")
		require.NotNil(t, planOf(t, true, pair.For("a")).scatter(0, 1), "which this limit does not allow")
		require.Nil(t, planOf(t, true, wide.For("a").Cost(9)).scatter(0, 0))
	})
}

func TestLane(t *testing.T) {
	t.Parallel()
	type transaction struct{ pgx.Tx }
	limiter := &Limiter{pool: &recorder{}, db: &recorder{}}

	t.Run("IsTheSameInATransaction", func(t *testing.T) {
		t.Parallel()
		tx := &transaction{}
		first, second := limiter.WithTx(tx), limiter.WithTx(tx)
		require.Equal(t, first.lane(), second.lane())
		require.NotEqual(t, limiter.WithTx(tx).lane(), limiter.WithTx(&transaction{&transaction{}}).lane())
	})
	t.Run("IsTheSameInAllAttemptsOfInTx", func(t *testing.T) {
		t.Parallel()
		attempts := &places{}
		first, second := limiter.WithTx(&lentTx{places: attempts}), limiter.WithTx(&lentTx{places: attempts})
		require.Equal(t, first.lane(), second.lane())
		require.NotEqual(t, limiter.WithTx(&lentTx{places: attempts}).lane(), limiter.WithTx(&lentTx{places: &places{}}).lane())
	})
	t.Run("IsAnyOutsideOfOne", func(t *testing.T) {
		t.Parallel()
		first := limiter.lane()
		require.NotEqual(t, first, limiter.lane())
		byValue := limiter.WithTx(transaction{}) // which no address tells from another
		first = byValue.lane()
		require.NotEqual(t, first, byValue.lane())
	})
	t.Run("SpreadsTransactionsEvenly", func(t *testing.T) {
		t.Parallel()
		const transactions = 8000
		var all []*transaction
		var taken [8]int
		for range transactions {
			all = append(all, &transaction{})
			taken[limiter.WithTx(all[len(all)-1]).lane()%8]++
		}
		for shard, n := range taken {
			require.InDelta(t, transactions/8, n, transactions/40, "shard %d", shard)
		}
	})
}
