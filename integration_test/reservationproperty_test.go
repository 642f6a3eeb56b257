package integration_test

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// TestReservationsAgreeWithTheExactModel holds random lives of reservations, with clocks that step back and
// transactions that are undone, to the model in rational numbers. Every bucket is compared after every step.
func TestReservationsAgreeWithTheExactModel(t *testing.T) {
	t.Parallel()
	testsize.EachSeed(t, func(t *testing.T, seed uint64) {
		h := newReservationHistory(t, seed, nil)
		steps := testsize.Of(200, 1000)
		for range steps {
			h.step(t)
		}
		h.finish(t, steps)
	})
}

// reservationHistory is a database, and the model of it.
type reservationHistory struct {
	bundle   *bundle
	clock    *clock
	random   *rand.Rand
	limiters [2]*ratelimit.Limiter // the second releases what expires

	now, truth int64 // the database's clock, and time as it passes
	begun      []int64
	model      *model

	eras map[string][]ratelimit.Policy // what the limits change to, by name; none: they stay as they are

	tx    pgx.Tx // open for so many more steps
	left  int
	saved *model // what a rollback goes back to

	close, lookups int
}

func newReservationHistory(t *testing.T, seed uint64, eras map[string][]ratelimit.Policy) *reservationHistory {
	t.Helper()
	h := &reservationHistory{bundle: setup(t), clock: &clock{}, random: rand.New(rand.NewPCG(seed, 3)), now: clockNoon.UnixMicro(), model: &model{}, eras: eras}
	h.clock.set(clockNoon)
	for i := range h.limiters {
		h.limiters[i] = h.bundle.with(t, h.config(i == 1))
	}
	for name, policy := range map[string]ratelimit.Policy{
		"a bounded":  ratelimit.TokenBucket{Rate: 10, Period: time.Second, MaxReserved: 25},
		"b uneven":   ratelimit.TokenBucket{Rate: 7, Period: 3 * time.Second, Capacity: 10. / 3},
		"c windows":  ratelimit.FixedWindow{Rate: 20, Period: 2 * time.Second, Start: clockNoon},
		"d rollover": ratelimit.FixedWindow{Rate: 5, Period: time.Second, Capacity: 12, MaxReserved: 30, Start: clockNoon},
	} {
		limit := ratelimit.Define(name[:1], policy)
		for _, key := range []string{"one", "two"} {
			h.model.buckets = append(h.model.buckets, *newExactBucket(limit.For(key), h.now))
		}
	}
	slices.SortStableFunc(h.model.buckets, func(a, b exactBucket) int {
		return int(a.request.Limit().Name()[0]) - int(b.request.Limit().Name()[0])
	})
	h.begun = make([]int64, len(h.model.buckets))
	return h
}

// step makes one random call, or lets time pass, and compares.
func (h *reservationHistory) step(t *testing.T) {
	t.Helper()
	switch {
	case h.tx == nil && h.random.IntN(20) == 0:
		level := levels[h.random.IntN(len(levels))].level
		h.tx, h.left, h.saved = h.bundle.begin(t, level), 1+h.random.IntN(50), h.model.clone()
	case h.tx != nil && h.left == 0:
		h.end(t)
	}
	h.left--
	if len(h.eras) > 0 && h.random.IntN(25) == 0 {
		h.change(t)
	}
	switch n := h.random.IntN(100); {
	case n < 22:
		h.move(h.aWhile())
	case n < 38:
		h.take(t)
	case n < 58:
		h.reserve(t)
	case n < 70:
		h.endOne(t, true)
	case n < 78:
		h.endOne(t, false)
	case n < 82:
		h.credit(t)
	case n < 84:
		h.expire(t)
	case n < 95:
		h.start(t, false)
	default:
		h.start(t, true)
	}
	h.compare(t)
}

// end ends the transaction, one way or the other.
func (h *reservationHistory) end(t *testing.T) {
	t.Helper()
	if h.random.IntN(2) == 0 {
		require.NoError(t, h.tx.Rollback(t.Context()))
		for i := range h.saved.buckets { // a policy is not in the database
			h.saved.buckets[i].exactTerms = h.model.buckets[i].exactTerms
		}
		h.model = h.saved
	} else {
		require.NoError(t, h.tx.Commit(t.Context()))
	}
	h.tx, h.saved = nil, nil
}

// limiter returns one of the two, in the transaction if there is one.
func (h *reservationHistory) limiter(which int) *ratelimit.Limiter {
	if h.tx != nil {
		return h.limiters[which].WithTx(h.tx)
	}
	return h.limiters[which]
}

// aWhile draws how far the clock moves: mostly a little forward.
func (h *reservationHistory) aWhile() int64 {
	span := int64(h.random.ExpFloat64() * 1.5e6)
	switch h.random.IntN(60) {
	case 0:
		return -span % (modelMinute / 2)
	case 1:
		return -modelMinute - 10*span
	case 2:
		return 40*span + modelStale
	case 3:
		return modelExpire
	case 4:
		return 0
	case 5:
		if h.random.IntN(4) == 0 {
			return modelKeep + modelExpire
		}
	}
	return span
}

