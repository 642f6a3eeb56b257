package ratelimit

import (
	"math"
	"math/big"
	"math/rand/v2"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// source is where a history takes its chances from: a generator with a seed, or rapid, which shrinks them.
type source interface {
	pick(n int) int // from 0 up to n-1
	unit() float64  // from 0 up to 1
}

type seeded struct{ *rand.Rand }

func (s seeded) pick(n int) int { return s.IntN(n) }
func (s seeded) unit() float64  { return s.Float64() }

func one[T any](src source, of ...T) T { return of[src.pick(len(of))] }

// history is a sequence of random calls on a few buckets: on the implementation and on the exact model,
// which are compared after each. send, when set, is given what the database should be told and answer.
type history struct {
	t        require.TestingT
	src      source
	draw     func(source) Policy
	exact    bool // the numbers are such that nothing rounds
	limiter  *Limiter
	now      int64
	subjects []*subject
	send     func(p *plan, expected []answer, allowed bool)

	decisions, open, rejected int // open: either answer would have been right, for rounding
}

// subject is one bucket of a history, twice.
type subject struct {
	key    string
	limit  Limit
	row    *bucket.State // nil: none
	model  *exactBucket
	starts map[time.Duration]int64 // a window's start, for each period that was in use without a Start
}

func newHistory(t require.TestingT, src source, draw func(source) Policy, limiter *Limiter, keys ...string) *history {
	h := &history{t: t, src: src, draw: draw, limiter: limiter, now: opening.UnixMicro()}
	limiter.config.AsOf = func() time.Time { return time.UnixMicro(h.now) }
	for _, key := range keys {
		h.subjects = append(h.subjects, &subject{key: key, limit: Define("history", draw(src)), starts: map[time.Duration]int64{}})
	}
	return h
}

// run makes n calls.
func (h *history) run(n int) {
	for range n {
		s := one(h.src, h.subjects...)
		if h.src.pick(25) == 0 {
			s.limit = Define("history", h.draw(h.src))
		}
		h.advance(s)
		switch chance := h.src.pick(100); {
		case chance < 5:
			h.reset(s)
		case chance < 8:
			h.plant(s)
		case chance < 12:
			h.call(look, s)
		case chance < 25:
			h.call(verb(chance%2), s, one(h.src, h.subjects...))
		case chance < 50 && s.terms().Reserves || s.terms().Capacity == 0:
			h.call(reserve, s)
		default:
			h.call(take, s)
		}
	}
}

// advance moves the clock, mostly to where something is about to happen to s, and sometimes back.
func (h *history) advance(s *subject) {
	terms, row := s.terms(), s.state(h.now)
	period := int64(terms.Steps) * terms.Step
	few := int64(h.src.unit() * 3 * float64(period) / max(terms.Rate, 1))
	switch h.src.pick(12) {
	case 0: // the same instant
	case 1:
		h.now += 1
	case 2, 3, 4:
		h.now += few
	case 5:
		h.now += int64(h.src.unit() * 2 * float64(period))
	case 6: // the start of the next step or window, or just before
		h.now = terms.Begin(h.now) + terms.Step - int64(h.src.pick(2))
	case 7, 8: // when some cost can be met, or just before
		cost := h.src.unit() * terms.Capacity
		h.now += terms.Wait(row, h.now, cost, 0).Microseconds() - int64(h.src.pick(2))
	case 9: // back, less than the tolerance
		h.now -= int64(h.src.unit() * float64(minute))
	case 10: // back to the edge of the tolerance
		h.now = row.TS - minute - terms.Step + int64(h.src.pick(4)-1)
	case 11:
		if h.src.pick(10) == 0 {
			h.now += int64((h.src.unit()*2 - 1) * 10 * 365 * float64(Day.Microseconds()))
		}
	}
	if year := time.UnixMicro(h.now).Year(); year < 1000 || year > 4000 {
		h.now = opening.UnixMicro()
	}
}

type verb int

const (
	take verb = iota
	reserve
	look // a cost of 0
)

// call asks one or several buckets.
func (h *history) call(verb verb, subjects ...*subject) {
	var requests []Request
	for i, s := range subjects {
		if i == 0 || s != subjects[0] {
			requests = append(requests, s.limit.For(s.key).Cost(h.cost(s, verb)))
		}
	}
	p, err := h.limiter.plan(requests, verb == reserve)
	if err != nil {
		h.rejected++ // the cost can never be met, or the limit takes no reservations
		return
	}
	expected, after := make([]answer, len(p.buckets)), make([]exactBucket, len(p.buckets))
	allowed := true
	for i := range p.buckets {
		b := &p.buckets[i]
		s := h.of(b)
		next, ok := b.terms.Take(s.state(h.now), h.now, b.cost, b.lowest)
		expected[i] = answer{allowed: ok, state: next, now: h.now}
		after[i] = h.compare(s, b, expected[i])
		allowed = allowed && ok
	}
	if h.send != nil {
		h.send(p, expected, allowed)
	}
	if p.free() {
		return
	}
	for i := range p.buckets {
		s := h.of(&p.buckets[i])
		if allowed {
			s.row, s.model = &expected[i].state, &after[i]
		} else if s.terms().FromFuture(s.state(h.now), h.now) {
			s.mend(h.now)
		}
	}
}

// compare holds the implementation's answer for one bucket to the exact model, and returns the model's
// bucket after the call.
func (h *history) compare(s *subject, b *ask, got answer) exactBucket {
	e := s.exactly(h.now)
	lowest := new(big.Rat)
	if b.lowest < 0 {
		lowest = negative(e.debt)
	}
	before := s.exactBucket(e, h.now)
	after := e.settle(before, h.now).spend(rational(b.cost))
	margin, slack := total(after.value, negative(lowest)), after.rounding+added*size(lowest)
	if h.exact {
		after.rounding, slack = 0, 0
	}
	h.decisions++
	if size(margin) <= slack && slack > 0 {
		h.open++ // the decision may go either way
	} else {
		require.Equal(h.t, margin.Sign() >= 0, got.allowed, "allowed: %v of %v at %d, margin %v", b.cost, s, h.now, margin.FloatString(30))
	}
	if got.allowed {
		off := size(total(rational(got.state.Value), negative(after.value)))
		require.LessOrEqual(h.t, off, after.rounding, "value after %v of %v at %d", b.cost, s, h.now)
		require.Equal(h.t, after.ts, got.state.TS, "ts after %v of %v at %d", b.cost, s, h.now)
		h.compareWait(s, after, new(big.Rat), new(big.Rat), b.terms.Wait(got.state, h.now, 0, 0))
		return after
	}
	if e.wrong(before.ts, h.now) {
		before.ts = e.floor(h.now)
	}
	h.compareWait(s, before, rational(b.cost), lowest, b.terms.Wait(got.state, h.now, b.cost, b.lowest))
	return after
}

// compareWait holds the wait until b has cost and lowest remain to the exact model: it must lie between
// that of a bucket that holds as much more as rounding may have cost, and that of one that holds as much less.
func (h *history) compareWait(s *subject, b exactBucket, cost, lowest *big.Rat, wait time.Duration) {
	missing := total(cost, lowest, negative(b.value))
	slack := 2*b.rounding + 2*added*(size(b.value)+size(cost)+size(lowest))
	if h.exact {
		slack = 0
	}
	if size(missing) <= slack || missing.Sign() < 0 {
		return
	}
	e, at := s.exactly(h.now), big.NewInt(h.now+wait.Microseconds())
	soonest := e.retryAt(b, total(missing, negative(rational(slack))))
	latest := e.retryAt(b, total(missing, rational(slack)))
	if new(big.Int).Sub(latest, big.NewInt(min(h.now, b.ts))).Cmp(big.NewInt(bucket.Horizon)) >= 0 {
		return // nobody waits for 250 years
	}
	require.True(h.t, soonest.Cmp(at) <= 0 && at.Cmp(latest) <= 0, "at %d, %v lacks %v and is to have it at %v, not from %v to %v",
		h.now, s, missing.FloatString(30), at, soonest, latest)
}

// cost returns what to ask of s: often just what is there, or a little more.
func (h *history) cost(s *subject, verb verb) float64 {
	terms := s.terms()
	room, most := terms.Tokens(s.state(h.now), h.now), terms.Capacity
	switch verb {
	case look:
		return 0
	case reserve:
		room, most = room+terms.MaxDebt, most+terms.MaxDebt
	case take:
	}
	var cost float64
	switch h.src.pick(12) {
	case 0:
		cost = one(h.src, room, math.Nextafter(room, math.Inf(1)))
	case 1, 2, 3:
		cost = room * h.src.unit() * 2
	case 4:
		cost = terms.Capacity
	case 5:
		cost = terms.Capacity * bucket.MinCostShare
	case 6, 7, 8, 9:
		cost = terms.Capacity * h.src.unit()
	}
	if h.exact {
		cost = math.Round(min(cost, 1<<13)*1024) / 1024
	}
	if !(cost > 0) || cost > most {
		return min(1, most)
	}
	return cost
}

// reset fills s.
func (h *history) reset(s *subject) {
	p, err := h.limiter.plan([]Request{s.limit.For(s.key).Cost(0)}, false)
	require.NoError(h.t, err)
	full, e := s.terms().Full(h.now), s.exactly(h.now)
	model := e.full(h.now)
	require.Equal(h.t, model.ts, full.TS)
	if s.row != nil && !e.wrong(s.row.TS, h.now) { // what arrived until then has been credited
		full.TS = max(full.TS, s.row.TS)
		model.ts = max(model.ts, s.model.ts)
	}
	if h.send != nil {
		h.send(p, nil, true)
	}
	s.row, s.model = &full, &model
}

// plant puts into the row what no policy of the moment would have: what another policy, another clock or
// another program left there.
func (h *history) plant(s *subject) {
	terms := s.terms()
	value := one(h.src, 0, terms.Capacity, 2*terms.Capacity+1, -terms.Capacity-1, -1, 1e300, -1e300, math.MaxFloat64, -math.MaxFloat64, 5e-324)
	if h.exact {
		value = math.Round(max(min(value, 1<<20), -1<<20)*1024) / 1024
	}
	ts := one(h.src, h.now, h.now-minute, h.now+minute+terms.Step, h.now+minute+terms.Step+1, bucket.MinInstant, bucket.MaxInstant)
	s.row, s.model = &bucket.State{Value: value, TS: ts}, &exactBucket{value: rational(value), ts: ts}
	if h.send != nil {
		h.send(&plan{buckets: []ask{{limit: s.limit, key: s.key}}}, []answer{{state: *s.row}}, true)
	}
}

func (h *history) of(b *ask) *subject {
	for _, s := range h.subjects {
		if s.key == b.key {
			return s
		}
	}
	panic("no subject has the key " + b.key)
}
