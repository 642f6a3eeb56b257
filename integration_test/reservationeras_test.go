package integration_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// TestReservationsAgreeWithTheExactModelWhenLimitsChange is TestReservationsAgreeWithTheExactModel with limits whose rate,
// capacity, most owed and kind change between the steps. A reservation is ended or renewed by the Limiter that uses the limits,
// under their current policies, or by a Limiter that never used them, under the policies at the time of the reservation.
func TestReservationsAgreeWithTheExactModelWhenLimitsChange(t *testing.T) {
	t.Parallel()
	eras := map[string][]ratelimit.Policy{
		"a": {
			ratelimit.TokenBucket{Rate: 10, Period: time.Second, MaxReserved: 25},
			ratelimit.TokenBucket{Rate: 1, Period: time.Second, Capacity: 10, MaxReserved: 25},
			ratelimit.TokenBucket{Rate: 10, Period: time.Second, Capacity: 100, MaxReserved: 200},
			ratelimit.FixedWindow{Rate: 3, Period: time.Second, Capacity: 9, MaxReserved: 25, Start: clockNoon},
		},
		"b": {
			ratelimit.TokenBucket{Rate: 7, Period: 3 * time.Second, Capacity: 10. / 3},
			ratelimit.TokenBucket{Rate: 70, Period: 3 * time.Second, Capacity: 1. / 3},
			ratelimit.FixedWindow{Rate: 20, Period: 10 * time.Second, Start: clockNoon},
		},
		"c": {
			ratelimit.FixedWindow{Rate: 20, Period: 2 * time.Second, Start: clockNoon},
			ratelimit.FixedWindow{Rate: 20, Period: time.Minute, Start: clockNoon},
			ratelimit.FixedWindow{Rate: 2, Period: time.Second, Capacity: 40, Start: clockNoon},
			ratelimit.TokenBucket{Rate: 5, Period: time.Second, Capacity: 20},
		},
	}
	testsize.EachSeed(t, func(t *testing.T, seed uint64) {
		h := newReservationHistory(t, seed, eras)
		steps := testsize.Of(200, 1000)
		for range steps {
			h.step(t)
		}
		h.finish(t, steps)
	})
}

// change changes one of the limits, for all of its keys. The first of the limiters uses it from then on.
func (h *reservationHistory) change(t *testing.T) {
	t.Helper()
	name := h.model.buckets[h.random.IntN(len(h.model.buckets))].request.Limit().Name()
	policies := h.eras[name]
	if len(policies) == 0 {
		return
	}
	limit := ratelimit.Define(name, policies[h.random.IntN(len(policies))])
	for i, key := 0, 0; i < len(h.model.buckets); i++ {
		b := &h.model.buckets[i]
		if b.request.Limit().Name() != name {
			continue
		}
		b.exactTerms = newExactTerms(limit.For([]string{"one", "two"}[key]))
		if !b.stored {
			b.value, b.ts, b.off = b.capacity, b.floor(h.now), 0
		}
		key++
		_, err := h.limiter(0).Value(t.Context(), b.request)
		require.NoError(t, err)
	}
}

// anyone returns the Limiter that uses the limits, or a Limiter that never used them.
func (h *reservationHistory) anyone(t *testing.T) (limiter *ratelimit.Limiter, stranger bool) {
	t.Helper()
	if len(h.eras) == 0 || h.random.IntN(2) == 0 {
		return h.limiter(0), false
	}
	limiter = h.bundle.with(t, h.config(false))
	if h.tx != nil {
		limiter = limiter.WithTx(h.tx)
	}
	return limiter, true
}

// config returns the Config of the limiters.
func (h *reservationHistory) config(release bool) ratelimit.Config {
	return ratelimit.Config{
		AsOf: h.clock.now, StaleAfter: time.Duration(modelStale) * time.Microsecond,
		ExpireAfter: time.Duration(modelExpire) * time.Microsecond, ReleaseExpired: release,
	}
}

// terms returns what the limits of the buckets are now.
func (h *reservationHistory) terms(costs map[int]float64) map[int]exactTerms {
	terms := make(map[int]exactTerms, len(costs))
	for i := range costs {
		terms[i] = h.model.buckets[i].exactTerms
	}
	return terms
}

// as runs do on the model's buckets of r: under the original terms of r, as a stranger does, or under the current terms of the
// limits.
func (h *reservationHistory) as(r *lease, stranger bool, do func()) {
	if !stranger {
		do()
		return
	}
	now := h.terms(r.costs)
	for i, terms := range r.terms {
		h.model.buckets[i].exactTerms = terms
	}
	do()
	for i, terms := range now {
		h.model.buckets[i].exactTerms = terms
	}
}

// endOf charges or credits the tokens of the end of r. A credit fills a bucket up to its capacity then or now.
func (h *reservationHistory) endOf(r *lease, amounts map[int]float64) {
	for i, amount := range amounts {
		h.mended(i)
		b := &h.model.buckets[i]
		if amount < 0 {
			h.model.give(i, b.credit(h.now, -amount, r.terms[i].capacity), h.truth)
		} else {
			b.charge(h.now, amount)
		}
	}
}

// never reports whether not even full buckets have enough.
func (h *reservationHistory) never(costs map[int]float64) bool {
	for i, cost := range costs {
		b := &h.model.buckets[i]
		if rat(cost).Cmp(sum(b.capacity, b.maxOwed)) > 0 {
			return true
		}
	}
	return false
}
