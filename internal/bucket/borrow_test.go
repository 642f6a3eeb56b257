package bucket_test

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/bucket/buckettest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
)

// The numbers of these tests are whole in units of 2^-20 of a token, so that float64 holds them all, and a model in whole
// numbers has to agree to the last bit.
const tokenUnits = int64(1) << 20

// wholeLimit is a limit in whole numbers: rate units arrive with each step.
type wholeLimit struct{ capacity, rate, step, phase int64 }

// terms returns the limit as the algebra has it.
func (l wholeLimit) terms() bucket.Terms {
	steps := 1.0
	rate := float64(l.rate) / float64(tokenUnits)
	if l.step == 1 {
		steps, rate = float64(tokenUnits), float64(l.rate)
	}
	return bucket.Terms{
		Kind: bucket.Steps{}, Capacity: float64(l.capacity) / float64(tokenUnits), Rate: rate, Steps: steps, Step: l.step,
		Phase: bucket.PhaseOf(l.phase, l.step), Shards: 1,
	}
}

// wholeBucket is a bucket in whole numbers.
type wholeBucket struct {
	limit     wholeLimit
	value, ts int64
	stored    bool
}

// begun returns the begin of the step that holds at an instant, which is not before 1970.
func (b *wholeBucket) begun(now int64) int64 { return now - (now-b.limit.phase)%b.limit.step }

func (b *wholeBucket) isWrong(now int64) bool {
	return b.ts > b.begun(now)+b.limit.step+time.Minute.Microseconds()
}

// tokens returns what the bucket holds at an instant, in units.
func (b *wholeBucket) tokens(now int64) int64 {
	if !b.stored {
		return b.limit.capacity
	}
	held := b.value
	if begun := b.begun(now); begun > b.ts {
		held += (begun - b.ts + b.limit.step - 1) / b.limit.step * b.limit.rate
	}
	return min(held, b.limit.capacity)
}

func (b *wholeBucket) set(units, now int64) {
	begun := b.begun(now)
	if b.stored && !b.isWrong(now) {
		begun = max(begun, b.ts)
	}
	b.value, b.ts, b.stored = units, begun, true
}

// fix brings a bucket back to an instant that a wrong clock has left in the future.
func (b *wholeBucket) fix(now int64) {
	if b.stored && b.isWrong(now) {
		b.ts = b.begun(now)
	}
}

// wholeCall is a call: the costs that each tenant borrows, and the direct costs of the pool.
type wholeCall struct {
	own    []int64 // in units; 0: the tenant is not part of it
	direct int64   // -1: the pool is not asked for itself
}

