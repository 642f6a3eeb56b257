package ratelimit

import (
	"context"
	"hash/maphash"
	"math"
	"sync"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/batch"
	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/store"
)

const (
	// denyMaxAge is how long a refusal is answered from memory without another look: what other processes
	// give back shows no later.
	denyMaxAge = time.Second
	// denyStripes is the number of locks of the cache, and denySlots that of the counts of changes under each.
	denyStripes, denySlots = 64, 64
)

// denyCache is the deny cache: what buckets held when the database last refused a call, for as long as that
// is enough to refuse the next one. It holds refusals only, each from committed rows, and for calls over several limits
// what those of their limits held that did not refuse.
type denyCache struct {
	seed    maphash.Seed
	now     func() time.Duration // since the cache was made: cheaper to ask for than the time
	asOf    func() *int64        // the clock of a test, in place of the database's; nil: none
	most    int                  // entries of a stripe
	stripes [denyStripes]denyStripe
}

type denyStripe struct {
	mu      sync.Mutex
	of      map[bucket.Key]*entry
	changed [denySlots]uint32 // how often this Limiter changed the buckets of each slot
}

// entry is what is known of one bucket.
type entry struct {
	limit   Limit         // as defined, to notice that the policy has changed
	held    held          // at now, by terms with the bucket's windows
	now     int64         // on the database's clock
	cost    float64       // this and every higher cost is refused
	until   int64         // until then, on the database's clock
	full    int64         // when the bucket is full if nothing is taken
	askedAt time.Duration // before the database answered, and
	heardAt time.Duration // after
}

func newDenyCache(entries int, asOf func() *int64) *denyCache {
	if entries == 0 {
		return nil
	}
	made := time.Now()
	since := func() time.Duration { return time.Since(made) }
	d := &denyCache{seed: maphash.MakeSeed(), now: since, asOf: asOf, most: (entries + denyStripes - 1) / denyStripes}
	for i := range d.stripes {
		d.stripes[i].of = make(map[bucket.Key]*entry)
	}
	return d
}

func (d *denyCache) stripe(k bucket.Key) *denyStripe {
	return &d.stripes[maphash.String(d.seed, k.Key)%denyStripes]
}

// slot returns which of a stripe's counts is the bucket's.
func (d *denyCache) slot(k bucket.Key) int {
	return int((maphash.String(d.seed, k.Key)/denyStripes + maphash.String(d.seed, k.Name)) % denySlots)
}

// epochs appends how often each of the buckets was changed: a refusal that was decided before a change is not kept
// after it.
func (d *denyCache) epochs(asks []bucket.Ask, epochs []uint32) []uint32 {
	for i := range asks {
		s := d.stripe(asks[i].Key)
		s.mu.Lock()
		epochs = append(epochs, s.changed[d.slot(asks[i].Key)])
		s.mu.Unlock()
	}
	return epochs
}

// find returns what is known of a bucket, and what time it is for the database, or a little less: a wait
// counted from there is not too short.
func (d *denyCache) find(k bucket.Key, limit Limit) (found *entry, now int64, ok bool) {
	s := d.stripe(k)
	s.mu.Lock()
	found, ok = s.of[k]
	if ok && !found.limit.isAs(limit) {
		delete(s.of, k)
		ok = false
	}
	s.mu.Unlock()
	if !ok {
		return nil, 0, false
	}
	local := d.now()
	age := local - found.askedAt
	latest, now := found.now+age.Microseconds(), found.now+(local-found.heardAt).Microseconds()
	if d.asOf != nil {
		asOf := *d.asOf()
		latest, now = asOf, asOf
	}
	over := latest >= found.until && found.denies()
	return found, now, age < denyMaxAge && !over
}

// denies reports whether the entry refuses any cost.
func (e *entry) denies() bool { return !math.IsInf(e.cost, 1) }

// state sets s to the answer to an ask that the entry refuses, or that is refused because of another limit.
func (e *entry) state(s *State, of *subject, a *bucket.Ask, now int64) {
	v, limit, cost := &s.Value, of.limit, a.Cost
	of.tell(s, nil)
	v.Limit, v.AsOf, v.held = limit, time.UnixMicro(now), &e.held
	v.Tokens = e.held.tokens(now)
	s.Limit, s.Cost, s.Charged, s.Remaining = limit, cost, min(a.Price(), maxPrice), max(v.Tokens, 0)
	s.ResetAfter = time.Duration(max(e.full-now, 0)) * time.Microsecond
	if cost == e.cost {
		s.RetryAfter = time.Duration(e.until-now) * time.Microsecond
	} else {
		s.RetryAfter = e.held.wait(now, cost, 0)
	}
	s.Allowed = s.RetryAfter == 0
}

