package bucket_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/bucket/buckettest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
)

// town is a pool, and the tenants' own buckets, which borrow from it. Its tokens are multiples of 2^-20, so that float64 holds them all.
type town struct {
	memory *bucket.Memory
	asks   [4]bucket.Ask // that take nothing; the pool is the last
	pool   bucket.Key
}

func newTown(src *rand.Rand) *town {
	w := &town{memory: bucket.NewMemory(), pool: bucket.Key{Name: "pool"}}
	for i := range w.asks {
		w.asks[i] = bucket.Ask{Key: bucket.Key{Name: "own", Key: fmt.Sprint(i)}, Terms: drawTerms(src, 2), Lowest: -1e300}
	}
	w.asks[3].Key, w.asks[3].Terms = w.pool, drawTerms(src, 8)
	return w
}

// drawTerms draws a token bucket or a fixed window.
func drawTerms(src *rand.Rand, rate int64) bucket.Terms {
	capacity := float64(1 + src.Int64N(16))
	if src.IntN(3) == 0 {
		period := time.Duration(50_000+src.Int64N(500_000)) * time.Microsecond
		return buckettest.FixedWindow(float64(1+src.Int64N(8))/2, period, capacity, src.Int64N(period.Microseconds()))
	}
	return buckettest.TokenBucket(float64(rate*(1+src.Int64N(4))), 1<<20*time.Microsecond, capacity)
}

// tokens returns what the buckets hold, the pool last.
func (w *town) tokens(now int64) (held []float64) {
	for i, answer := range w.memory.Take(w.asks[:], now) {
		held = append(held, buckettest.Tokens(w.asks[i].Terms, w.asks[i].Terms.FixClock(answer.State, now), now))
	}
	return held
}

// loan is a call: the costs that each tenant borrows, and the direct cost of the pool.
type loan struct {
	own    [3]float64 // 0: the tenant is not part of it
	direct float64    // -1: the pool is not asked for itself
}

func drawLoan(src *rand.Rand) loan {
	call := loan{direct: -1}
	for i := range call.own {
		if src.IntN(2) == 0 {
			call.own[i] = float64(1+src.Int64N(24)) / 4
		}
	}
	if src.IntN(4) == 0 {
		call.direct = float64(src.Int64N(8)) / 4
	}
	return call
}

// allowed tries all ways to pay for the call: each tenant from his own bucket, or from the pool.
func (c loan) allowed(held []float64) bool {
	for ways := range 1 << len(c.own) {
		fromPool, ok, borrows := max(c.direct, 0), true, false
		for i, cost := range c.own {
			switch {
			case cost == 0:
			case ways&(1<<i) != 0:
				fromPool, borrows = fromPool+cost, true
			default:
				ok = ok && held[i] >= cost
			}
		}
		if ok && (!borrows && c.direct < 0 || held[3] >= fromPool) {
			return true
		}
	}
	return false
}

// pay returns what the buckets hold after the call, and whether a tenant borrows. A tenant who has enough does not.
func (c loan) pay(held []float64) (left []float64, borrows bool) {
	left = slices.Clone(held)
	left[3] -= max(c.direct, 0)
	for i, cost := range c.own {
		left[3] -= cost
		if held[i] >= cost {
			left[i] -= cost
		} else {
			borrows = true
		}
	}
	return left, borrows
}

// asks returns the call as the algebra has it.
func (c loan) asks(w *town) (asks []bucket.Ask) {
	for i, cost := range c.own {
		if cost > 0 {
			asks = append(asks, bucket.Ask{Key: w.asks[i].Key, Terms: w.asks[i].Terms, Cost: cost, Lender: &w.pool})
		}
	}
	pool := w.asks[3]
	if c.direct >= 0 {
		pool.Cost, pool.Lowest = c.direct, 0
	}
	return append(asks, pool)
}

// TestBorrowPaysFromTheGuaranteeOrThePool makes random calls, with clocks that step back, a little or by more than a minute, and
// limits that change. A call is allowed if its tenants can pay for it from any of the buckets. Buckets and waits are exact.
func TestBorrowPaysFromTheGuaranteeOrThePool(t *testing.T) {
	t.Parallel()
	testsize.EachSeed(t, func(t *testing.T, seed uint64) {
		t.Helper()
		steps := testsize.Of(2_500, 5_000)
		src := rand.New(rand.NewPCG(seed, 7))
		allowed, borrowed, refused := 0, 0, 0
		var w *town
		now := opening
		for step := range steps {
			if step%500 == 0 {
				w = newTown(src)
			}
			switch src.IntN(60) {
			case 0:
				now -= src.Int64N(30_000_000)
			case 1:
				now -= 60_000_000 + src.Int64N(300_000_000)
			case 2:
				terms := &w.asks[src.IntN(4)].Terms
				if terms.Capacity, terms.Rate = float64(1+src.Int64N(16)), 1; terms.Step == 1 {
					terms.Rate = float64(4 * (1 + src.Int64N(4)))
				}
			default:
				now += src.Int64N(400_000)
			}
			call := drawLoan(src)
			asks := call.asks(w)
			if bucket.AllCostless(asks) {
				continue
			}
			held := w.tokens(now)
			want := call.allowed(held)
			answers := slices.Clone(w.memory.Take(asks, now))
			require.Equal(t, want, bucket.AllAllowed(answers), "step %d", step)
			if !want {
				refused++
				require.Equal(t, held, w.tokens(now), "step %d", step)
				w.requireWait(t, call, asks, answers, now)
				continue
			}
			left, borrows := call.pay(held)
			require.Equal(t, left, w.tokens(now), "step %d", step)
			if allowed++; borrows {
				borrowed++
			}
		}
		require.Greater(t, min(allowed, borrowed, refused), steps/250)
	})
}

