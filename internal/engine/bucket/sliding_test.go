package bucket_test

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
	"github.com/pgratelimit/pgratelimit/internal/engine/bucket/buckettest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
)

// slidingTerms returns the terms of a sliding window of n slices of step microseconds.
func slidingTerms(rate float64, step int64, n int32) bucket.Terms {
	return bucket.Terms{
		Capacity: rate, Rate: rate, Step: step, Steps: float64(n), Phase: bucket.MinInstant, Kind: bucket.Sliding{Slices: n},
	}
}

// exactWindow is a sliding window as a list of takes. Each entry counts while less than a Period has passed since the
// end of the slice that it is in.
type exactWindow struct {
	entries []exactTaking
	ts      int64 // in the newest slice that was ever written
	step    int64 // of the slices as they were written
}

type exactTaking struct {
	end    int64 // the first instant behind the slice
	amount float64
}

// floorTo returns the begin of the slice of at. Instants are from MinInstant on.
func floorTo(at, step int64) int64 { return at - (at-bucket.MinInstant)%step }

// under returns the window as the terms have it at an instant.
func (w exactWindow) under(t bucket.Terms, now int64) exactWindow {
	under := exactWindow{ts: max(w.ts, floorTo(now, t.Step)), step: t.Step}
	for _, e := range w.entries {
		end := e.end
		if w.step != t.Step {
			end = floorTo(min(end-1, max(w.ts, now)), t.Step) + t.Step
		}
		under.entries = append(under.entries, exactTaking{end, e.amount})
	}
	return under
}

// seenBy is under, with what counts at the instant only.
func (w exactWindow) seenBy(t bucket.Terms, now int64) exactWindow {
	return w.under(t, now).since(func(ts int64) int64 { return floorTo(ts, t.Step) - int64(t.Steps)*t.Step })
}

// since returns the window without slices that ended by the first of ts.
func (w exactWindow) since(first func(ts int64) int64) exactWindow {
	w.entries = slices.DeleteFunc(w.entries, func(e exactTaking) bool { return e.end <= first(w.ts) })
	return w
}

// keptBy returns the window without the entries that the row has dropped. An entry older than the period stays in a row
// for a while, and counts again if the period grows.
func (w exactWindow) keptBy(s bucket.State) exactWindow {
	if s.Parts == nil {
		return w
	}
	return w.since(func(ts int64) int64 { return floorTo(ts, w.step) - int64(len(s.Parts.Taken)-4)*w.step })
}

// add counts amount in the newest slice.
func (w *exactWindow) add(amount float64) {
	w.entries = append(w.entries, exactTaking{floorTo(w.ts, w.step) + w.step, amount})
}

func (w exactWindow) tokens(t bucket.Terms, now int64) float64 {
	left := t.Capacity
	for _, e := range w.seenBy(t, now).entries {
		left -= e.amount
	}
	return left
}

// giveBack subtracts amount from the entries: the entries that end last first, or only the entries of one slice.
func (w *exactWindow) giveBack(amount float64, onlyAt int64) {
	slices.SortStableFunc(w.entries, func(a, b exactTaking) int { return int(b.end - a.end) })
	for i := range w.entries {
		if e := &w.entries[i]; onlyAt == 0 || e.end == onlyAt+w.step {
			given := min(amount, e.amount)
			e.amount, amount = e.amount-given, amount-given
		}
	}
}

// bringBack moves a window that a wrong clock has written to now.
func (w *exactWindow) bringBack(t bucket.Terms, now int64) {
	begin := floorTo(now, t.Step)
	by := floorTo(w.ts, w.step) - floorTo(begin, w.step)
	for i := range w.entries {
		w.entries[i].end -= by
	}
	w.ts = begin
}

// slidingHistory is a window twice: as stored, and in the exact model.
type slidingHistory struct {
	testing.TB

	src   buckettest.Seeded
	terms bucket.Terms
	state bucket.State
	exact exactWindow
	now   int64

	taken, refused, changed, fixed int
}

// drawSliding draws terms whose numbers are exact in float64.
func drawSliding(src buckettest.Source) bucket.Terms {
	return slidingTerms(buckettest.One(src, 1.0, 2, 4, 16, 64), buckettest.One[int64](src, 1, 3, 1000, 5000, 16_667, 1_000_000, 60_000_000), buckettest.One[int32](src, 1, 2, 10, 60, 128))
}

