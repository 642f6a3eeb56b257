package bucket_test

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
	"github.com/pgratelimit/pgratelimit/internal/engine/bucket/buckettest"
)

const (
	opening = buckettest.Opening
	minute  = buckettest.Minute
	day     = buckettest.Day
)

// shrinking makes rapid a source, so that what fails is shrunk to something short.
type shrinking struct{ *rapid.T }

// Pick returns a number from 0 up to n-1.
func (s shrinking) Pick(n int) int { return rapid.IntRange(0, n-1).Draw(s.T, "pick") }

// Unit returns a number from 0 to 1.
func (s shrinking) Unit() float64 {
	return float64(rapid.IntRange(0, 1<<20).Draw(s.T, "unit")) / (1 << 20)
}

// TestAlgebraAgreesWithTheExactModel compares a bucket whose terms change with the model in rational numbers: its
// values, its decisions and its waits, at any instants and after any pauses. A decision may differ only if rounding
// decides it.
func TestAlgebraAgreesWithTheExactModel(t *testing.T) {
	t.Parallel()
	for name, draw := range map[string]func(buckettest.Source) bucket.Terms{
		"Everyday": buckettest.Everyday, "Extreme": buckettest.Extreme, "Dyadic": buckettest.Dyadic,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			decisions, open := 0, 0
			rapid.Check(t, func(t *rapid.T) {
				h := newErasHistory(t, draw)
				h.run(30)
				decisions, open = decisions+h.decisions, open+h.open
			})
			most := decisions / 5
			if name == "Extreme" { // a capacity may be a thousandth of what the bucket owes
				most = decisions / 2
			}
			require.Less(t, open, most, "of %d decisions rounding decides", decisions)
		})
	}
}

// FuzzHistory is TestAlgebraAgreesWithTheExactModel for as long as one likes.
func FuzzHistory(f *testing.F) {
	f.Fuzz(rapid.MakeFuzz(func(t *rapid.T) {
		newErasHistory(t, buckettest.One(shrinking{t}, buckettest.Everyday, buckettest.Extreme)).run(20)
	}))
}

// erasHistory is a bucket in revisions twice, as stored and in the exact model.
type erasHistory struct {
	*rapid.T

	src       shrinking
	list      []bucket.Revision
	revisions *bucket.Revisions
	model     *buckettest.ExactBucket
	row       *bucket.State // as it is stored; nil: there is none
	now       int64

	// The latest credit or refusal since a call that wrote ts. Neither writes it, so if the clock steps back behind it,
	// the time up to it may count once more, within what capacity and rate give for the span. The model is stricter.
	counted int64

	decisions, open int
}

func newErasHistory(t *rapid.T, draw func(buckettest.Source) bucket.Terms) *erasHistory {
	h := &erasHistory{T: t, src: shrinking{t}, now: opening - minute, counted: math.MinInt64}
	h.list = buckettest.DrawRevisions(h.src, draw)
	h.revisions = bucket.NewRevisions(h.list)
	h.model = buckettest.NewExactBucket(buckettest.ExactlyRevisions(h.list))
	for _, e := range h.list {
		t.Logf("from %d: %v, %+v", e.From, e.Change, e.Terms)
	}
	return h
}

// run makes n calls.
func (h *erasHistory) run(n int) {
	for range n {
		h.step()
	}
}

// advance moves the clock, mostly to where something is about to happen, and sometimes back.
func (h *erasHistory) advance() {
	terms := h.revisions.Holding(h.now)
	period := float64(buckettest.Period(terms))
	switch h.src.Pick(9) {
	case 0:
	case 1:
		h.now++
	case 2, 3:
		h.now += int64(h.src.Unit() * 3 * period / max(terms.Rate, 1))
	case 4:
		h.now += int64(h.src.Unit() * 2 * period)
	case 5, 6: // a change, or a microsecond before or after it
		if from := buckettest.One(h.src, h.list...).From; from > math.MinInt64 {
			h.now = max(h.now, from+int64(h.src.Pick(3)-1))
		}
	case 7:
		h.now = terms.Begin(h.now) + terms.Step - int64(h.src.Pick(2))
	default:
		back := int64(h.src.Unit() * float64(minute))
		if h.src.Pick(4) == 0 {
			back *= 1000
		}
		h.now -= back
	}
	h.now = max(h.now, h.counted)
}

// settle returns the terms that hold, and the row of the bucket under them, as the store does on locked rows. It is
// compared with the model, which is brought to the same instant.
func (h *erasHistory) settle() (terms bucket.Terms, row bucket.State, absent bool, now int64) {
	terms, now = h.revisions.Holding(h.now), h.now
	if s := h.row; s != nil && s.TS > now && !terms.FromFuture(*s, h.now) {
		since, _ := terms.At(s.TS).Span()
		now = max(now, since)
	}
	terms = terms.At(now)
	asks := []bucket.Ask{{Key: bucket.Key{Name: "limit"}, Terms: terms}}
	p := bucket.NewLedger(asks)
	p.Now = now
	if h.row != nil {
		p.Put(0, *h.row, false)
	} else {
		p.Put(0, bucket.State{}, true)
	}
	p.Settle(asks)
	row = terms.FixClock(p.Look(asks, nil)[0].State, now)

	exactNow, unsure := h.model.Bring(h.now)
	require.Equal(h, exactNow, now, "the instant of the decision")
	absent = h.row == nil && row == terms.Full(now) // a row that has been made for the decision is full
	if unsure {
		h.open++
		h.model.Adopt([]bucket.State{row}, []bool{absent}, now)
	}
	h.holds(terms, row, now, "once settled")
	return terms, row, absent, now
}

