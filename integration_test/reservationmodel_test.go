package integration_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// The documented behaviour of reservations, implemented a second time in whole numbers: tokens are whole, and so many arrive in each
// microsecond or window. Instants are microseconds since 1970.
const (
	modelStale  = 20 * time.Second
	modelExpire = time.Hour
)

// exactBucket holds value tokens at ts.
type exactBucket struct {
	request                         ratelimit.Request
	rate, period, capacity, maxOwed int64 // a period is a microsecond or a window, which begins at a multiple of it after noon
	value, ts                       int64
}

// exactReservation is a reservation.
type exactReservation struct {
	id               string
	state            ratelimit.ReservationState
	costs            map[int]int64 // by bucket
	ready, expires   int64
	started, release bool
	paid             map[int]int64 // from when on each bucket owes nothing
}

// reservationModel is the state of a database.
type reservationModel struct {
	buckets      []exactBucket
	reservations []exactReservation
}

func (m reservationModel) clone() reservationModel {
	return reservationModel{slices.Clone(m.buckets), slices.Clone(m.reservations)}
}

func exact(limit ratelimit.Limit, key string) exactBucket {
	b := exactBucket{request: limit.For(key), capacity: int64(limit.Capacity()), value: int64(limit.Capacity())}
	switch p := limit.Policy().(type) {
	case ratelimit.TokenBucket:
		b.rate, b.period, b.maxOwed = int64(p.Rate)/p.Period.Microseconds(), 1, int64(p.MaxReserved)
	case ratelimit.FixedWindow:
		b.rate, b.period, b.maxOwed = int64(p.Rate), p.Period.Microseconds(), int64(p.MaxReserved)
	}
	return b
}

// window returns the number of the period that holds an instant.
func (b *exactBucket) window(at int64) int64 {
	return (at - clockNoon.Add(-ratelimit.Week).UnixMicro()) / b.period
}

// at returns the tokens at now.
func (b *exactBucket) at(now int64) int64 {
	return min(b.capacity, b.value+max(0, b.window(now)-b.window(b.ts))*b.rate)
}

// charge takes an amount, or credits it if it is below zero. A credit counts no time: tokens since ts count later.
func (b *exactBucket) charge(now, amount int64) {
	if amount < 0 {
		b.value = min(b.capacity, b.value-amount)
		return
	}
	b.value, b.ts = b.at(now)-amount, max(b.ts, now)
}

// paid returns the first instant from now at which nothing is owed.
func (b *exactBucket) paid(now int64) int64 {
	if b.value >= 0 {
		return now
	}
	windows := (-b.value + b.rate - 1) / b.rate
	if b.period > 1 {
		return max(now, b.ts+windows*b.period-(b.ts-clockNoon.Add(-ratelimit.Week).UnixMicro())%b.period)
	}
	return max(now, b.ts+windows)
}

// reservationHistory is a database in memory, and the model of it.
type reservationHistory struct {
	*testing.T

	random   *rand.Rand
	desk     *desk
	limiters [2]*ratelimit.Limiter // the second gives back what expires
	now      int64
	model    reservationModel

	tx    pgx.Tx // open for so many more steps
	left  int
	saved reservationModel // what a rollback goes back to

	counts map[string]int
}

