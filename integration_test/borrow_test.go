package integration_test

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Three tenants with guarantees of 50, 30 and 20 a second of a pool of 100 a second.
var (
	lent       = ratelimit.Define("lent", ratelimit.PerSecond(100))
	guarantees = []ratelimit.Limit{
		ratelimit.Define("gold", ratelimit.PerSecond(50)),
		ratelimit.Define("silver", ratelimit.PerSecond(30)),
		ratelimit.Define("bronze", ratelimit.PerSecond(20)),
	}
)

// tenants are callers who take one token each, again and again, in each step of the clock.
type tenants struct {
	*desk
	pool string
	now  time.Duration
}

// run has the tenants that are busy ask until each is refused, in every step of span, in turns. It returns what each got.
func (x *tenants) run(t *testing.T, span time.Duration, busy ...int) (got [3]int) {
	t.Helper()
	step := testsize.Of(20*time.Millisecond, 10*time.Millisecond)
	for end := x.now + span; x.now < end; {
		x.now += step
		x.at(x.now)
		asking := append([]int(nil), busy...)
		for len(asking) > 0 {
			rest := asking[:0]
			for _, tenant := range asking {
				d, err := x.limiter.Take(t.Context(), ratelimit.Borrow(guarantees[tenant].For(x.pool), lent.For(x.pool)))
				require.NoError(t, err)
				if d.Allowed {
					got[tenant]++
					rest = append(rest, tenant)
				}
			}
			asking = rest
		}
	}
	return got
}

func TestBorrowGuaranteesAndLends(t *testing.T) {
	t.Parallel()
	onEach(t, testBorrowGuaranteesAndLends, onPostgres, inMemory)
}

func testBorrowGuaranteesAndLends(t *testing.T, on backend) {
	x := &tenants{desk: on.setup(t).desk(t, ratelimit.Config{}), pool: "one"}
	all := []int{0, 1, 2}
	x.run(t, time.Second, all...) // what the full buckets held is gone
	busy := x.run(t, 2*time.Second, all...)
	require.InDeltaSlice(t, []float64{100, 60, 40}, floats(busy), 1, "each has his guarantee")

	value, err := x.limiter.Value(t.Context(), lent.For(x.pool))
	require.NoError(t, err)
	require.Greater(t, value.Tokens, -100.0, "what the pool owes, because all had full buckets when it was empty")
	idle := x.run(t, 3*time.Second, 1, 2) // gold leaves 50 a second
	t.Logf("all busy for 2 s: %v; gold idle for 3 s: %v", busy, idle)
	require.GreaterOrEqual(t, idle[1], 90, "silver has its guarantee")
	require.GreaterOrEqual(t, idle[2], 60, "bronze has its guarantee")
	require.InDelta(t, 300+value.Tokens, idle[1]+idle[2], 1, "and they have all that gold leaves")

	first := x.run(t, time.Second, all...)
	t.Logf("gold is back, the first second: %v", first)
	require.GreaterOrEqual(t, first[0], 99, "what it saved, and its guarantee of the first second")
	require.GreaterOrEqual(t, first[1], 30)
	require.GreaterOrEqual(t, first[2], 20)

	again := x.run(t, 2*time.Second, all...)
	require.InDeltaSlice(t, []float64{100, 60, 40}, floats(again), 1)
}

func floats(got [3]int) []float64 {
	return []float64{float64(got[0]), float64(got[1]), float64(got[2])}
}

