package bucket_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/bucket/buckettest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
)

// account is a bucket by itself. The tokens of these tests are multiples of 2^-20, so that float64 holds them all.
type account struct {
	terms  bucket.Terms
	state  bucket.State
	stored bool
}

// row returns the row with a right clock.
func (b *account) row(now int64) bucket.State {
	if !b.stored {
		return b.terms.Full(now)
	}
	return b.terms.FixClock(b.state, now)
}

func (b *account) tokens(now int64) float64 { return buckettest.Tokens(b.terms, b.row(now), now) }

// take takes also what the bucket does not hold.
func (b *account) take(cost float64, now int64) {
	b.state, b.stored = b.terms.Kind.Charge(b.terms, b.row(now), now, cost), true
}

func (b *account) fix(now int64) { b.state = b.row(now) }

// loan is a call: the costs that each tenant borrows, and the direct costs of the pool.
type loan struct {
	own    []float64 // 0: the tenant is not part of it
	direct float64   // -1: the pool is not asked for itself
}

// allowed tries all ways to pay for the call: each tenant from his own bucket, or from the pool.
func (c loan) allowed(owns []*account, pool *account, now int64) bool {
	for ways := range 1 << len(owns) {
		fromPool, ok := max(c.direct, 0), true
		for i, cost := range c.own {
			switch {
			case cost == 0:
			case ways&(1<<i) != 0:
				fromPool += cost
			default:
				ok = ok && owns[i].tokens(now) >= cost
			}
		}
		asked := ways != 0 && fromPool > max(c.direct, 0) || c.direct >= 0
		if ok && (!asked || pool.tokens(now) >= fromPool) {
			return true
		}
	}
	return false
}

// asks returns the call as the algebra has it.
func (c loan) asks(owns []*account, pool *account) (asks []bucket.Ask) {
	lender := bucket.Key{Name: "pool"}
	for i, cost := range c.own {
		if cost > 0 {
			asks = append(asks, bucket.Ask{Key: bucket.Key{Name: "own", Key: fmt.Sprint(i)}, Terms: owns[i].terms, Cost: cost, Lender: &lender})
		}
	}
	a := bucket.Ask{Key: lender, Terms: pool.terms, Cost: max(c.direct, 0)}
	if c.direct < 0 {
		a.Lowest = -1e300
	}
	return append(asks, a)
}

// drawAccount draws a token bucket or a fixed window.
func drawAccount(src *rand.Rand, rate int64) *account {
	capacity := float64(1 + src.Int64N(16))
	if src.IntN(3) == 0 {
		period := time.Duration(50_000+src.Int64N(500_000)) * time.Microsecond
		return &account{terms: buckettest.FixedWindow(float64(1+src.Int64N(8))/2, period, capacity, src.Int64N(period.Microseconds()))}
	}
	return &account{terms: buckettest.TokenBucket(float64(rate*(1+src.Int64N(4))), 1<<20*time.Microsecond, capacity)}
}

// TestBorrowPaysInAnyWayThatThereIs makes random calls, with clocks that step back, a little or by more than a minute, and
// limits that change. A call is allowed if its tenants can pay for it from any of the buckets. Buckets and waits are exact.
func TestBorrowPaysInAnyWayThatThereIs(t *testing.T) {
	t.Parallel()
	testsize.EachSeed(t, borrowHistories)
}

func borrowHistories(t *testing.T, seed uint64) {
	t.Helper()
	steps := testsize.Of(2_500, 5_000)
	src := rand.New(rand.NewPCG(seed, 7))
	allowed, borrowed, refused := 0, 0, 0
	var memory *bucket.Memory
	var owns []*account
	var pool *account
	now := int64(1_700_000_000_000_000)
	for step := range steps {
		if step%500 == 0 {
			memory, pool, owns = bucket.NewMemory(), drawAccount(src, 8), []*account{drawAccount(src, 2), drawAccount(src, 2), drawAccount(src, 2)}
		}
		switch src.IntN(60) {
		case 0:
			now -= src.Int64N(30_000_000)
		case 1:
			now -= 60_000_000 + src.Int64N(300_000_000)
		case 2:
			b := append(owns, pool)[src.IntN(4)]
			if b.terms.Capacity, b.terms.Rate = float64(1+src.Int64N(16)), 1; b.terms.Step == 1 {
				b.terms.Rate = float64(4 * (1 + src.Int64N(4)))
			}
		default:
			now += src.Int64N(400_000)
		}
		call := loan{own: make([]float64, len(owns)), direct: -1}
		for i := range owns {
			if src.IntN(2) == 0 {
				call.own[i] = float64(1+src.Int64N(24)) / 4
			}
		}
		if src.IntN(4) == 0 {
			call.direct = float64(src.Int64N(8)) / 4
		}
		asks := call.asks(owns, pool)
		if bucket.AllCostless(asks) {
			continue
		}
		want := call.allowed(owns, pool, now)
		answers := memory.Take(asks, now)
		require.Equal(t, want, bucket.AllAllowed(answers), "step %d", step)
		if want {
			allowed += 1
			total := max(call.direct, 0)
			for i, cost := range call.own {
				total += cost
				if cost > 0 && owns[i].tokens(now) >= cost {
					owns[i].take(cost, now)
				} else if cost > 0 {
					borrowed++
					owns[i].fix(now)
				}
			}
			pool.take(total, now)
		} else {
			refused++
			requireWait(t, call, owns, pool, asks, answers, now)
			pool.fix(now)
			for i, cost := range call.own {
				if cost > 0 {
					owns[i].fix(now)
				}
			}
		}
		requireHolds(t, append([]*account{pool}, owns...), memory, now, step)
	}
	require.Greater(t, min(allowed, borrowed, refused), steps/250)
}