// TestReservationsAgreeWithTheExactModel holds random lives of reservations, with a clock that steps back and transactions that are
// undone, to the model. Every bucket is compared after every step.
func TestReservationsAgreeWithTheExactModel(t *testing.T) {
	t.Parallel()
	testsize.EachSeed(t, func(t *testing.T, seed uint64) {
		h := &reservationHistory{T: t, random: rand.New(rand.NewPCG(seed, 3)), now: clockNoon.UnixMicro(), counts: map[string]int{}}
		h.desk = inMemory.setup(t).desk(t, ratelimit.Config{})
		for i := range h.limiters {
			h.limiters[i] = h.desk.with(t, ratelimit.Config{
				AsOf: h.desk.clock.now, StaleAfter: modelStale, ExpireAfter: modelExpire, ReleaseExpired: i == 1,
			})
		}
		for i, policy := range []ratelimit.Policy{
			ratelimit.TokenBucket{Rate: 1e6, Period: time.Second, Capacity: 1e6, MaxReserved: 2.5e6},
			ratelimit.TokenBucket{Rate: 2e6, Period: time.Second, Capacity: 9e6, MaxReserved: 1e9},
			ratelimit.FixedWindow{Rate: 20, Period: 2 * time.Second, Start: clockNoon, MaxReserved: 1e9},
			ratelimit.FixedWindow{Rate: 5, Period: time.Second, Capacity: 12, MaxReserved: 30, Start: clockNoon},
		} {
			limit := ratelimit.Define(fmt.Sprint("limit", i), policy)
			h.model.buckets = append(h.model.buckets, exact(limit, "one"), exact(limit, "two"))
		}
		for range testsize.Of(2000, 20_000) {
			h.step()
		}
		for _, verb := range []string{"taken", "reserved", "refused", "settled", "cancelled", "credited", "expired", "started", "paid again", "renewed", "undone"} {
			require.Positive(t, h.counts[verb], "%s in %v", verb, h.counts)
		}
		if h.tx != nil {
			h.end()
		}
		h.move(1000 * 24 * time.Hour)
		h.compare() // no token is lost for good
	})
}

// step makes one random call, or lets time pass, and compares.
func (h *reservationHistory) step() {
	switch {
	case h.tx == nil && h.random.IntN(20) == 0:
		h.tx = h.desk.begin(h.T, levels[h.random.IntN(len(levels))].level)
		h.left, h.saved = 1+h.random.IntN(50), h.model.clone()
	case h.tx != nil && h.left == 0:
		h.end()
	}
	h.left--
	switch n := h.random.IntN(100); {
	case n < 22:
		h.pass()
	case n < 38:
		h.take()
	case n < 58:
		h.reserve()
	case n < 78:
		h.endOne(n < 70)
	case n < 82:
		h.credit()
	case n < 84:
		h.expire()
	default:
		h.start(n >= 95)
	}
	h.compare()
}

// end ends the transaction, one way or the other.
func (h *reservationHistory) end() {
	if h.random.IntN(2) == 0 {
		require.NoError(h, h.tx.Rollback(h.Context()))
		h.model = h.saved
		h.counts["undone"]++
	} else {
		require.NoError(h, h.tx.Commit(h.Context()))
	}
	h.tx = nil
}

// limiter returns one of the two, in the transaction if there is one.
func (h *reservationHistory) limiter(which int) *ratelimit.Limiter {
	if h.tx != nil {
		return h.limiters[which].WithTx(h.tx)
	}
	return h.limiters[which]
}

// pass moves the clock, mostly a little forward.
func (h *reservationHistory) pass() {
	span := time.Duration(h.random.ExpFloat64() * 1.5e9)
	switch h.random.IntN(60) {
	case 0:
		span = -span % (30 * time.Second)
	case 1:
		span = 40*span + modelStale
	case 2:
		span = modelExpire
	case 3:
		span = ratelimit.Week + modelExpire
	}
	h.move(span)
}

func (h *reservationHistory) move(span time.Duration) {
	h.now += span.Microseconds()
	h.desk.clock.set(time.UnixMicro(h.now))
}

// draw draws one to three buckets and costs of up to so many capacities.
func (h *reservationHistory) draw(most int64) (map[int]int64, []ratelimit.Request) {
	costs, requests := map[int]int64{}, []ratelimit.Request{}
	for _, i := range h.random.Perm(len(h.model.buckets))[:1+h.random.IntN(3)] {
		costs[i] = 1 + h.random.Int64N(1+h.random.Int64N(most*h.model.buckets[i].capacity))
		requests = append(requests, h.model.buckets[i].request.Cost(float64(costs[i])))
	}
	return costs, requests
}

