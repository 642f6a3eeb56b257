package buckettest

import (
	"fmt"
	"math/big"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// subject is one bucket of a history, twice.
type subject struct {
	key   bucket.Key
	terms bucket.Terms
	row   *bucket.State // nil: none
	model *exactBucket
}

// state returns the subject's row, or what no row means.
func (s *subject) state(now int64) bucket.State {
	if s.row == nil {
		return s.terms.Full(now)
	}
	return *s.row
}

// exact returns the model's bucket, or what no row means.
func (s *subject) exact(e exactPolicy, now int64) exactBucket {
	if s.model == nil {
		return e.full(now)
	}
	return *s.model
}

// fixClock brings a ts of a wrong clock back to now. There is a row then.
func (s *subject) fixClock(now int64) {
	row, e := s.terms.FixClock(s.state(now), now), exactly(s.terms)
	model := s.exact(e, now)
	if e.wrong(model.ts, now) {
		model.ts = e.floor(now)
	}
	s.row, s.model = &row, &model
}

func (s *subject) String() string {
	row := "no row"
	if s.row != nil {
		row = fmt.Sprintf("row{value: %v, ts: %d}", s.row.Value, s.row.TS)
	}
	return fmt.Sprintf("%+v %s", s.terms, row)
}

// compare holds the answer of the algebra for one bucket to the exact model, and returns the model's bucket after the
// call.
func (h *History) compare(s *subject, a *bucket.Ask, got bucket.Answer) exactBucket {
	e, lowest := exactly(s.terms), rational(a.Lowest)
	before := s.exact(e, h.Now)
	after := e.settle(before, h.Now).spend(rational(a.Cost))
	margin, slack := total(after.value, negative(lowest)), after.rounding+added*size(lowest)
	if h.Exact {
		after.rounding, slack = 0, 0
	}
	h.Decisions++
	if size(margin) <= slack && slack > 0 {
		h.Open++ // the decision may go either way
	} else if margin.Sign() >= 0 != got.Allowed {
		h.T.Fatalf("%v of %v at %d: allowed %v, with an exact margin of %v", a.Cost, s, h.Now, got.Allowed, margin.FloatString(30))
	}
	if got.Allowed {
		off := size(total(rational(got.State.Value), negative(after.value)))
		if off > after.rounding || after.ts != got.State.TS {
			h.T.Fatalf("%v of %v at %d leaves %+v: off by %v of at most %v, and exactly ts %d",
				a.Cost, s, h.Now, got.State, off, after.rounding, after.ts)
		}
		h.compareWait(s, after, new(big.Rat), new(big.Rat), Wait(s.terms, got.State, h.Now, 0, 0))
		return after
	}
	if e.wrong(before.ts, h.Now) {
		before.ts = e.floor(h.Now)
	}
	h.compareWait(s, before, rational(a.Cost), lowest, Wait(s.terms, got.State, h.Now, a.Cost, a.Lowest))
	return after
}

// compareWait compares the wait, until b can give cost so that lowest remain, with the exact model. It must lie between the waits
// of two buckets: one holds more than b by the rounding error, and the other less.
func (h *History) compareWait(s *subject, b exactBucket, cost, lowest *big.Rat, wait time.Duration) {
	missing := total(cost, lowest, negative(b.value))
	slack := 2*b.rounding + 2*added*(size(b.value)+size(cost)+size(lowest))
	if h.Exact {
		slack = 0
	}
	if size(missing) <= slack || missing.Sign() < 0 {
		return
	}
	e, at := exactly(s.terms), big.NewInt(h.Now+wait.Microseconds())
	soonest := e.retryAt(b, total(missing, negative(rational(slack))))
	latest := e.retryAt(b, total(missing, rational(slack)))
	if new(big.Int).Sub(latest, big.NewInt(min(h.Now, b.ts))).Cmp(big.NewInt(bucket.Horizon)) >= 0 {
		return // a wait over 250 years does not matter
	}
	if soonest.Cmp(at) > 0 || at.Cmp(latest) > 0 {
		h.T.Fatalf("at %d, %v lacks %v and is to have it at %v, not from %v to %v", h.Now, s, missing.FloatString(30), at, soonest, latest)
	}
}