// requireWait checks that the call is allowed after its RetryAfter, and not a microsecond before.
func (w *town) requireWait(t *testing.T, call loan, asks []bucket.Ask, answers []bucket.Answer, now int64) {
	t.Helper()
	var wait time.Duration
	borrows := false // whether a part that borrows was refused
	for i := range asks {
		borrows = borrows || asks[i].Lender != nil && !answers[i].Allowed
	}
	for i, w := range bucket.BorrowWaits(asks, answers) {
		require.Equal(t, w > 0, !answers[i].Allowed && (asks[i].Lender != nil || borrows))
		if wait = max(wait, w); w == 0 && !answers[i].Allowed {
			wait = max(wait, asks[i].Tell(&answers[i], asks[i].Lowest, &bucket.Content{}).RetryAfter)
		}
	}
	require.Positive(t, wait)
	if wait < time.Duration(bucket.Horizon)*time.Microsecond {
		require.True(t, call.allowed(w.tokens(now+wait.Microseconds())))
		require.False(t, call.allowed(w.tokens(now+wait.Microseconds()-1)))
		return
	}
	require.False(t, call.allowed(w.tokens(now+(1000*time.Hour).Microseconds())))
}

// TestMostUnitsIsTheLargestNumber compares the units that are had of several buckets with the most that each of them holds.
func TestMostUnitsIsTheLargestNumber(t *testing.T) {
	t.Parallel()
	testsize.EachSeed(t, func(t *testing.T, seed uint64) {
		t.Helper()
		steps, some := testsize.Of(2_500, 5_000), 0
		src := rand.New(rand.NewPCG(seed, 11))
		for range steps {
			now := opening + src.Int64N(1_000_000_000)
			n := 1 + src.IntN(40)
			var asks []bucket.Ask
			var rows []bucket.State
			want := n
			for i := range 1 + src.IntN(3) {
				a := bucket.Ask{Key: bucket.Key{Name: fmt.Sprint(i)}, Terms: drawTerms(src, 2), Cost: float64(1+src.Int64N(12)) / 4}
				row := bucket.State{Value: float64(src.Int64N(16<<20)-4<<20) / (1 << 20), TS: a.Terms.Begin(now - src.Int64N(2_000_000))}
				want = min(want, max(0, int(math.Floor(buckettest.Tokens(a.Terms, row, now)/a.Cost))))
				asks, rows = append(asks, a), append(rows, row)
			}
			got, answers := pageOf(asks, now, rows...).TakeUpTo(asks, n, nil)
			require.Equal(t, want, got)
			require.Equal(t, got > 0, bucket.AllAllowed(answers))
			some += min(got, 1)
		}
		require.Greater(t, some, steps/5)
	})
}

// A pool lends none of the tokens that the same call takes from it directly.
func TestAPoolDoesNotLendTokensThatTheSameCallTakes(t *testing.T) {
	t.Parallel()
	own, pool := bucket.Key{Name: "own"}, bucket.Key{Name: "pool"}
	terms := bucket.Terms{Kind: bucket.Steps{}, Capacity: 10, Rate: 1, Steps: 3_600_000_000, Step: 1, Shards: 1}
	asks := []bucket.Ask{{Key: own, Terms: terms, Cost: 4, Lender: &pool}, {Key: pool, Terms: terms, Cost: 3}}
	for held, allowed := range map[float64]bool{6: false, 7: true} {
		answers := pageOf(asks, 0, bucket.State{Value: 0}, bucket.State{Value: held}).Look(asks, nil)
		require.Equal(t, allowed, bucket.AllAllowed(answers), "the pool holds %v", held)
	}
}

// pageOf returns a page with the rows of the asks, which have one row each.
func pageOf(asks []bucket.Ask, now int64, rows ...bucket.State) *bucket.Page {
	p := bucket.NewPage(asks)
	p.Now = now
	for i := range asks {
		at, _ := p.Index(asks[i].Key)
		p.Put(at, rows[i], false)
	}
	return p
}