// Several processes take at the same time, each call in its own way. The clock stands still, and moves when all have been refused.
// In each step each tenant gets at least the gain of his guarantee, and all together at most the bound.
func TestBorrowHoldsUnderConcurrentLoad(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "thousands of takes")
	b := setup(t, func(c *pgxpool.Config) { c.MaxConns = 8 })
	for _, c := range callers() {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			d := b.desk(t, ratelimit.Config{})
			var total [3]int64
			const steps = 4
			for step := range steps { // the second tenant is idle in the middle
				d.at(time.Duration(step) * 200 * time.Millisecond)
				var got [3]atomic.Int64
				require.NoError(t, atonce.Do(6, func(worker int) error {
					tenant := worker % 3
					for tenant != 1 || step == 0 || step == steps-1 {
						answer, err := c.take(t.Context(), b.db(), d.limiter, ratelimit.Borrow(guarantees[tenant].For(c.name), lent.For(c.name)))
						if err != nil {
							return err
						}
						if !answer.Allowed {
							return nil
						}
						got[tenant].Add(1)
					}
					return nil
				}))
				for tenant := range got {
					total[tenant] += got[tenant].Load()
				}
				taken := float64(total[0] + total[1] + total[2])
				require.LessOrEqual(t, taken, 100+50+30+20+100*0.2*float64(step))
			}
			guaranteed := []float64{50 + 50*0.6, 30 + 30*0.6, 20 + 20*0.6}
			for tenant := range total {
				least := guaranteed[tenant]
				if tenant == 1 { // while it was idle its bucket was full: it has at most what that holds
					least = 30
				}
				require.GreaterOrEqual(t, float64(total[tenant]), least, "tenant %d", tenant)
			}
		})
	}
}

// One who borrows twice in a call, two who borrow from one pool, and the pool asked for itself, are one decision.
func TestBorrowTwiceInACall(t *testing.T) {
	t.Parallel()
	d := setup(t).desk(t, ratelimit.Config{})
	own, pool := ratelimit.Define("own", hoard(4)), ratelimit.Define("pool", hoard(10))
	ada, bob := ratelimit.Borrow(own.For("ada"), pool.Global()), ratelimit.Borrow(own.For("bob"), pool.Global())
	take := func(requests ...ratelimit.Request) ratelimit.Decision {
		t.Helper()
		answer, err := d.limiter.Take(t.Context(), requests...)
		require.NoError(t, err)
		return answer
	}
	answer := take(ada.Cost(2), ada.Cost(3), bob, pool.Global())
	require.True(t, answer.Allowed)
	require.Len(t, answer.States, 7, "two for each that borrows")
	require.True(t, answer.States[0].Borrowed, "five together are more than ada has")
	require.False(t, answer.States[4].Borrowed)
	require.InDelta(t, 3, answer.Remaining, 0)
	d.requireTokens(t, 4, own.For("ada"))
	d.requireTokens(t, 3, own.For("bob"), pool.Global())

	answer = take(ada.Cost(3), bob.Cost(4))
	require.False(t, answer.Allowed, "bob needs four of the pool's three")
	require.True(t, answer.States[0].Allowed)
	require.Equal(t, century/10, answer.RetryAfter, "the pool gains its fourth token before bob does")
	d.requireTokens(t, 3, own.For("bob"), pool.Global())
	require.True(t, take(ada.Cost(3), bob.Cost(3)).Allowed, "each pays for himself")
	d.requireTokens(t, -3, pool.Global())
	require.False(t, take(bob).Allowed)
	require.True(t, take(ada).Allowed)
}

// A call waits for a locked row, and locks both rows in the order of all calls.
func TestBorrowWaitsForRowsThatAreHeld(t *testing.T) {
	t.Parallel()
	b := setup(t)
	own, pool := ratelimit.Define("own", hoard(4)), ratelimit.Define("pool", hoard(10))
	for _, held := range []ratelimit.Limit{own, pool} {
		for _, c := range callers() {
			t.Run(held.Name()+"/"+c.name, func(t *testing.T) { // not parallel: waiting counts all
				require.NoError(t, b.limiter.Reset(t.Context(), own.For(t.Name()), pool.For(t.Name())))
				holder := b.begin(t, pgx.ReadCommitted)
				requireAllowed(t, taking(held.For(t.Name())), b.limiter.WithTx(holder))
				waited := make(chan error, 1)
				var answer ratelimit.Decision
				go func() {
					var err error
					answer, err = c.take(t.Context(), b.db(), b.limiter, ratelimit.Borrow(own.For(t.Name()), pool.For(t.Name())).Cost(4))
					waited <- err
				}()
				eventually(t, "the caller waits for the row", func() bool { return waiting(t, b.pool) == 1 })
				require.NoError(t, holder.Commit(t.Context()))
				require.NoError(t, <-waited)
				require.True(t, answer.Allowed)
				require.Equal(t, held.Name() == "own", answer.States[0].Borrowed)
			})
		}
	}
}