// decided checks a decision against the buckets, and charges them. A refusal's wait is the shortest after which the call is allowed.
func (h *reservationHistory) decided(costs map[int]int64, reserving, allowed bool, wait time.Duration) {
	enough := func(at int64) bool {
		for i, cost := range costs {
			b := &h.model.buckets[i]
			if owed := b.at(at) - cost; owed < 0 && (!reserving || owed < -b.maxOwed) {
				return false
			}
		}
		return true
	}
	require.Equal(h, enough(h.now), allowed, "%v", costs)
	if !allowed {
		h.counts["refused"]++
		require.True(h, enough(h.now+wait.Microseconds()), "after %v there is not enough for %v", wait, costs)
		require.False(h, enough(h.now+wait.Microseconds()-1), "before %v there is enough for %v", wait, costs)
		return
	}
	for i, cost := range costs {
		h.model.buckets[i].charge(h.now, cost)
	}
}

func (h *reservationHistory) take() {
	costs, requests := h.draw(1)
	d, err := h.limiter(0).Take(h.Context(), requests...)
	require.NoError(h, err)
	h.decided(costs, false, d.Allowed, d.RetryAfter)
	h.counts["taken"]++
}

func (h *reservationHistory) reserve() {
	costs, requests := h.draw(2)
	which := h.random.IntN(2)
	checked, err := h.limiter(which).CheckReserve(h.Context(), requests...)
	require.NoError(h, err)
	h.compare()
	r, err := h.limiter(which).Reserve(h.Context(), requests...)
	require.NoError(h, err)
	require.Equal(h, [...]any{r.Allowed, r.RetryAfter, r.At, r.ReadyAt, r.StaleAt},
		[...]any{checked.Allowed, checked.RetryAfter, checked.At, checked.ReadyAt, checked.StaleAt}, "CheckReserve says what Reserve answers")
	h.decided(costs, true, r.Allowed, r.RetryAfter)
	if r.Allowed {
		made := exactReservation{id: r.ID, costs: costs, release: which == 1}
		h.paid(&made)
		made.expires = made.ready + modelExpire.Microseconds()
		require.Equal(h, made.ready, r.ReadyAt.UnixMicro())
		require.Equal(h, made.ready+modelStale.Microseconds(), r.StaleAt.UnixMicro())
		h.model.reservations = append(h.model.reservations, made)
		h.counts["reserved"]++
	}
}

// paid makes r open, and ready when its buckets owe nothing any more.
func (h *reservationHistory) paid(r *exactReservation) {
	r.state, r.ready, r.paid = ratelimit.Open, h.now, map[int]int64{}
	for i := range r.costs {
		r.paid[i] = h.model.buckets[i].paid(h.now)
		r.ready = max(r.ready, r.paid[i])
	}
}

// pick draws a reservation, of any state, the newer ones more often.
func (h *reservationHistory) pick() (r *exactReservation, found bool) {
	n := len(h.model.reservations)
	if n == 0 {
		return nil, false
	}
	return &h.model.reservations[max(0, n-1-int(h.random.ExpFloat64()*10))], true
}

// change charges the buckets of r so much more. Tokens go back only into the window that paid them.
func (h *reservationHistory) change(r *exactReservation, amounts map[int]int64) {
	for i, amount := range amounts {
		b := &h.model.buckets[i]
		if amount > 0 || amount < 0 && (b.period == 1 || b.window(h.now) <= b.window(r.paid[i])) {
			b.charge(h.now, amount)
		}
	}
}

// endOne settles or cancels.
func (h *reservationHistory) endOne(settle bool) {
	r, found := h.pick()
	if !found {
		return
	}
	var actual []ratelimit.Request
	final, amounts := ratelimit.Cancelled, map[int]int64{}
	for i, cost := range r.costs {
		switch {
		case !settle:
			amounts[i] = -cost
		case h.random.IntN(4) > 0: // or it keeps its estimate
			used := h.random.Int64N(2 * cost)
			amounts[i], actual = used-cost, append(actual, h.model.buckets[i].request.Cost(float64(used)))
		}
	}
	end := func() error { return h.limiter(0).Cancel(h.Context(), r.id) }
	if settle {
		final, end = ratelimit.Settled, func() error { return h.limiter(0).Settle(h.Context(), r.id, actual...) }
	}
	err := end()
	if r.state != final && r.state != ratelimit.Open {
		require.ErrorIs(h, err, ratelimit.ErrReservationEnded)
		return
	}
	require.NoError(h, err)
	if r.state == ratelimit.Open {
		r.state, r.expires = final, max(r.expires, h.now)
		h.change(r, amounts)
		h.counts[string(final)]++
	}
}