// move moves the database's clock. Forward, time passes; back, it was set.
func (h *reservationHistory) move(span int64) {
	for _, m := range []*model{h.model, h.saved} {
		if m == nil || span < 0 {
			continue
		}
		for _, w := range m.work {
			if !w.due && w.ready <= h.now+span {
				b, ready := &m.buckets[w.bucket], max(w.ready, h.now)
				w.due, w.ran, w.windows = true, h.truth+ready-h.now, h.begun[w.bucket]+b.window(ready)-b.window(h.now)
			}
		}
	}
	if span > 0 {
		for i := range h.begun {
			h.begun[i] += h.model.buckets[i].window(h.now+span) - h.model.buckets[i].window(h.now)
		}
		h.truth += span
	}
	h.now += span
	h.clock.set(time.UnixMicro(h.now))
}

// draw draws one to three buckets and costs of up to so many capacities.
func (h *reservationHistory) draw(most float64) (map[int]float64, []ratelimit.Request) {
	costs, requests := map[int]float64{}, []ratelimit.Request{}
	for _, i := range h.random.Perm(len(h.model.buckets))[:1+h.random.IntN(3)] {
		request := h.model.buckets[i].request
		cost := 0.01 + request.Limit().Capacity()*most*h.random.Float64()*h.random.Float64()
		if h.random.IntN(2) == 0 {
			cost = float64(1 + h.random.IntN(3))
		}
		costs[i], requests = cost, append(requests, request.Cost(cost))
	}
	return costs, requests
}

// charge charges the model's buckets, or credits them if the cost is below zero. A bucket whose clock was wrong starts over: the
// work that waits for it then runs beside newly admitted work, as if its tokens had been returned.
func (h *reservationHistory) charge(costs map[int]float64) {
	for i, cost := range costs {
		h.mended(i)
		b := &h.model.buckets[i]
		if cost < 0 {
			h.model.give(i, b.credit(h.now, -cost, b.capacity), h.truth)
		} else {
			b.charge(h.now, cost)
		}
	}
}

func (h *reservationHistory) mended(i int) {
	if !h.model.buckets[i].wrong(h.now) {
		return
	}
	waiting := 0.0
	for _, w := range h.model.work {
		if w.bucket == i && !w.due {
			waiting += w.cost
		}
	}
	h.model.give(i, waiting, h.truth)
}

// admit records work that was admitted, and checks when: at that instant nothing is owed any more, and a
// microsecond before something still was.
func (h *reservationHistory) admit(t *testing.T, costs map[int]float64, at int64) (all []*work) {
	t.Helper()
	owing := at == h.now
	for i, cost := range costs {
		b := &h.model.buckets[i]
		ready := b.paid(h.now)
		value, off := b.at(at)
		require.GreaterOrEqual(t, float(value), -off, "%s is owed", b.request)
		before, off := b.at(at - 1)
		owing = owing || float(before) < off
		w := &work{bucket: i, cost: cost, ready: ready, due: ready <= h.now, ran: h.truth, windows: h.begun[i]}
		all = append(all, w)
	}
	require.True(t, owing, "nothing is owed before")
	h.model.work = append(h.model.work, all...)
	return all
}

// enough returns whether costs may be taken at an instant, and whether they must, as they may where no
// rounding can make a difference.
func (h *reservationHistory) enough(costs map[int]float64, reserving bool, at int64) (may, must bool) {
	may, must = true, true
	for i, cost := range costs {
		b := &h.model.buckets[i]
		owed := rat(0)
		if reserving {
			owed = b.maxOwed
		}
		if b.wrong(h.now) {
			mended := *b
			mended.ts, b = b.floor(h.now), &mended
		}
		spare, off := b.spare(at, cost, owed)
		may, must = may && spare >= -off, must && spare >= off
	}
	return may, must
}

// decided checks a decision against what the buckets hold. If the exact value is within the rounding of the bound, either is right.
// wait is the RetryAfter of a refusal, and must be true.
func (h *reservationHistory) decided(t *testing.T, costs map[int]float64, reserving, allowed bool, wait time.Duration) {
	t.Helper()
	h.lookups++
	may, must := h.enough(costs, reserving, h.now)
	if may != must {
		h.close++
	}
	if allowed {
		require.True(t, may, "%v is too much", costs)
		require.Zero(t, wait)
		return
	}
	require.False(t, must, "%v is there", costs)
	require.Positive(t, wait)
	may, _ = h.enough(costs, reserving, h.now+wait.Microseconds())
	require.True(t, may, "after %v there is not enough for %v", wait, costs)
	_, must = h.enough(costs, reserving, h.now+wait.Microseconds()-1)
	require.False(t, must, "before %v there is enough for %v", wait, costs)
	for i := range costs {
		h.mended(i)
		if b := &h.model.buckets[i]; b.wrong(h.now) {
			b.mended = b.floor(h.now) // or later, where only others refused
		}
	}
}
