package ratelimit

import (
	"context"
	"hash/maphash"
	"math"
	"sync"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

const (
	// denyMaxAge is how long a refusal is answered from memory without another look: what other processes
	// give back shows no later.
	denyMaxAge = time.Second
	// denyStripes is the number of locks of the cache, and denySlots that of the counts of changes under each.
	denyStripes, denySlots = 64, 64
)

// denials is the deny cache: what buckets held when the database last refused a call, for as long as that
// is enough to refuse the next one. It holds refusals only, each from committed rows, and for calls over several limits
// what those of their limits held that did not refuse.
type denials struct {
	seed    maphash.Seed
	now     func() time.Duration // since the cache was made: cheaper to ask for than the time
	asOf    func() *int64        // the clock of a test, in place of the database's
	most    int                  // entries of a stripe
	stripes [denyStripes]denyStripe
}

type denyStripe struct {
	mu      sync.Mutex
	of      map[bucket.Key]*denial
	changed [denySlots]uint32 // how often this Limiter changed the buckets of each slot
}

// denial is what is known of one bucket.
type denial struct {
	limit   bucket.Terms // as defined, to notice that the policy has changed
	bucket  bucket.Terms // with the bucket's windows
	cost    float64      // this and every higher cost is refused
	until   int64        // until then, on the database's clock
	full    int64        // when the bucket is full if nothing is taken
	answer  answer
	askedAt time.Duration // before the database answered, and
	heardAt time.Duration // after
}

func newDenials(entries int, asOf func() *int64) *denials {
	if entries == 0 {
		return nil
	}
	made := time.Now()
	since := func() time.Duration { return time.Since(made) }
	d := &denials{seed: maphash.MakeSeed(), now: since, asOf: asOf, most: (entries + denyStripes - 1) / denyStripes}
	for i := range d.stripes {
		d.stripes[i].of = make(map[bucket.Key]*denial)
	}
	return d
}

func (d *denials) stripe(k bucket.Key) *denyStripe {
	return &d.stripes[maphash.String(d.seed, k.Key)%denyStripes]
}

// slot returns which of a stripe's counts is the bucket's.
func (d *denials) slot(k bucket.Key) int {
	return int((maphash.String(d.seed, k.Key)/denyStripes + maphash.String(d.seed, k.Name)) % denySlots)
}

// epochs appends how often each of the plan's buckets was changed: a refusal that was decided before a change is
// not kept after it.
func (d *denials) epochs(p *plan, epochs []uint32) []uint32 {
	for i := range p.buckets {
		k := p.buckets[i].bucketKey()
		s := d.stripe(k)
		s.mu.Lock()
		epochs = append(epochs, s.changed[d.slot(k)])
		s.mu.Unlock()
	}
	return epochs
}

// find returns what is known of a bucket, and what time it is for the database, or a little less: a wait
// counted from there is not too short.
func (d *denials) find(k bucket.Key, limit *bucket.Terms) (found *denial, now int64, ok bool) {
	s := d.stripe(k)
	s.mu.Lock()
	found, ok = s.of[k]
	if ok && found.limit != *limit {
		delete(s.of, k)
		ok = false
	}
	s.mu.Unlock()
	if !ok {
		return nil, 0, false
	}
	local := d.now()
	age := local - found.askedAt
	latest, now := found.answer.now+age.Microseconds(), found.answer.now+(local-found.heardAt).Microseconds()
	if asOf := d.asOf(); asOf != nil {
		latest, now = *asOf, *asOf
	}
	over := latest >= found.until && found.denies()
	return found, now, age < denyMaxAge && !over
}

// denies reports whether the entry refuses any cost.
func (e *denial) denies() bool { return !math.IsInf(e.cost, 1) }

// state sets s to the answer to a request that the entry refuses, or that is refused because of another limit.
func (e *denial) state(s *State, limit *Limit, cost float64, now int64) {
	v := &s.Value
	v.Limit, v.AsOf, v.terms, v.state, v.rows = *limit, time.UnixMicro(now), e.bucket, e.answer.state, e.answer.rows
	v.Tokens = v.tokens(now)
	s.Limit, s.Cost, s.Remaining = *limit, cost, max(v.Tokens, 0)
	s.ResetAfter = time.Duration(max(e.full-now, 0)) * time.Microsecond
	if cost == e.cost {
		s.RetryAfter = time.Duration(e.until-now) * time.Microsecond
	} else {
		s.RetryAfter = v.wait(now, cost, 0)
	}
	s.Allowed = s.RetryAfter == 0
}

// refuse returns the decision on a call for one bucket if it is known to be a refusal.
func (d *denials) refuse(b *ask) (Decision, bool) {
	e, now, ok := d.find(b.bucketKey(), &b.limit.terms)
	if !ok || b.cost < e.cost {
		return Decision{}, false
	}
	states := make([]State, 1)
	s := &states[0]
	e.state(s, &b.limit, b.cost, now)
	return Decision{RetryAfter: s.RetryAfter, Remaining: s.Remaining, ResetAfter: s.ResetAfter, At: s.Value.AsOf, States: states}, true
}

// refuseAll returns the decision on a call for several buckets if it is known to be a refusal.
func (d *denials) refuseAll(p *plan) (Decision, bool) {
	states, refused, at := make([]State, len(p.buckets)), false, int64(math.MaxInt64)
	for i := range p.buckets {
		b := &p.buckets[i]
		e, now, ok := d.find(b.bucketKey(), &b.limit.terms)
		if !ok {
			return Decision{}, false
		}
		e.state(&states[i], &b.limit, b.cost, now)
		refused = refused || b.cost >= e.cost
		at = min(at, now)
	}
	if !refused {
		return Decision{}, false
	}
	return p.decision(states, at), true
}

// keep remembers a refusal that was asked for at askedAt, of the buckets that were not changed since epochs.
func (d *denials) keep(p *plan, answers []answer, askedAt time.Duration, epochs []uint32) {
	heardAt := d.now()
	for i := range p.buckets {
		b, a := &p.buckets[i], answers[i]
		value := b.reading(a)
		e := &denial{limit: b.limit.terms, bucket: b.terms, cost: math.Inf(1), answer: a, askedAt: askedAt, heardAt: heardAt}
		e.answer.state = value.state
		e.full = a.now + value.wait(a.now, b.terms.Capacity, 0).Microseconds()
		if !a.allowed {
			e.cost, e.until = b.cost, a.now+value.wait(a.now, b.cost, 0).Microseconds()
		}
		k := b.bucketKey()
		d.stripe(k).keep(k, e, d.most, d.slot(k), epochs[i])
	}
}

// keep stores the entry, in place of some other when there is no room, unless the bucket was changed since the epoch.
func (s *denyStripe) keep(k bucket.Key, e *denial, most, slot int, epoch uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.changed[slot] != epoch {
		return
	}
	if !e.denies() { // it refuses nothing, and must not replace what does
		if old, found := s.of[k]; found && old.denies() {
			return
		}
	}
	if _, found := s.of[k]; !found && len(s.of) >= most {
		for other := range s.of { // any: what is asked for again comes back
			delete(s.of, other)
			break
		}
	}
	s.of[k] = e
}

// drop forgets a bucket, because tokens were taken from it or given back to it.
func (d *denials) drop(k bucket.Key) {
	s, slot := d.stripe(k), d.slot(k)
	s.mu.Lock()
	delete(s.of, k)
	s.changed[slot]++
	s.mu.Unlock()
}

// recallOne returns the decision on a call for one bucket outside a transaction if it is known to be a
// refusal.
func (l *Limiter) recallOne(ctx context.Context, requests []Request) (Decision, bool) {
	if len(requests) != 1 || l == nil || l.denials == nil || l.pool == nil || ctx.Err() != nil || l.batcher.IsClosed() {
		return Decision{}, false
	}
	r := &requests[0]
	if !(r.cost > 0 && r.cost <= r.limit.terms.Capacity) {
		return Decision{}, false
	}
	key, err := l.storedKey(*r)
	if err != nil {
		return Decision{}, false
	}
	return l.denials.refuse(&ask{limit: r.limit, key: key, cost: r.cost})
}

// recall answers c, from memory if that will do, and remembers what it has to.
func (l *Limiter) recall(ctx context.Context, c *call) (d Decision, known bool, err error) {
	caching := l.denials != nil && l.pool != nil && !c.look && !l.batcher.IsClosed()
	var askedAt time.Duration
	var room [1]uint32 // for the epochs, as there mostly is one bucket
	var epochs []uint32
	if caching {
		if len(c.plan.asked) > 1 {
			if d, known := l.denials.refuseAll(c.plan); known {
				return d, true, nil
			}
		}
		askedAt, epochs = l.denials.now(), l.denials.epochs(c.plan, room[:0])
	}
	if err := l.submit(ctx, c); err != nil {
		return Decision{}, false, err
	}
	if c.look {
		c.answers = c.plan.project(c.answers)
	}
	d = c.plan.decide(c.answers)
	switch {
	case c.look:
	case d.Allowed:
		l.invalidate(c.plan)
	case caching:
		l.denials.keep(c.plan, c.answers, askedAt, epochs)
	}
	return d, false, nil
}
