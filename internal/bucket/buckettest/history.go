package buckettest

import (
	"math"
	"slices"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// History is a sequence of random calls on a few buckets. It makes them on the algebra and on the exact model, and compares both
// after each, and on a Server if there is one.
type History struct {
	T interface {
		Fatalf(format string, args ...any)
	}
	Src    Source
	Draw   func(Source) bucket.Terms // the policies
	Exact  bool                      // whether the numbers are such that nothing rounds
	Server Server                    // nil: none
	Now    int64

	subjects []*subject

	Decisions, Open, Rejected int // Open: either answer would have been right, for rounding
}

// Server receives the calls of a history, and compares its own answers with the answers of the algebra. found are the rows before
// the call; nil is no row.
type Server interface {
	// Take is all or nothing: if one of the expected answers is a refusal, the rows do not change. It reports the rows whose wrong
	// clock it has corrected.
	Take(asks []bucket.Ask, found []*bucket.State, expected []bucket.Answer) (clocksFixed []bool)
	// Look changes nothing.
	Look(asks []bucket.Ask, found []*bucket.State)
	// Plant writes a row behind the limiter's back.
	Plant(row bucket.Key, state bucket.State)
}

// Begin gives the history a bucket for each key, and a time.
func (h *History) Begin(keys ...string) {
	h.Now = Opening
	for _, key := range keys {
		h.subjects = append(h.subjects, &subject{key: bucket.Key{Name: "history", Key: key}, terms: h.Draw(h.Src)})
	}
}

// Run makes n calls.
func (h *History) Run(n int) {
	for range n {
		s := One(h.Src, h.subjects...)
		if h.Src.Pick(25) == 0 {
			s.terms = h.Draw(h.Src)
		}
		h.advance(s)
		switch chance := h.Src.Pick(100); {
		case chance < 5:
			h.fill(s)
		case chance < 8:
			h.plant(s)
		case chance < 12:
			h.call(look, s)
		case chance < 25:
			h.call(verb(chance%2), s, One(h.Src, h.subjects...))
		case chance < 50 || s.terms.Capacity == 0:
			h.call(reserve, s)
		default:
			h.call(take, s)
		}
	}
}

// LookAtAll has the server show every row.
func (h *History) LookAtAll() {
	for _, s := range h.subjects {
		h.call(look, s)
	}
}

// advance moves the clock, mostly to an instant just before a change of s, and sometimes back.
func (h *History) advance(s *subject) {
	row, period := s.state(h.Now), float64(Period(s.terms))
	few := int64(h.Src.Unit() * 3 * period / max(s.terms.Rate, 1))
	switch h.Src.Pick(12) {
	case 0: // the same instant
	case 1:
		h.Now++
	case 2, 3, 4:
		h.Now += few
	case 5:
		h.Now += int64(h.Src.Unit() * 2 * period)
	case 6: // the start of the next step or window, or just before
		h.Now = s.terms.Begin(h.Now) + s.terms.Step - int64(h.Src.Pick(2))
	case 7, 8: // when some cost can be met, or just before
		cost := h.Src.Unit() * s.terms.Capacity
		h.Now += Wait(s.terms, row, h.Now, cost, 0).Microseconds() - int64(h.Src.Pick(2))
	case 9: // back, less than the tolerance
		h.Now -= int64(h.Src.Unit() * float64(Minute))
	case 10: // back to the edge of the tolerance
		h.Now = row.TS - Minute - s.terms.Step + int64(h.Src.Pick(4)-1)
	case 11:
		if h.Src.Pick(10) == 0 {
			h.Now += int64((h.Src.Unit()*2 - 1) * float64(Century/10))
		}
	}
	if year := time.UnixMicro(h.Now).Year(); year < 1000 || year > 4000 {
		h.Now = Opening
	}
}

type verb int

const (
	take verb = iota
	reserve
	look // a cost of 0
)

// call asks one or several buckets.
func (h *History) call(verb verb, subjects ...*subject) {
	if len(subjects) > 1 && subjects[0] == subjects[1] {
		subjects = subjects[:1]
	}
	slices.SortFunc(subjects, func(a, b *subject) int { return a.key.Compare(b.key) }) // the order of locking
	n := len(subjects)
	asks, found, expected, after := make([]bucket.Ask, n), make([]*bucket.State, n), make([]bucket.Answer, n), make([]exactBucket, n)
	for i, s := range subjects {
		asks[i], found[i] = h.ask(s, verb), s.row
		if a := &asks[i]; !Possible(a.Terms, a.Cost, a.Lowest) {
			h.Rejected++ // it can never be met
			return
		}
	}
	clocksFixed := make([]bool, n)
	for i, s := range subjects {
		next, ok := Take(s.terms, s.state(h.Now), h.Now, asks[i].Cost, asks[i].Lowest)
		expected[i] = bucket.Answer{Allowed: ok, State: next, Now: h.Now}
		after[i] = h.compare(s, &asks[i], expected[i])
		clocksFixed[i] = s.terms.FromFuture(s.state(h.Now), h.Now)
	}
	allowed := bucket.AllAllowed(expected)
	switch {
	case bucket.AllCostless(asks):
		if h.Server != nil {
			h.Server.Look(asks, found)
		}
		return
	case h.Server != nil:
		clocksFixed = h.Server.Take(asks, found, expected)
	}
	for i, s := range subjects {
		if allowed {
			s.row, s.model = &expected[i].State, &after[i]
		} else if clocksFixed[i] {
			s.fixClock(h.Now)
		}
	}
}

// ask returns a request for as much of s as is often just there, or a little more.
func (h *History) ask(s *subject, verb verb) bucket.Ask {
	a := bucket.Ask{Key: s.key, Terms: s.terms}
	room, most := Tokens(s.terms, s.state(h.Now), h.Now), s.terms.Capacity
	switch verb {
	case look:
		return a
	case reserve:
		a.Lowest = -s.terms.MaxOwed
		room, most = room+s.terms.MaxOwed, most+s.terms.MaxOwed
	case take:
	}
	switch h.Src.Pick(12) {
	case 0:
		a.Cost = One(h.Src, room, math.Nextafter(room, math.Inf(1)))
	case 1, 2, 3:
		a.Cost = room * h.Src.Unit() * 2
	case 4:
		a.Cost = s.terms.Capacity
	case 5:
		a.Cost = s.terms.Capacity * bucket.MinCostShare
	case 6, 7, 8, 9:
		a.Cost = s.terms.Capacity * h.Src.Unit()
	}
	if h.Exact {
		a.Cost = math.Round(min(a.Cost, 1<<13)*1024) / 1024
	}
	if !(a.Cost > 0) || a.Cost > most {
		a.Cost = min(1, most)
	}
	return a
}

// fill fills s.
func (h *History) fill(s *subject) {
	full, e := s.terms.Full(h.Now), exactly(s.terms)
	model := e.full(h.Now)
	if model.ts != full.TS {
		h.T.Fatalf("%v full at %d: ts %d, and exactly %d", s, h.Now, full.TS, model.ts)
	}
	if s.row != nil && !e.wrong(s.row.TS, h.Now) { // what arrived until then has been credited
		full.TS = max(full.TS, s.row.TS)
		model.ts = max(model.ts, s.model.ts)
	}
	s.row, s.model = &full, &model
	if h.Server != nil {
		h.Server.Plant(s.key, *s.row)
	}
}

// plant puts into the row what no policy of the moment would have: what another policy, another clock or
// another program left there.
func (h *History) plant(s *subject) {
	capacity := s.terms.Capacity
	value := One(h.Src, 0, capacity, 2*capacity+1, -capacity-1, -1, 1e300, -1e300, math.MaxFloat64, -math.MaxFloat64, 5e-324)
	if h.Exact {
		value = math.Round(max(min(value, 1<<20), -1<<20)*1024) / 1024
	}
	tolerated := h.Now + Minute + s.terms.Step
	ts := One(h.Src, h.Now, h.Now-Minute, tolerated, tolerated+1, bucket.MinInstant, bucket.MaxInstant)
	s.row, s.model = &bucket.State{Value: value, TS: ts}, &exactBucket{value: rational(value), ts: ts}
	if h.Server != nil {
		h.Server.Plant(s.key, *s.row)
	}
}