// TestSlidingWindowsAgreeWithTheExactModel compares random histories with the model. Clocks step back, rows are from
// wrong clocks, and policies change, in the code and from an instant on.
func TestSlidingWindowsAgreeWithTheExactModel(t *testing.T) {
	t.Parallel()
	testkit.EachSeed(t, func(t *testing.T, seed uint64) {
		t.Helper()
		histories, calls, often, rarely := testkit.Sized(4, 12), 500, 0, 0
		for i := range uint64(histories) {
			h := runSliding(t, seed, i, calls)
			often, rarely = often+min(h.taken, h.refused), rarely+min(h.changed, h.fixed)
		}
		require.Greater(t, often, histories*calls/10)
		require.Greater(t, rarely, histories*calls/500)
	})
}

// runSliding runs a history of calls.
func runSliding(t testing.TB, seed, stream uint64, calls int) *slidingHistory {
	t.Helper()
	h := &slidingHistory{TB: t, src: buckettest.Seeded{Rand: rand.New(rand.NewPCG(seed, stream))}, now: opening}
	h.terms = drawSliding(h.src)
	h.state, h.exact = h.terms.Full(h.now), exactWindow{ts: floorTo(h.now, h.terms.Step), step: h.terms.Step}
	for range calls {
		h.advance()
		h.call()
		h.compare()
	}
	return h
}

// advance moves the clock, mostly to where something is about to happen, and sometimes back.
func (h *slidingHistory) advance() {
	step, period := h.terms.Step, h.terms.Step*int64(h.terms.Steps)
	switch h.src.Pick(12) {
	case 0:
	case 1:
		h.now++
	case 2, 3, 4:
		h.now += int64(h.src.Unit() * float64(step))
	case 5:
		h.now += int64(h.src.Unit() * 2 * float64(period))
	case 6:
		h.now = floorTo(h.now, step) + step - int64(h.src.Pick(2))
	case 7, 8:
		h.now += buckettest.Wait(h.terms, h.state, h.now, h.cost(), 0).Microseconds() - int64(h.src.Pick(2))
	case 9:
		h.now -= int64(h.src.Unit() * float64(buckettest.Minute))
	case 10:
		h.now -= int64(h.src.Unit() * float64(step))
	case 11:
		if h.src.Pick(5) == 0 { // a clock that is wrong, back or forth
			h.now += int64((h.src.Unit()*2 - 1) * float64(buckettest.Day))
		}
	}
}

func (h *slidingHistory) cost() float64 {
	return min(h.terms.Capacity, math.Ceil(h.src.Unit()*h.terms.Capacity*buckettest.One(h.src, 1, 0.5, 0.1)*16)/16)
}

// call makes one call.
func (h *slidingHistory) call() {
	if h.terms.FromFuture(h.state, h.now) {
		h.state = h.terms.FixClock(h.state, h.now)
		h.exact.bringBack(h.terms, h.now)
		h.fixed++
	}
	seen := h.exact.seenBy(h.terms, h.now)
	rule, cost := h.terms.Kind, h.cost()
	switch chance := h.src.Pick(40); {
	case chance == 0:
		h.state = rule.Fill(h.terms, h.state, h.now)
		seen.entries, seen.ts = nil, floorTo(h.now, h.terms.Step)
	case chance == 1:
		h.state = rule.Charge(h.terms, h.state, h.now, cost)
		seen = h.exact.under(h.terms, h.now)
		seen.add(cost)
	case chance < 4:
		before := h.state
		h.state = buckettest.Credit(h.terms, h.state, h.now, cost, bucket.MaxInstant)
		if h.state.Equal(before) {
			return
		}
		seen.giveBack(cost, 0)
	case chance < 6:
		at := h.now - int64(h.src.Unit()*float64(buckettest.Period(h.terms)))
		before := h.state
		h.state = buckettest.Credit(h.terms, h.state, h.now, cost, buckettest.CreditUntil(h.terms, at))
		if h.state.Equal(before) {
			return
		}
		seen.giveBack(cost, floorTo(at, h.terms.Step))
	case chance == 6: // in the code
		h.terms = drawSliding(h.src)
		if h.changed++; h.state.Parts == nil { // no row is there, which is full
			h.state = h.terms.Full(h.now)
			h.exact = exactWindow{ts: h.state.TS, step: h.terms.Step}
		}
		return
	case chance == 7:
		seen = h.enter(seen)
	default:
		next, allowed := buckettest.Take(h.terms, h.state, h.now, cost, 0)
		require.Equal(h, h.exact.tokens(h.terms, h.now) >= cost, allowed, "%v of %+v %+v at %d", cost, h.terms, h.state.Parts, h.now)
		if !allowed {
			h.refused++
			return
		}
		h.taken++
		h.state = next
		seen = h.exact.under(h.terms, h.now)
		seen.add(cost)
	}
	h.exact = seen.keptBy(h.state)
}