// A refusal in a transaction leaves no row locked and none made, and what a transaction took is undone with it.
func TestBorrowIsPartOfTheTransaction(t *testing.T) {
	t.Parallel()
	onEach(t, testBorrowIsPartOfTheTransaction, onPostgres, inMemory)
}

func testBorrowIsPartOfTheTransaction(t *testing.T, on backend) {
	b := on.setup(t)
	own, pool := ratelimit.Define("own", hoard(4)), ratelimit.Define("pool", hoard(10))
	request := ratelimit.Borrow(own.For("ada"), pool.Global())
	for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		tx := b.begin(t, level)
		requireAllowed(t, taking(request.Cost(4)), b.limiter.WithTx(tx))
		requireAllowed(t, taking(request.Cost(6)), b.limiter.WithTx(tx))
		refused, err := b.limiter.WithTx(tx).Take(t.Context(), request, ratelimit.Borrow(own.For("new"), pool.For("new")))
		require.NoError(t, err)
		require.False(t, refused.Allowed)
		require.True(t, refused.States[2].Allowed)
		require.NoError(t, tx.Rollback(t.Context()))
		require.Empty(t, b.rows(t, ""))
	}
	tx := b.begin(t, pgx.ReadCommitted)
	requireAllowed(t, taking(ratelimit.Borrow(own.For("bob"), pool.Global()).Cost(10)), b.limiter.WithTx(tx))
	require.NoError(t, tx.Commit(t.Context()))
	d, err := b.limiter.Check(t.Context(), request)
	require.NoError(t, err)
	require.True(t, d.Allowed, "ada has her own")
	d, err = b.limiter.Check(t.Context(), request.Cost(5))
	require.NoError(t, err)
	require.False(t, d.Allowed)
	require.Equal(t, century/10*5, d.RetryAfter.Round(time.Hour))
}

// The pair of buckets stays consistent while a limit changes, two versions of the program run, and connections break: each take
// came from both, or from the pool.
func TestBorrowSurvivesCuts(t *testing.T) {
	t.Parallel()
	for _, side := range []cut{cutRequest, cutAnswer} {
		t.Run(fmt.Sprint(side), func(t *testing.T) {
			t.Parallel()
			s, cutter := newCutStand(t)
			own, pool := ratelimit.Define("own", hoard(40)), ratelimit.Define("pool", hoard(100))
			request := ratelimit.Borrow(own.For("cutKey"), pool.For("cutKey"))
			taken := 0
			for range testsize.Of(3, 12) {
				for _, words := range []string{"SELECT", "INSERT", "UPDATE", "commit", "cutKey"} {
					cutter.arm(words, side, 1)
					d, err := s.limiter.Take(t.Context(), request)
					if err == nil && d.Allowed {
						taken++
					}
				}
			}
			cutter.arm("", cutRequest, 0)
			fromOwn, fromPool := 40-s.outside.heldOr(t, "own", "cutKey", 40), 100-s.outside.heldOr(t, "pool", "cutKey", 100)
			require.GreaterOrEqual(t, fromPool, float64(taken))
			require.InDelta(t, min(fromPool, 40), fromOwn, 0.01, "own paid first, and the pool was charged as much")
		})
	}
}

// heldOr is held, or what a bucket without a row holds.
func (b *bundle) heldOr(t *testing.T, name, key string, full float64) float64 {
	t.Helper()
	for _, r := range b.rows(t, key) {
		if r.Name == name {
			return r.Value
		}
	}
	return full
}