// refuse returns the decision on a call for one bucket if it is known to be a refusal.
func (d *denyCache) refuse(a *bucket.Ask, of *subject) (Decision, bool) {
	e, now, ok := d.find(a.Key, of.limit)
	if !ok || a.Cost < e.cost {
		return Decision{}, false
	}
	states := make([]State, 1)
	s := &states[0]
	e.state(s, of, a, now)
	return Decision{RetryAfter: s.RetryAfter, Remaining: s.Remaining, ResetAfter: s.ResetAfter, At: s.Value.AsOf, States: states}, true
}

// refuseAll returns the decision on a call for several buckets if it is known to be a refusal.
func (d *denyCache) refuseAll(p *plan) (Decision, bool) {
	states, refused, at := make([]State, len(p.asks)), false, int64(math.MinInt64)
	for i := range p.asks {
		a, of := &p.asks[i], &p.of[i]
		e, now, ok := d.find(a.Key, of.limit)
		if !ok {
			return Decision{}, false
		}
		e.state(&states[i], of, a, now)
		refused = refused || a.Cost >= e.cost
		at = max(at, now)
	}
	if !refused {
		return Decision{}, false
	}
	return p.decision(states, at), true
}

// keep remembers a refusal that was asked for at askedAt, of the buckets that were not changed since epochs.
func (d *denyCache) keep(c *call, askedAt time.Duration, epochs []uint32) {
	heardAt := d.now()
	for i := range c.Asks {
		a, r := &c.Asks[i], &c.Answers[i]
		o := a.Terms.Outlook(r, a.Cost, 0)
		e := &entry{
			limit: c.plan.of[i].holding(a.Terms), held: held{a.Terms, o.State, r.Rows}, now: r.Now,
			cost: math.Inf(1), askedAt: askedAt, heardAt: heardAt,
		}
		e.full = r.Now + o.FullAfter.Microseconds()
		if !r.Allowed {
			e.cost, e.until = a.Cost, r.Now+o.RetryAfter.Microseconds()
		}
		d.stripe(a.Key).put(a.Key, e, d.most, d.slot(a.Key), epochs[i])
	}
}

// put stores the entry, in place of some other when there is no room, unless the bucket was changed since the epoch.
func (s *denyStripe) put(k bucket.Key, e *entry, most, slot int, epoch uint32) {
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

// invalidate forgets a bucket, because tokens were taken from it or given back to it.
func (d *denyCache) invalidate(k bucket.Key) {
	if d == nil {
		return
	}
	s, slot := d.stripe(k), d.slot(k)
	s.mu.Lock()
	delete(s.of, k)
	s.changed[slot]++
	s.mu.Unlock()
}

// refuseOne returns the decision on a call for one bucket if it is known to be a refusal.
func (d *denyCache) refuseOne(ctx context.Context, l *Limiter, requests []Request) (Decision, bool) {
	if len(requests) != 1 || ctx.Err() != nil || l.batcher.IsClosed() {
		return Decision{}, false
	}
	r := &requests[0]
	if r.pool != nil {
		return Decision{}, false
	}
	key, err := storedKey(l.config.HashKey, r)
	if err != nil {
		return Decision{}, false
	}
	var now int64
	s, of := subjectOf(ctx, l, verbTake, r, key, &now)
	a := bucket.Ask{Key: bucket.Key{Name: of.name, Key: key}, Cost: r.cost}
	var u *upstream
	if !of.plain {
		if u, err = l.prices.price(ctx, &s, r, key, &now); err != nil {
			return Decision{}, false
		}
		a.Terms, a.Cost = of.terms, 0
		s.charge(&a, r.cost)
	}
	if !(r.cost > 0 && a.Cost <= of.terms.Capacity) || s.mode != On || s.isPaused(now) {
		return Decision{}, false
	}
	refused, known := d.refuse(&a, &s)
	if known { // else the plan of the call does this
		l.prices.touch(ctx, u, now, false)
		refused.States[0].Cost = r.cost
	}
	if known && l.reports.refused != nil {
		l.reports.refusal(ctx, &refused.States[0], Refusal{Key: key, Cost: r.cost, At: refused.At, Cached: true})
	}
	return refused, known
}

// decide answers c, from memory if that will do; else with batcher, and remembers what it has to.
func (d *denyCache) decide(ctx context.Context, c *call, batcher *batch.Batcher[store.Call]) error {
	if c.Look || c.Reserve != nil || c.UpTo > 0 || batcher.IsClosed() || !c.plan.isPlain() || bucket.AnyFreesEarly(c.Asks) {
		return batcher.Do(ctx, c.Queueable())
	}
	if len(c.plan.asked) > 1 {
		if known, found := d.refuseAll(&c.plan); found {
			c.cached = &known
			return nil
		}
	}
	var room [1]uint32 // for the epochs, as there mostly is one bucket
	askedAt, epochs := d.now(), d.epochs(c.Asks, room[:0])
	err := batcher.Do(ctx, c.Queueable())
	if err == nil && !bucket.AllAllowed(c.Answers) {
		d.keep(c, askedAt, epochs)
	}
	return err
}
