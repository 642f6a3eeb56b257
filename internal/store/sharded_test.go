//go:build !generalpath

package store

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
)

func TestPickRows(t *testing.T) {
	t.Parallel()
	pickRows := func(asks []bucket.Ask, seed uint64) []bucket.Ask {
		c := taking(slices.Clone(asks)...)
		if c.pickRows(seed); c.way != byStatement {
			return nil
		}
		return c.takes
	}
	narrow := tokenBucket("narrow", 8, time.Second, 8, 100)
	wide := tokenBucket("wide", 8, time.Second, 8, 100).over(8)
	pair := tokenBucket("pair", 8, time.Second, 8, 0).over(2) // which may owe nothing

	asks := []bucket.Ask{narrow.ask("a", 1), pair.ask("a", 1), wide.ask("a", 1), wide.ask("b", 1)}
	seeds, random := testsize.Of(4_000, 8_000), testsize.Rand(t)
	var asked [8]int
	for range seeds {
		seed := random.Uint64()
		rows := pickRows(asks, seed)
		require.Equal(t, rows, pickRows(asks, seed), "the same seed leads to the same row")
		for i, a := range asks {
			if !a.Sharded() {
				require.Equal(t, a, rows[i])
				continue
			}
			require.Equal(t, a.Key, rows[i].Key.Whole())
			require.Equal(t, a.Terms.OfShard(), rows[i].Terms)
			require.Equal(t, a.Cost, rows[i].Cost)
		}
		asked[rows[3].Key.Shard]++
	}
	for shard, n := range asked {
		require.InDelta(t, seeds/8, n, float64(seeds)/40, "row %d is asked as often as the others", shard)
	}

	// All rows together give what one cannot hold.
	require.NotNil(t, pickRows([]bucket.Ask{wide.ask("a", 1)}, 0))
	require.Nil(t, pickRows([]bucket.Ask{wide.ask("a", 1.5)}, 0))
	require.Nil(t, pickRows([]bucket.Ask{pair.ask("a", 4.5), wide.ask("a", 1)}, 0))
	require.NotNil(t, pickRows([]bucket.Ask{narrow.ask("a", 8), pair.ask("a", 4)}, 0))

	// One row owes nothing.
	asks = reserving(wide.ask("a", 1)).Asks
	require.Negative(t, asks[0].Lowest)
	require.Zero(t, pickRows(asks, 0)[0].Lowest)
	require.Nil(t, pickRows(reserving(wide.ask("a", 9)).Asks, 0))
}

// TestFromRows estimates what buckets hold from one of their rows, and leaves the refusal of a row undecided.
func TestFromRows(t *testing.T) {
	t.Parallel()
	asks := []bucket.Ask{tokenBucket("one", 8, time.Second, 8, 0).ask("a", 1), tokenBucket("wide", 8, time.Second, 16, 0).over(8).ask("a", 1)}
	of := func(one, wide bool) []bucket.Answer {
		return []bucket.Answer{{Allowed: one, State: bucket.State{Value: 3}}, {Allowed: wide, State: bucket.State{Value: 0.5}}}
	}
	for name, test := range map[string]struct {
		answers   []bucket.Answer
		undecided bool
		want      float64
	}{
		"Taken":          {of(true, true), false, 8*1.5 - 1},
		"AnotherRefuses": {of(false, true), false, 8 * 0.5},
		"TheRowRefuses":  {of(true, false), true, 8 * 0.5},
		"BothRefuse":     {of(false, false), true, 8 * 0.5},
	} {
		c := taking(slices.Clone(asks)...)
		c.Answers = test.answers
		c.fromRows()
		require.Equal(t, test.undecided, c.way == byLooking, name)
		require.Equal(t, 3.0, test.answers[0].State.Value, name)
		require.Equal(t, test.want, test.answers[1].State.Value, name)
	}
}

// waitingRoom is a Queue.
type waitingRoom struct{ _ int }

func (*waitingRoom) Enter(context.Context, []bucket.Ask) {}

// The seed of the rows is the same in a transaction, and in all attempts that queue. Otherwise it is any, evenly.
func TestTheSeedOfTheRows(t *testing.T) {
	t.Parallel()
	type transaction struct{ pgx.Tx }
	store := New(Options{Schema: DefaultSchema, AsOf: standing})
	seed := func(s Session) uint64 { return s.seed() }
	inTx := func(tx Conn, queue Queue) uint64 { return seed(store.InTx(tx, owner{}, queue)) }
	onPool := store.OnPool(&transaction{}, owner{})
	tx, other, queue := &transaction{}, &transaction{&transaction{}}, &waitingRoom{}

	first, second := inTx(tx, nil), inTx(tx, nil)
	require.Equal(t, first, second)
	require.NotEqual(t, first, inTx(other, nil))
	first, second = seed(onPool.BoundTo(tx, owner{})), seed(onPool.BoundTo(tx, owner{}))
	require.Equal(t, first, second)

	require.Equal(t, inTx(tx, queue), inTx(other, queue))
	require.NotEqual(t, inTx(tx, queue), inTx(tx, &waitingRoom{}))

	first, second = seed(onPool), seed(onPool)
	require.NotEqual(t, first, second)
	byValue := transaction{} // which no address tells from another
	first, second = inTx(byValue, nil), inTx(byValue, nil)
	require.NotEqual(t, first, second)

	const transactions = 8000
	var all []*transaction // else a new one has the address of an old one
	var taken [8]int
	for range transactions {
		all = append(all, &transaction{})
		taken[inTx(all[len(all)-1], nil)%8]++
	}
	for shard, n := range taken {
		require.InDelta(t, transactions/8, n, transactions/40, "shard %d", shard)
	}
}

// A call does not wait for a locked row while another row of its bucket is free.
func TestABatchTakesFromAnotherRowWhenOneIsHeld(t *testing.T) {
	t.Parallel()
	s, wide := newStand(t), still("wide", 100).over(2)
	s.makeRows("key", wide)
	s.tx(`SELECT FROM ratelimit.buckets WHERE shard = 0 FOR UPDATE`)
	for range 20 { // half of which pick the row that is held
		s.allows(taking(wide.ask("key", 1)))
	}
	require.Equal(t, []float64{80}, s.held(wide.ask("key", 0)))
}