// enter has other terms hold from now on.
func (h *slidingHistory) enter(seen exactWindow) exactWindow {
	h.changed++
	before := h.terms
	after := drawSliding(h.src)
	change := buckettest.One(h.src, bucket.Keep, bucket.Add, bucket.Scale, bucket.Reset)
	from := max(h.now, h.state.TS+1)
	h.now = from
	revisions := bucket.NewRevisions([]bucket.Revision{{Terms: before}, {From: from, Terms: after, Change: change}})
	h.state = revisions.Holding(from).Settle(h.state)
	require.Equal(h, from, h.state.TS)
	h.terms = after
	seen = h.exact.seenBy(before, from)
	for i := range seen.entries {
		e := &seen.entries[i]
		e.end = floorTo(min(e.end-1, from), after.Step) + after.Step
		if change == bucket.Scale {
			e.amount *= after.Capacity / before.Capacity
		}
	}
	if change == bucket.Reset {
		seen.entries = nil
	}
	seen.step, seen.ts = after.Step, from
	return seen.under(after, from)
}

// compare compares the row's answers for now and for later with the model.
func (h *slidingHistory) compare() {
	s := h.state
	if h.terms.FromFuture(s, h.now) {
		return
	}
	require.Equal(h, h.exact.tokens(h.terms, h.now), buckettest.Tokens(h.terms, s, h.now), "%+v %+v at %d", h.terms, s.Parts, h.now)
	if p := s.Parts; p != nil {
		require.LessOrEqual(h, len(p.Taken), 4+128+44)
		require.Equal(h, p.Taken[1], s.Value)
	}
	for _, cost := range []float64{h.cost(), h.terms.Capacity} {
		after := h.now + buckettest.Wait(h.terms, s, h.now, cost, 0).Microseconds()
		for at, enough := range map[int64]bool{after: true, max(after-1, h.now): after == h.now} {
			_, allowed := buckettest.Take(h.terms, s, at, cost, 0)
			require.Equal(h, enough, allowed, "%v of %+v %+v at %d", cost, h.terms, s.Parts, at)
			require.Equal(h, enough, h.exact.tokens(h.terms, at) >= cost, "%v of %+v %+v at %d", cost, h.terms, s.Parts, at)
		}
	}
	require.Equal(h, buckettest.UntilFull(h.terms, s, h.now), buckettest.Wait(h.terms, s, h.now, h.terms.Capacity, 0))
}

// FuzzSliding looks for an input on which a window gives more than its rate, or says a wrong wait.
func FuzzSliding(f *testing.F) {
	f.Add(uint64(1), uint64(2))
	f.Fuzz(func(t *testing.T, seed, stream uint64) {
		runSliding(t, seed, stream, 50)
	})
}

const second = int64(1_000_000)

// tenInAMinute gives ten in any minute, and counts in slices of ten seconds.
var tenInAMinute = slidingTerms(10, 10*second, 6)

// After another kind of limit, or an older program, the tokens missing to the capacity count as taken in the slice of
// ts.
func TestSlidingGoesOnFromTheValueOfAnotherKind(t *testing.T) {
	t.Parallel()
	slid, _ := buckettest.Take(tenInAMinute, tenInAMinute.Full(opening), opening, 2, 0)
	slid, _ = buckettest.Take(tenInAMinute, slid, opening+20*second, 1, 0)
	for name, test := range map[string]struct {
		change func(s *bucket.State)
		tokens float64
		full   time.Duration // from 30 s on
	}{
		"Nothing":     {func(*bucket.State) {}, 7, time.Minute},
		"ABucketTook": {func(s *bucket.State) { s.Value, s.TS = 3, opening+31*second }, 3, 70 * time.Second},
		"ABucketGave": {func(s *bucket.State) { s.Value, s.TS = 9, opening+31*second }, 9, 70 * time.Second},
		"ABucketOwes": {func(s *bucket.State) { s.Value = -5 }, -5, time.Minute},
		"NoSlices":    {func(s *bucket.State) { s.Parts = nil }, 7, time.Minute},
		"OfABucket":   {func(s *bucket.State) { *s = bucket.State{Value: 4, TS: opening + 15*second, Capacity: 10} }, 4, 50 * time.Second},
		"More":        {func(s *bucket.State) { *s = bucket.State{Value: 400, TS: opening, Capacity: 10} }, 10, 0},
		"OfAnother":   {func(s *bucket.State) { *s = bucket.State{Value: 94, TS: opening + 15*second, Capacity: 100} }, 4, 50 * time.Second},
		"Leases":      {func(s *bucket.State) { s.Parts = &bucket.Parts{Leases: []int64{1}} }, 7, time.Minute},
		"Nonsense":    {func(s *bucket.State) { s.Parts = &bucket.Parts{Taken: []float64{0, s.Value, 3, 0}} }, 7, time.Minute},
	} {
		s, now := slid, opening+30*second
		test.change(&s)
		require.InDelta(t, test.tokens, buckettest.Tokens(tenInAMinute, s, now), 0, name)
		require.Equal(t, test.full, buckettest.UntilFull(tenInAMinute, s, now), name)
	}
}

