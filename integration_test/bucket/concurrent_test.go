package bucket_test

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
	"github.com/pgratelimit/pgratelimit/internal/engine/bucket/buckettest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
)

// concurrency returns the terms of a limit on concurrency.
func concurrency(most int64, lease time.Duration) bucket.Terms {
	us := lease.Microseconds()
	return bucket.Terms{
		Capacity: float64(most), Rate: float64(most), Step: 1, Steps: float64(us), Phase: bucket.MinInstant,
		Kind: bucket.Concurrent{Lease: us},
	}
}

// slotsHistory is a bucket of slots twice, as stored and in the exact model, used by several versions of a program.
type slotsHistory struct {
	*testing.T

	random   *rand.Rand
	versions []bucket.Terms
	state    bucket.State
	absent   bool
	model    buckettest.ExactSlots
	fences   []int64
	now      int64
}

// policy returns one of the versions, and what the model knows of it.
func (h *slotsHistory) policy() (bucket.Terms, buckettest.SlotPolicy) {
	t := h.versions[h.random.IntN(len(h.versions))]
	return t, buckettest.SlotPolicy{Most: int64(t.Capacity), Length: t.Kind.(bucket.Concurrent).Lease}
}

// advance moves the clock: mostly on, often to the end of a lease, and at times back, or far ahead.
func (h *slotsHistory) advance() {
	leases := h.state.Leases()
	switch h.random.IntN(12) {
	case 0:
	case 1:
		h.now++
	case 2, 3, 4:
		h.now += h.random.Int64N(20 * minute)
	case 5, 6, 7, 8:
		if len(leases) > 0 {
			end := leases[h.random.IntN(len(leases))].End
			h.now = max(h.now, min(end, h.now+2*bucket.MaxLease)+h.random.Int64N(3)-1)
		}
	case 9:
		h.now += h.random.Int64N(minute / 10)
	case 10:
		h.now -= h.random.Int64N(minute)
	default:
		if h.random.IntN(20) == 0 {
			h.now += (h.random.Int64N(5) - 2) * 100 * bucket.MaxLease
		}
	}
}

// step makes a call.
func (h *slotsHistory) step() {
	h.advance()
	t, p := h.policy()
	fence := h.random.Int64N(100)
	if n := len(h.fences); n > 0 {
		fence = h.fences[n-1-h.random.IntN(min(n, 12))]
	}
	fixed := t.FixClock(h.state, h.now)
	require.Equal(h, float64(p.Most-h.model.Held(h.now)), buckettest.Tokens(t, fixed, h.now))
	switch h.random.IntN(16) {
	case 0:
		h.state, h.absent = t.Kind.Fill(t, fixed, h.now), false
		h.model.Fill(h.now, p)
	case 1, 2, 3:
		after, end, held := fixed.RenewLease(h.now, fence, p.Length)
		exactEnd, exactHeld := h.model.Renew(h.now, p, fence)
		require.Equal(h, exactHeld, held)
		if held {
			require.Equal(h, exactEnd, end)
			h.state, h.absent = after, false
		}
	case 4, 5, 6, 7:
		after, held := fixed.ReleaseLease(h.now, fence)
		require.Equal(h, h.model.Release(h.now, p, fence), held)
		if held {
			h.state, h.absent = after, false
		}
	default:
		h.acquire(t, p)
	}
}

// acquire takes one slot or more.
func (h *slotsHistory) acquire(t bucket.Terms, p buckettest.SlotPolicy) {
	slots := 1 + h.random.Int64N(1+h.random.Int64N(p.Most))
	a := bucket.Ask{Terms: t, Cost: float64(slots)}
	before := h.state
	if h.absent {
		before = t.Full(h.now)
	}
	r := bucket.Answer{Now: h.now}
	r.State, r.Allowed = buckettest.Take(t, before, h.now, a.Cost, 0)
	fence, end, wait := h.model.Acquire(h.now, p, slots)
	require.Equal(h, wait == 0, r.Allowed)
	o := a.Tell(&r, 0, &bucket.Snapshot{})
	require.Equal(h, wait, o.RetryAfter)
	require.Equal(h, float64(p.Most-h.model.Held(h.now)), o.Tokens)
	if !r.Allowed {
		require.True(h, r.State.Equal(before))
		if !h.absent {
			h.state = t.FixClock(h.state, h.now)
		}
		return
	}
	lease, taken := a.NewLease(&r)
	require.True(h, taken)
	require.Equal(h, bucket.Held{Fence: fence, End: end, Slots: slots}, lease)
	if n := len(h.fences); n > 0 {
		require.Less(h, h.fences[n-1], fence, "fences grow")
	}
	h.fences = append(h.fences[max(0, len(h.fences)-40):], fence)
	h.state, h.absent = r.State, false
	require.Equal(h, t.Capacity-float64(h.model.Held(h.now)), h.state.Value, "what other kinds see")
	require.GreaterOrEqual(h, h.state.Value, 0.0)
}

// TestSlotsAgreeWithTheExactModel compares the arithmetic of slots with the exact model. Programs of two versions
// acquire, renew and release slots, also lost ones, by clocks that step back or are wrong for a while.
func TestSlotsAgreeWithTheExactModel(t *testing.T) {
	t.Parallel()
	const steps = 500
	histories := testkit.Sized[uint64](10, 40)
	testkit.EachSeed(t, func(t *testing.T, seed uint64) {
		for n := range histories {
			random := rand.New(rand.NewPCG(seed, n))
			h := &slotsHistory{T: t, random: random, absent: true, now: opening}
			for range 1 + random.IntN(3) {
				length := time.Duration(1+random.Int64N(int64(time.Hour/time.Microsecond))) * time.Microsecond
				h.versions = append(h.versions, concurrency(1+random.Int64N(8), max(length, time.Millisecond)))
			}
			for range steps {
				h.step()
			}
		}
	})
}