// allowed tries all ways to pay for the call: each tenant from his own bucket, or from the pool.
func (c wholeCall) allowed(owns []*wholeBucket, pool *wholeBucket, now int64) bool {
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
func (c wholeCall) asks(owns []*wholeBucket, pool *wholeBucket) (asks []bucket.Ask) {
	lender := bucket.Key{Name: "pool"}
	for i, cost := range c.own {
		if cost > 0 {
			asks = append(asks, bucket.Ask{
				Key: bucket.Key{Name: "own", Key: fmt.Sprint(i)}, Terms: owns[i].limit.terms(),
				Cost: float64(cost) / float64(tokenUnits), Lender: &lender,
			})
		}
	}
	a := bucket.Ask{Key: lender, Terms: pool.limit.terms(), Cost: float64(max(c.direct, 0)) / float64(tokenUnits)}
	if c.direct < 0 {
		a.Lowest = -1e300
	}
	return append(asks, a)
}

// drawLimit draws a token bucket or a fixed window.
func drawLimit(src *rand.Rand, rate int64) wholeLimit {
	l := wholeLimit{capacity: (1 + src.Int64N(16)) * tokenUnits, rate: rate * (1 + src.Int64N(4)), step: 1}
	if src.IntN(3) == 0 {
		l.step = 50_000 + src.Int64N(500_000)
		l.phase, l.rate = src.Int64N(l.step), (1+src.Int64N(8))*tokenUnits/2
	}
	return l
}

// TestBorrowAgreesWithAModelInWholeNumbers makes random calls, with clocks that step back, a little or by more than a minute, and
// limits that change. Decisions, buckets and waits must equal the model's to the last bit.
func TestBorrowAgreesWithAModelInWholeNumbers(t *testing.T) {
	t.Parallel()
	testsize.EachSeed(t, borrowHistories)
}

func borrowHistories(t *testing.T, seed uint64) {
	t.Helper()
	steps := testsize.Of(2_500, 5_000)
	src := rand.New(rand.NewPCG(seed, 7))
	allowed, borrowed, refused := 0, 0, 0
	var memory *bucket.Memory
	var owns []*wholeBucket
	var pool *wholeBucket
	now := int64(1_700_000_000_000_000)
	for step := range steps {
		if step%500 == 0 {
			memory, pool, owns = bucket.NewMemory(), &wholeBucket{limit: drawLimit(src, 8)}, nil
			for range 3 {
				owns = append(owns, &wholeBucket{limit: drawLimit(src, 2)})
			}
		}
		switch src.IntN(60) {
		case 0:
			now -= src.Int64N(30_000_000)
		case 1:
			now -= 60_000_000 + src.Int64N(300_000_000)
		case 2:
			b := append(owns, pool)[src.IntN(4)]
			l := drawLimit(src, 4)
			if l.step, l.phase = b.limit.step, b.limit.phase; l.step > 1 {
				l.rate = tokenUnits
			}
			b.limit = l
		default:
			now += src.Int64N(400_000)
		}
		call := wholeCall{own: make([]int64, len(owns)), direct: -1}
		for i := range owns {
			if src.IntN(2) == 0 {
				call.own[i] = (1 + src.Int64N(24)) * tokenUnits / 4
			}
		}
		if src.IntN(4) == 0 {
			call.direct = src.Int64N(8) * tokenUnits / 4
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
				if held := owns[i].tokens(now); cost > 0 && held >= cost {
					owns[i].set(held-cost, now)
				} else if cost > 0 {
					borrowed++
					owns[i].fix(now)
				}
			}
			pool.set(pool.tokens(now)-total, now)
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
		requireHolds(t, append([]*wholeBucket{pool}, owns...), memory, now, step)
	}
	require.Greater(t, min(allowed, borrowed, refused), steps/250)
}

// requireWait checks that the call is allowed after its RetryAfter, and not a microsecond before.
func requireWait(t *testing.T, call wholeCall, owns []*wholeBucket, pool *wholeBucket, asks []bucket.Ask, answers []bucket.Answer, now int64) {
	t.Helper()
	var wait time.Duration
	for i, w := range bucket.BorrowWaits(asks, answers) {
		require.Equal(t, w > 0, !answers[i].Allowed && (asks[i].Lender != nil || anyRefused(asks, answers)))
		if wait = max(wait, w); w == 0 && !answers[i].Allowed {
			o := asks[i].Tell(&answers[i], asks[i].Lowest, &bucket.Content{})
			wait = max(wait, o.RetryAfter)
		}
	}
	fixed := func(b *wholeBucket) *wholeBucket { c := *b; c.fix(now); return &c }
	var later []*wholeBucket
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
func requireHolds(t *testing.T, want []*wholeBucket, memory *bucket.Memory, now int64, step int) {
	t.Helper()
	for i, b := range want {
		k := bucket.Key{Name: "pool"}
		if i > 0 {
			k = bucket.Key{Name: "own", Key: fmt.Sprint(i - 1)}
		}
		ask := []bucket.Ask{{Key: k, Terms: b.limit.terms(), Lowest: -1e300}}
		answers := memory.Take(ask, now)
		require.Equal(t, float64(b.tokens(now))/float64(tokenUnits), buckettest.Tokens(ask[0].Terms, answers[0].State, now), "step %d, bucket %d", step, i)
	}
}

// TestMostUnitsIsTheMost compares the units that are had of several buckets with the most that the model in whole numbers
// finds, one after the other.
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
			b := &wholeBucket{limit: drawLimit(src, 2), stored: true}
			b.value, b.ts = src.Int64N(16*tokenUnits)-4*tokenUnits, now-src.Int64N(2_000_000)
			b.ts = b.begun(b.ts)
			cost := (1 + src.Int64N(12)) * tokenUnits / 4
			want = min(want, max(0, int(b.tokens(now)/cost)))
			if b.tokens(now) < 0 {
				want = 0
			}
			asks = append(asks, bucket.Ask{Key: bucket.Key{Name: fmt.Sprint(i)}, Terms: b.limit.terms(), Cost: float64(cost) / float64(tokenUnits)})
			rows = append(rows, bucket.State{Value: float64(b.value) / float64(tokenUnits), TS: b.ts})
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