// A credit also reaches tokens taken under the policy before, if they carried over with the change.
func TestSlidingCreditsAcrossAChange(t *testing.T) {
	t.Parallel()
	const from = opening + 45*second
	before := slidingTerms(10, 30*second, 2)
	terms := changeAt(from, before, tenInAMinute, bucket.Keep)
	s, allowed := buckettest.Take(before, before.Full(opening), opening+5*second, 6, 0)
	require.True(t, allowed)
	s = terms.Settle(s)
	require.InDelta(t, 4, buckettest.Tokens(terms, s, from), 0.01)
	s = buckettest.Credit(terms, s, from+second, 2, buckettest.CreditUntil(terms, opening+5*second))
	require.InDelta(t, 6, buckettest.Tokens(terms, s, from+second), 0.01)
}

// Tokens reserved under another kind in the code, and not ready when the kind changed, can be returned until a sliding
// window has written the row.
func TestSlidingCreditsTokensReservedByAnotherKind(t *testing.T) {
	t.Parallel()
	const hour = 3600 * second
	sliding, now := slidingTerms(20, hour, 24), opening+5*hour
	reserved := bucket.State{Value: -10, TS: opening, Capacity: 20} // by 15 and 15
	require.InDelta(t, -10, buckettest.Tokens(sliding, reserved, now), 1e-9)
	for _, ready := range []int64{opening, opening + 12*hour} {
		s := buckettest.Credit(sliding, reserved, now, 15, buckettest.CreditUntil(sliding, ready))
		require.InDelta(t, 5, buckettest.Tokens(sliding, s, now), 1e-9)
	}
	now = opening + 28*hour
	s, allowed := buckettest.Take(sliding, reserved, now, 20, 0)
	require.True(t, allowed)
	s = buckettest.Credit(sliding, s, now, 15, buckettest.CreditUntil(sliding, opening+30*hour))
	require.InDelta(t, 0, buckettest.Tokens(sliding, s, now), 0)
}

// A wait ends at the latest when all entries of the row have expired, also if a sum of fractions is rounded up.
func TestSlidingWaitOfFractions(t *testing.T) {
	t.Parallel()
	terms := slidingTerms(1/3., 60*second, 60)
	s := terms.Kind.Charge(terms, terms.Full(opening), opening, 2)
	now := opening + 30*60*second
	wait := buckettest.Wait(terms, s, now, 1/3., 0)
	require.Equal(t, 31*time.Minute, wait)
	_, before := buckettest.Take(terms, s, now+wait.Microseconds()-1, 1/3., 0)
	_, allowed := buckettest.Take(terms, s, now+wait.Microseconds(), 1/3., 0)
	require.Equal(t, []bool{false, true}, []bool{before, allowed})
}

// Rows are full for certain after Idle, counted from the end of the slice of ts.
func TestSlidingIdle(t *testing.T) {
	t.Parallel()
	for _, terms := range []bucket.Terms{tenInAMinute, slidingTerms(10, 60*second, 1)} {
		s, _ := buckettest.Take(terms, terms.Full(opening), opening+terms.Step-1, 10, 0)
		pruning := terms.Kind.Pruning(terms)
		require.Equal(t, bucket.Steps{}, pruning.Kind)
		require.InDelta(t, 10, buckettest.Tokens(terms, s, s.TS+pruning.Step), 0)
	}
}

// Totals do not grow with every take.
func TestSlidingTotalsStaySmall(t *testing.T) {
	t.Parallel()
	terms := slidingTerms(0.7, 10*second, 6)
	s, most := terms.Full(opening), 0.0
	for i := range testkit.Sized[int64](2_000, 30_000) {
		now := opening + i*7*second
		s, _ = buckettest.Take(terms, s, now, 0.1, 0)
		most = max(most, s.Parts.Taken[2])
	}
	require.Greater(t, most, 64*0.7)
	require.Less(t, most, 66*0.7)
}