// holds compares what the row holds with the model.
func (h *erasHistory) holds(terms bucket.Terms, row bucket.State, now int64, when string) {
	want := h.model.Tokens(now)
	off := buckettest.Off(buckettest.Tokens(terms, row, now), want)
	if off > h.model.Off+h.slack(terms) {
		h.Fatalf("at %d, %s, %+v of revision %d holds %v, and exactly %v", now, when, row, terms.Revision, buckettest.Tokens(terms, row, now), want.FloatString(12))
	}
	require.GreaterOrEqual(h, row.TS, h.list[terms.Revision].From, "a row that is settled is of the revision") // the revision of the first is not checked
}

// slack is how far off a number of these terms may be.
func (h *erasHistory) slack(terms bucket.Terms) float64 {
	return 0x1p-46 * (terms.Capacity + terms.Rate + terms.MaxDebt)
}

// step makes one call.
func (h *erasHistory) step() {
	h.advance()
	before := h.model.Clone()
	terms, row, absent, now := h.settle()
	keep := !absent
	amount := max(terms.Capacity*h.src.Unit()*buckettest.One(h.src, 0.1, 0.5, 1, 1), bucket.MinTokens)
	chance := h.src.Pick(20)
	h.Logf("at %d, in revision %d: call %d, amount %v, on %+v, absent %v", now, terms.Revision, chance, amount, row, absent)
	counted := h.counted
	h.counted = max(h.counted, now)
	switch {
	case chance == 0: // a look, which stores nothing
		h.model, h.counted = before, counted
		return
	case chance == 1:
		row = terms.Kind.Fill(terms, row, now)
		h.model.Fill(now)
		keep, h.counted = true, math.MinInt64
	case chance < 4:
		row = terms.Kind.Charge(terms, terms.FixClock(row, now), now, amount)
		h.model.Spend(amount, now)
		keep, h.counted = true, math.MinInt64
	case chance < 7:
		row = buckettest.Credit(terms, row, now, amount, math.MaxInt64)
		h.model.Credit(amount, now)
		keep = true
	default:
		lowest := -terms.MaxDebt * float64(h.src.Pick(2))
		keep = h.take(terms, &row, now, amount-lowest*h.src.Unit(), lowest) || keep
	}
	h.holds(terms, row, now, "after the call")
	if h.row = nil; keep {
		h.row = &row
	}
}

// take takes from the row.
func (h *erasHistory) take(terms bucket.Terms, row *bucket.State, now int64, cost, lowest float64) (allowed bool) {
	if !buckettest.Possible(terms, cost, lowest) {
		return false
	}
	spare := buckettest.Spare(h.model.Tokens(now), cost, lowest)
	answer := bucket.Answer{Now: now}
	*row, allowed = buckettest.Take(terms, *row, now, cost, lowest)
	answer.Allowed, answer.State = allowed, *row
	h.decided(terms, allowed, spare, cost, now)
	if allowed {
		h.model.Spend(cost, now)
		cost, lowest, h.counted = 0, 0, math.MinInt64
	}
	o := (&bucket.Ask{Terms: terms, Cost: cost}).Tell(&answer, lowest, &bucket.Snapshot{})
	if !allowed {
		h.waits(terms, now, o.RetryAfter, cost+lowest)
	} else {
		require.Zero(h, o.RetryAfter)
	}
	h.waits(terms, now, o.FullAfter, terms.Capacity)
	return allowed
}

// decided compares a decision with spare, the exact tokens beyond the cost.
func (h *erasHistory) decided(terms bucket.Terms, allowed bool, spare, cost float64, now int64) {
	h.decisions++
	if math.Abs(spare) <= h.model.Off+h.slack(terms) {
		h.open++
		return
	}
	if spare > 0 != allowed {
		h.Fatalf("%v at %d in revision %d: allowed %v, with %v to spare", cost, now, terms.Revision, allowed, spare)
	}
}

// waits checks that the bucket holds so many tokens after the wait, and not a microsecond before, while no other
// revision begins.
func (h *erasHistory) waits(terms bucket.Terms, now int64, wait time.Duration, tokens float64) {
	slack := h.model.Off + h.slack(terms)
	if at := wait.Microseconds(); at < bucket.Horizon/2 {
		require.GreaterOrEqual(h, buckettest.Spare(h.model.Tokens(now+at), tokens, 0), -slack, "after %v from %d", wait, now)
		if at > 0 {
			require.LessOrEqual(h, buckettest.Spare(h.model.Tokens(now+at-1), tokens, 0), slack, "a microsecond before %v from %d", wait, now)
		}
	}
}

// TestCreditUntilTheEndOfTheWindow holds CreditUntil to the exact model: tokens taken at an instant can be returned
// until the end of their window under the current policy.
func TestCreditUntilTheEndOfTheWindow(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		src := shrinking{t}
		list := buckettest.DrawRevisions(src, buckettest.Everyday)
		last := &list[len(list)-1]
		last.From = max(last.From, opening)
		exact, terms := buckettest.ExactlyRevisions(list), bucket.NewRevisions(list).Holding(last.From)
		period := buckettest.Period(last.Terms)
		for range 20 {
			now := last.From + int64(src.Unit()*2*float64(period))
			taken := now - buckettest.One(src, 0, 1, int64(src.Unit()*2*float64(period)), now-last.From, max(0, now-last.From-1), now-last.From+1, now-terms.Begin(now), now-terms.Begin(now)+1)
			if taken > now {
				continue
			}
			require.Equal(t, exact.MayCredit(len(list)-1, taken, now), terms.Begin(now) <= buckettest.CreditUntil(terms, taken),
				"taken at %d, and given back at %d, in a revision from %d of %+v", taken, now, last.From, last.Terms)
		}
	})
}
