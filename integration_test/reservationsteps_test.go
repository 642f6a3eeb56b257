package integration_test

import (
	"cmp"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// The steps of a reservationHistory: each makes a call, and says what the model has of it.

func (h *reservationHistory) take(t *testing.T) {
	t.Helper()
	costs, requests := h.draw(1)
	for i, cost := range costs {
		if cost > h.model.buckets[i].request.Limit().Capacity() {
			return
		}
	}
	d, err := h.limiter(0).Take(t.Context(), requests...)
	require.NoError(t, err)
	h.decided(t, costs, false, d.Allowed, d.RetryAfter)
	if d.Allowed {
		h.charge(costs)
		h.admit(t, costs, h.now)
	}
}

func (h *reservationHistory) reserve(t *testing.T) {
	t.Helper()
	costs, requests := h.draw(2)
	release := h.random.IntN(2)
	r, err := h.limiter(release).Reserve(t.Context(), requests...)
	require.NoError(t, err)
	h.decided(t, costs, true, r.Allowed, r.RetryAfter)
	if !r.Allowed {
		return
	}
	h.charge(costs)
	ready := r.ReadyAt.UnixMicro()
	require.Equal(t, ready+modelStale, r.StaleAt.UnixMicro())
	h.model.leases = append(h.model.leases, lease{
		id: r.ID, state: ratelimit.Open, costs: costs, ready: ready, expires: ready + modelExpire, release: release == 1, work: h.admit(t, costs, ready),
		terms: h.terms(costs), paid: h.paid(costs),
	})
}

// paid returns when each of the buckets owes nothing any more.
func (h *reservationHistory) paid(costs map[int]float64) map[int]int64 {
	paid := make(map[int]int64, len(costs))
	for i := range costs {
		paid[i] = h.model.buckets[i].paid(h.now)
	}
	return paid
}

// pick draws a reservation, of any state, the newer ones more often; nil when there is none.
func (h *reservationHistory) pick() *lease {
	n := len(h.model.leases)
	if n == 0 {
		return nil
	}
	return &h.model.leases[max(0, n-1-int(h.random.ExpFloat64()*10))]
}

// creditable returns amounts without what would go back into a window that is over.
func (h *reservationHistory) creditable(r *lease, amounts map[int]float64) map[int]float64 {
	for i, amount := range amounts {
		b := &h.model.buckets[i]
		if amount == 0 || amount < 0 && b.windows && b.floor(h.now) > b.floor(r.paid[i]) {
			delete(amounts, i)
		}
	}
	return amounts
}

func (r *lease) minusCosts() map[int]float64 {
	amounts := map[int]float64{}
	for i, cost := range r.costs {
		amounts[i] = -cost
	}
	return amounts
}

// endOne settles or cancels.
func (h *reservationHistory) endOne(t *testing.T, settle bool) {
	t.Helper()
	r := h.pick()
	if r == nil {
		return
	}
	var err error
	limiter, stranger := h.anyone(t)
	final, amounts := ratelimit.Cancelled, r.minusCosts()
	if settle {
		var actual []ratelimit.Request
		final, amounts = ratelimit.Settled, map[int]float64{}
		for i, cost := range r.costs {
			if h.random.IntN(4) == 0 {
				continue // it keeps its estimate
			}
			used := math.Round(1e3*cost*2*h.random.Float64()) / 1e3
			amounts[i], actual = used-cost, append(actual, h.model.buckets[i].request.Cost(used))
		}
		err = limiter.Settle(t.Context(), r.id, actual...)
		stranger = false // the requests tell it the limits
	} else {
		err = limiter.Cancel(t.Context(), r.id)
	}
	switch r.state {
	case final:
		require.NoError(t, err)
	case ratelimit.Open:
		require.NoError(t, err)
		r.state, r.expires = final, max(r.expires, h.now)
		h.as(r, stranger, func() { h.endOf(r, h.creditable(r, amounts)) })
		if !settle {
			h.model.drop(r.work)
		}
	default:
		require.ErrorIs(t, err, ratelimit.ErrReservationEnded)
	}
}

func (h *reservationHistory) credit(t *testing.T) {
	t.Helper()
	costs, requests := h.draw(0.3)
	for i, cost := range costs {
		if cost > h.model.buckets[i].request.Limit().Capacity() {
			return
		}
		costs[i] = -cost
	}
	require.NoError(t, h.limiter(0).Credit(t.Context(), requests...))
	h.charge(costs)
}

func (h *reservationHistory) expire(t *testing.T) {
	t.Helper()
	limiter, stranger := h.anyone(t)
	ended, err := limiter.Expire(t.Context())
	require.NoError(t, err)
	var kept []lease
	oldest := make([]*lease, len(h.model.leases))
	for i := range h.model.leases {
		oldest[i] = &h.model.leases[i]
	}
	slices.SortFunc(oldest, func(a, b *lease) int { return cmp.Or(cmp.Compare(a.expires, b.expires), strings.Compare(a.id, b.id)) })
	for _, r := range oldest {
		if r.state == ratelimit.Open && r.expires < h.now {
			r.state, r.expires = ratelimit.Expired, h.now
			ended--
			if r.release {
				h.as(r, stranger, func() { h.endOf(r, h.creditable(r, r.minusCosts())) })
				h.model.drop(r.work)
			}
		}
	}
	for i := range h.model.leases {
		if r := &h.model.leases[i]; r.state == ratelimit.Open || r.expires >= h.now-modelKeep {
			kept = append(kept, *r)
		}
	}
	require.Zero(t, ended)
	h.model.leases = kept
}

// start starts or renews.
func (h *reservationHistory) start(t *testing.T, renew bool) {
	t.Helper()
	r := h.pick()
	if r == nil {
		return
	}
	limiter, stranger := h.anyone(t)
	verb := limiter.Start
	if renew {
		verb = limiter.Renew
	}
	slot, err := verb(t.Context(), r.id)
	if !renew && r.state == ratelimit.Cancelled {
		require.ErrorIs(t, err, ratelimit.ErrReservationEnded)
		return
	}
	released := r.state == ratelimit.Expired && r.release
	pays := renew || released || !r.started && r.state != ratelimit.Settled && h.now >= r.ready+modelStale
	if never := false; pays {
		h.as(r, stranger, func() { never = h.never(r.costs) })
		if never {
			require.ErrorIs(t, err, ratelimit.ErrCostExceedsCapacity)
			return
		}
	}
	require.NoError(t, err)
	switch {
	case pays:
		h.as(r, stranger, func() { h.renewed(t, r, slot) })
		r.started = !renew && slot.Wait == 0 || r.started && slot.State != ratelimit.Open
	case r.started:
		require.Zero(t, slot.Wait)
		require.True(t, slot.Restarted)
		r.expires = max(r.expires, h.now+modelExpire)
	case r.state == ratelimit.Settled: // keeps its slot, whenever that was
		require.Equal(t, max(0, r.ready-h.now), slot.Wait.Microseconds())
		require.False(t, slot.Restarted)
	default:
		require.Equal(t, max(0, r.ready-h.now), slot.Wait.Microseconds())
		r.started = slot.Wait == 0
	}
	require.Equal(t, r.state, slot.State)
	require.Equal(t, r.ready, slot.ReadyAt.UnixMicro())
	require.Equal(t, r.ready+modelStale, slot.StaleAt.UnixMicro())
}

// renewed checks a new slot, or that the buckets had none.
func (h *reservationHistory) renewed(t *testing.T, r *lease, slot ratelimit.Turn) {
	t.Helper()
	ready := h.now + slot.Wait.Microseconds()
	allowed := slot.ReadyAt.UnixMicro() == ready && slot.State == ratelimit.Open
	if allowed && ready == r.ready { // the old slot was to come up then, too
		allowed, _ = h.enough(r.costs, true, h.now)
	}
	wait := slot.Wait
	if allowed {
		wait = 0
	}
	h.decided(t, r.costs, true, allowed, wait)
	if !allowed {
		return
	}
	h.charge(r.costs)
	r.expires += ready - r.ready
	r.state, r.ready, r.work, r.terms, r.paid = ratelimit.Open, ready, h.admit(t, r.costs, ready), h.terms(r.costs), h.paid(r.costs)
}

// compare holds every row to the model.
func (h *reservationHistory) compare(t *testing.T) {
	t.Helper()
	const read = "SELECT name, key, value, ts, '' FROM ratelimit.buckets ORDER BY name, key"
	query := h.bundle.pool.Query
	if h.tx != nil {
		query = h.tx.Query
	}
	found, err := query(t.Context(), read)
	require.NoError(t, err)
	rows, err := pgx.CollectRows(found, pgx.RowToStructByPos[row])
	require.NoError(t, err)
	for i := range h.model.buckets {
		b := &h.model.buckets[i]
		if !b.stored {
			continue
		}
		require.NotEmpty(t, rows)
		r := rows[0]
		rows = rows[1:]
		require.Equal(t, b.request.Limit().Name(), r.Name)
		require.InDelta(t, float(b.value), r.Value, b.off+1e-300, r)
		require.Less(t, b.off, 1e-9)
		if b.mended == r.TS {
			b.ts = r.TS
		}
		b.mended = 0
		require.Equal(t, b.ts, r.TS, r)
		if len(h.eras) == 0 {
			require.LessOrEqual(t, r.Value, b.request.Limit().Capacity())
		}
	}
	require.Empty(t, rows)
}

// finish lets all that was reserved come due and all buckets fill, and looks back on the whole.
func (h *reservationHistory) finish(t *testing.T, steps int) {
	t.Helper()
	if h.tx != nil {
		h.end(t)
	}
	h.move(int64(1000 * 24 * time.Hour / time.Microsecond))
	h.model.close()
	admitted := 0
	for i := range h.model.buckets {
		b := &h.model.buckets[i]
		if len(h.eras) == 0 {
			require.LessOrEqual(t, h.model.excess(i), 1e-6, "%s ran more than is promised", b.request)
		}
		value, err := h.limiters[0].Value(t.Context(), b.request)
		require.NoError(t, err)
		require.Equal(t, b.request.Limit().Capacity(), value.Tokens, "no token is lost for good")
	}
	for _, w := range h.model.work {
		require.True(t, w.due)
		admitted++
	}
	require.Greater(t, admitted, steps/10)
	require.Less(t, h.close, h.lookups/testsize.Of(2, 4))
	t.Logf("%d pieces of work, %d leases, %d gifts, %d of %d decisions within rounding", admitted, len(h.model.leases), len(h.model.backs), h.close, h.lookups)
}