// TestSlotsInErasKeepTheirLeases has the policy change under leases, to another limit on concurrency. A change to
// another kind, and back, fills the bucket.
func TestSlotsInErasKeepTheirLeases(t *testing.T) {
	t.Parallel()
	three, one := concurrency(3, time.Hour), concurrency(1, time.Minute)
	at, later := opening+minute, opening+2*minute
	held, _ := buckettest.Take(three, three.Full(opening), opening, 2, 0)
	of := func(terms bucket.Terms, change bucket.Change) bucket.Terms {
		revisions := bucket.NewRevisions([]bucket.Revision{{Terms: three}, {From: at, Terms: terms, Change: change}})
		return revisions.Holding(later)
	}
	for _, change := range []bucket.Change{bucket.Keep, bucket.Scale, bucket.Add} {
		lowered := of(one, change)
		after := lowered.Settle(held)
		require.Equal(t, held.Leases(), after.Leases())
		require.Equal(t, bucket.State{Value: -1, TS: at, Capacity: 1, Parts: held.Parts}, after)
		require.Equal(t, -1.0, buckettest.Tokens(lowered, after, later))
		_, allowed := buckettest.Take(lowered, after, later, 1, 0)
		require.False(t, allowed, "two are held, and one is allowed")
		require.Equal(t, time.Duration(opening-later)*time.Microsecond+time.Hour, buckettest.Wait(lowered, after, later, 1, 0))
	}
	after := of(one, bucket.Reset).Settle(held)
	require.Empty(t, after.Leases())
	again, allowed := buckettest.Take(of(one, bucket.Reset), after, opening, 1, 0) // by a clock that has stepped back
	require.True(t, allowed)
	require.Greater(t, again.Leases()[0].Fence, held.Leases()[0].Fence, "fences go on")

	tokens := buckettest.TokenBucket(10, time.Hour, 10)
	fence := &bucket.Parts{Leases: held.Parts.Leases[:1]}
	require.Equal(t, bucket.State{Value: 10, TS: at, Capacity: 10, Parts: fence}, of(tokens, bucket.Reset).Settle(held), "the leases ended")
	spent, _ := buckettest.Take(tokens, tokens.Full(opening), opening, 9, 0)
	back := bucket.NewRevisions([]bucket.Revision{{Terms: tokens}, {From: at, Terms: three, Change: bucket.Reset}}).Holding(later)
	require.Equal(t, 3.0, buckettest.Tokens(back, back.Settle(spent), later), "tokens that were taken are no slots that are held")
}

// TestARowOfAnotherKindHoldsNoSlots has a limit on concurrency read what other kinds have left, and the other way
// round.
func TestARowOfAnotherKindHoldsNoSlots(t *testing.T) {
	t.Parallel()
	terms := concurrency(4, time.Minute)
	for _, s := range []bucket.State{
		{Value: -3, TS: opening},
		{Value: 1.5, TS: opening, Parts: &bucket.Parts{Taken: []float64{1, 2}}},
		{Value: 2, TS: opening, Parts: &bucket.Parts{Leases: []int64{}}},
		{Value: 2, TS: opening, Parts: &bucket.Parts{Leases: []int64{7, 8}}}, // cut off
	} {
		require.Equal(t, 4.0, buckettest.Tokens(terms, s, opening))
		require.Zero(t, buckettest.Wait(terms, s, opening, 4, 0))
		after, allowed := buckettest.Take(terms, s, opening, 3, 0)
		require.True(t, allowed)
		require.Equal(t, 1.0, after.Value)
		require.Equal(t, s, terms.Kind.Charge(terms, s, opening, 2))
		require.Equal(t, s, buckettest.Credit(terms, s, opening, 2, math.MaxInt64))
	}
	require.Equal(t, time.Duration(bucket.Horizon)*time.Microsecond, buckettest.Wait(terms, terms.Full(opening), opening, 5, 0), "there are never five")
}

// TestOneCallHasOneFence has the rows of one call on several limits get the highest number of all.
func TestOneCallHasOneFence(t *testing.T) {
	t.Parallel()
	terms, tokens := concurrency(4, time.Minute), buckettest.TokenBucket(10, time.Hour, 10)
	asks := []bucket.Ask{{Terms: terms, Cost: 1}, {Terms: tokens, Cost: 1}, {Terms: terms, Cost: 2}, {Terms: terms}}
	states := make([]bucket.State, len(asks))
	for i, last := range []int64{opening + 5, 0, opening - 5, opening + 50} {
		states[i] = asks[i].Terms.Full(opening)
		if bucket.Holds(&asks[i].Terms) {
			states[i].Parts = &bucket.Parts{Leases: []int64{last, last, opening + 1, 1}}
		}
		states[i], _ = buckettest.Take(asks[i].Terms, states[i], opening, asks[i].Cost, 0)
	}
	bucket.AlignFences(asks, func(i int) *bucket.State { return &states[i] })
	for i, want := range map[int]int64{0: opening + 1<<16, 2: opening + 1<<16, 3: opening + 50} {
		leases := states[i].Leases()
		require.Equal(t, want, states[i].Parts.Leases[0])
		require.Equal(t, want, leases[len(leases)-1].Fence)
	}
	require.Nil(t, states[1].Parts)
}