// requireWait checks that the call is allowed after its RetryAfter, and not a microsecond before.
func requireWait(t *testing.T, call loan, owns []*account, pool *account, asks []bucket.Ask, answers []bucket.Answer, now int64) {
	t.Helper()
	var wait time.Duration
	for i, w := range bucket.BorrowWaits(asks, answers) {
		require.Equal(t, w > 0, !answers[i].Allowed && (asks[i].Lender != nil || anyRefused(asks, answers)))
		if wait = max(wait, w); w == 0 && !answers[i].Allowed {
			o := asks[i].Tell(&answers[i], asks[i].Lowest, &bucket.Content{})
			wait = max(wait, o.RetryAfter)
		}
	}
	fixed := func(b *account) *account { c := *b; c.fix(now); return &c }
	var later []*account
	for _, b := range owns {
		later = append(later, fixed(b))
	}
	require.Positive(t, wait)
	if wait < time.Duration(bucket.Horizon)*time.Microsecond {
		require.True(t, call.allowed(later, fixed(pool), now+wait.Microseconds()))
		require.False(t, call.allowed(later, fixed(pool), now+wait.Microseconds()-1))
		return
	}
	require.False(t, call.allowed(later, fixed(pool), now+(1000*time.Hour).Microseconds()))
}

// anyRefused reports whether a part that borrows was refused.
func anyRefused(asks []bucket.Ask, answers []bucket.Answer) bool {
	for i := range asks {
		if asks[i].Lender != nil && !answers[i].Allowed {
			return true
		}
	}
	return false
}

// requireHolds checks what the buckets hold, the pool first.
func requireHolds(t *testing.T, want []*account, memory *bucket.Memory, now int64, step int) {
	t.Helper()
	for i, b := range want {
		k := bucket.Key{Name: "pool"}
		if i > 0 {
			k = bucket.Key{Name: "own", Key: fmt.Sprint(i - 1)}
		}
		ask := []bucket.Ask{{Key: k, Terms: b.terms, Lowest: -1e300}}
		answers := memory.Take(ask, now)
		require.Equal(t, b.tokens(now), buckettest.Tokens(ask[0].Terms, answers[0].State, now), "step %d, bucket %d", step, i)
	}
}

// TestMostUnitsIsTheMost compares the units that are had of several buckets with the most that each of them holds.
func TestMostUnitsIsTheMost(t *testing.T) {
	t.Parallel()
	testsize.EachSeed(t, mostUnits)
}

func mostUnits(t *testing.T, seed uint64) {
	t.Helper()
	steps := testsize.Of(2_500, 5_000)
	src := rand.New(rand.NewPCG(seed, 11))
	some := 0
	for range steps {
		now := int64(1_700_000_000_000_000) + src.Int64N(1_000_000_000)
		n := 1 + src.IntN(40)
		var asks []bucket.Ask
		var rows []bucket.State
		want := n
		for i := range 1 + src.IntN(3) {
			b := drawAccount(src, 2)
			ts := now - src.Int64N(2_000_000)
			b.state, b.stored = bucket.State{Value: float64(src.Int64N(16<<20)-4<<20) / (1 << 20), TS: b.terms.Begin(ts)}, true
			cost := float64(1+src.Int64N(12)) / 4
			want = min(want, max(0, int(math.Floor(b.tokens(now)/cost))))
			asks = append(asks, bucket.Ask{Key: bucket.Key{Name: fmt.Sprint(i)}, Terms: b.terms, Cost: cost})
			rows = append(rows, b.state)
		}
		got, answers := pageOf(asks, now, rows...).TakeUpTo(asks, n, nil)
		require.Equal(t, want, got)
		require.Equal(t, got > 0, bucket.AllAllowed(answers))
		if got > 0 {
			some++
		}
	}
	require.Greater(t, some, steps/5)
}

// A pool lends none of the tokens that the same call takes from it directly.
func TestAPoolDoesNotLendWhatTheCallTakesFromIt(t *testing.T) {
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
