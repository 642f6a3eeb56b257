package integration_test

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// TestAHistoryOfChangesCountsEveryToken runs random calls on one bucket whose rate, capacity, kind and shards change between them.
// Each call changes the bucket's tokens, under the limit at that moment, by exactly the amount in its answer. Time adds the tokens
// that Value predicted. Nothing else adds or takes any.
func TestAHistoryOfChangesCountsEveryToken(t *testing.T) {
	t.Parallel()
	steps := testsize.Of(150, 600)
	policies := changedPolicies()
	names := make([]string, 0, len(policies))
	for name := range policies {
		names = append(names, name)
	}
	slices.Sort(names)
	testsize.EachSeed(t, func(t *testing.T, seed uint64) {
		h := &changeHistory{random: rand.New(rand.NewPCG(seed, 9)), desk: setup(t).desk(t, ratelimit.Config{}), policies: policies, names: names}
		h.change(t)
		for range steps {
			h.step(t)
		}
		require.Greater(t, h.ended, steps/20)
	})
}

type changeHistory struct {
	*desk
	random   *rand.Rand
	policies map[string]ratelimit.Policy
	names    []string
	now      ratelimit.Request
	open     []ratelimit.Reservation
	ended    int
}

// change changes the limit, which may cut what the bucket holds, or start rows full, and never fills it further.
func (h *changeHistory) change(t *testing.T) {
	t.Helper()
	policy := h.policies[h.names[h.random.IntN(len(h.names))]]
	h.now = ratelimit.Define("changing", policy).For("key")
	require.LessOrEqual(t, tokens(t, h.limiter, h.now), h.now.Limit().Capacity())
}

func (h *changeHistory) step(t *testing.T) {
	t.Helper()
	value, err := h.limiter.Value(t.Context(), h.now)
	require.NoError(t, err)
	held, cost := value.Tokens, float64(1+h.random.IntN(1+int(h.now.Limit().Capacity()/4)))
	switch n := h.random.IntN(20); {
	case n < 2:
		h.change(t)
	case n < 6:
		h.clock.set(h.clock.now().Add(time.Duration(h.random.ExpFloat64() * float64(time.Minute))).Truncate(time.Microsecond))
		h.holds(t, value.At(h.clock.now()), "time")
	case n < 10:
		d, err := h.limiter.Take(t.Context(), h.now.Cost(cost))
		require.NoError(t, err)
		switch {
		case held-cost > 1e-6:
			require.True(t, d.Allowed)
		case cost-held > 1e-6 && shardsOf(h.now.Limit()) == 1: // rows that began full give beside a row that owes
			require.False(t, d.Allowed)
		}
		if d.Allowed {
			held -= cost
		}
		h.holds(t, held, "take")
	case n < 14:
		h.open = append(h.open, h.reserve(t, h.now.Cost(cost)))
		h.holds(t, held-cost, "reserve")
	default:
		h.end(t, held)
	}
}

// holds checks what the bucket holds.
func (h *changeHistory) holds(t *testing.T, want float64, after string) {
	t.Helper()
	require.InDelta(t, want, tokens(t, h.limiter, h.now), 1e-6, "after %s of %v", after, h.now.Limit())
}

// end ends or renews a reservation, through the Limiter that uses the limit or a Limiter that never used it. The second may return
// tokens to rows of an earlier policy, but never more tokens.
func (h *changeHistory) end(t *testing.T, held float64) {
	t.Helper()
	if len(h.open) == 0 {
		return
	}
	i := h.random.IntN(len(h.open))
	r := h.open[i]
	reserved := r.States[0].Cost
	limiter, stranger := h.limiter, h.random.IntN(3) == 0
	if stranger {
		limiter = h.with(t, ratelimit.Config{AsOf: h.clock.now})
	}
	charged := 0.0
	switch h.random.IntN(4) {
	case 0:
		charged = -reserved
		require.NoError(t, limiter.Cancel(t.Context(), r.ID))
	case 1:
		require.NoError(t, limiter.Settle(t.Context(), r.ID))
	case 2:
		used := reserved * 2 * h.random.Float64()
		charged, stranger = used-reserved, false // the request tells it the limit
		require.NoError(t, limiter.Settle(t.Context(), r.ID, h.now.Cost(used)))
	default:
		if stranger {
			return
		}
		_, err := limiter.Renew(t.Context(), r.ID)
		require.NoError(t, err)
		h.holds(t, held-reserved, "renew")
		h.open = slices.Delete(h.open, i, i+1)
		return
	}
	h.open = slices.Delete(h.open, i, i+1)
	h.ended++
	want := min(h.now.Limit().Capacity(), held-charged)
	if w, ok := h.now.Limit().Policy().(ratelimit.FixedWindow); ok && charged < 0 && windowOf(w, r.ReadyAt) < windowOf(w, h.clock.now()) {
		want = held
	}
	if stranger {
		now := tokens(t, h.limiter, h.now)
		require.GreaterOrEqual(t, now, held-1e-6)
		require.LessOrEqual(t, now, min(h.now.Limit().Capacity(), held-charged)+1e-6)
		return
	}
	h.holds(t, want, "the end")
}

// shardsOf returns the number of rows of a limit's buckets.
func shardsOf(limit ratelimit.Limit) int {
	switch p := limit.Policy().(type) {
	case ratelimit.TokenBucket:
		return max(p.Shards, 1)
	case ratelimit.FixedWindow:
		return max(p.Shards, 1)
	}
	panic("no such policy")
}