func (h *reservationHistory) credit() {
	costs, requests := h.draw(1)
	require.NoError(h, h.limiter(0).Credit(h.Context(), requests...))
	for i, cost := range costs {
		h.model.buckets[i].charge(h.now, -cost)
	}
	h.counts["credited"]++
}

func (h *reservationHistory) expire() {
	if h.tx != nil {
		return // in memory no rollback restores a reservation that Expire forgot
	}
	ended, err := h.limiter(0).Expire(h.Context())
	require.NoError(h, err)
	h.model.reservations = slices.DeleteFunc(h.model.reservations, func(r exactReservation) bool {
		return r.state != ratelimit.Open && r.expires < h.now-ratelimit.Week.Microseconds()
	})
	for i := range h.model.reservations {
		if r := &h.model.reservations[i]; r.state == ratelimit.Open && r.expires < h.now {
			r.state, r.expires = ratelimit.Expired, h.now
			ended--
			h.counts["expired"]++
			if r.release {
				amounts := map[int]int64{}
				for i, cost := range r.costs {
					amounts[i] = -cost
				}
				h.change(r, amounts)
			}
		}
	}
	require.Zero(h, ended)
}

// start starts or renews.
func (h *reservationHistory) start(renew bool) {
	r, found := h.pick()
	if !found {
		return
	}
	verb := h.limiter(0).Start
	if renew {
		verb = h.limiter(0).Renew
	}
	turn, err := verb(h.Context(), r.id)
	if !renew && r.state == ratelimit.Cancelled {
		require.ErrorIs(h, err, ratelimit.ErrReservationEnded)
		return
	}
	require.NoError(h, err)
	isStale := !r.started && r.state != ratelimit.Settled && h.now >= r.ready+modelStale.Microseconds()
	wait, restarted := max(0, r.ready-h.now), false
	switch {
	case renew || isStale || r.state == ratelimit.Expired && r.release:
		h.again(r, turn, renew)
		wait = turn.Wait.Microseconds()
	case r.started:
		wait, restarted = 0, true
		r.expires = max(r.expires, h.now+modelExpire.Microseconds())
	case r.state == ratelimit.Settled: // it keeps its turn, whenever that was
	default:
		r.started = wait == 0
		h.counts["started"]++
	}
	require.Equal(h, wait, turn.Wait.Microseconds())
	require.Equal(h, restarted, turn.Restarted)
	require.Equal(h, r.state, turn.State)
	require.Equal(h, r.ready, turn.ReadyAt.UnixMicro())
	require.Equal(h, r.ready+modelStale.Microseconds(), turn.StaleAt.UnixMicro())
}

// again checks a turn that is paid for again, or refused.
func (h *reservationHistory) again(r *exactReservation, turn ratelimit.Turn, renew bool) {
	before := h.model.clone().buckets
	allowed := true
	for i, cost := range r.costs {
		allowed = allowed && before[i].at(h.now)-cost >= -before[i].maxOwed
	}
	wait := turn.Wait
	h.decided(r.costs, true, allowed, wait)
	if !allowed {
		return
	}
	ready := r.ready
	h.paid(r)
	r.expires += r.ready - ready
	r.started = !renew && r.ready == h.now
	require.Equal(h, r.ready-h.now, wait.Microseconds())
	h.counts[map[bool]string{true: "renewed", false: "paid again"}[renew]]++
}

// compare holds every bucket to the model.
func (h *reservationHistory) compare() {
	for i := range h.model.buckets {
		b := &h.model.buckets[i]
		value, err := h.limiter(0).Value(h.Context(), b.request)
		require.NoError(h, err)
		require.Equal(h, float64(b.at(h.now)), value.Tokens, b.request)
	}
}
