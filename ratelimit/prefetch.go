package ratelimit

import (
	"context"
	"hash/maphash"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

const (
	// maxHoldings bounds the buckets that a Limiter keeps tokens of; calls for others go to the database.
	maxHoldings = 1 << 16
	// holdingStripes is the number of locks of the holdings.
	holdingStripes = 64
)

// prefetched is what a Limiter has taken ahead of buckets whose policies have a Prefetch. Takes outside of transactions are
// answered from it, in prefetch.go; fetch.go takes more, and giveback.go gives back what is not used.
type prefetched struct {
	limiter *Limiter
	seed    maphash.Seed
	now     func() time.Duration                                                                                            // on the clock that holdings end by: since it was made
	giveTo  func(ctx context.Context, k bucket.Key, t bucket.Terms, kept bucket.Ahead, most time.Duration) (float64, error) // as store.Session.Return
	stripes [holdingStripes]holdingStripe
	count   atomic.Int64 // of holdings
	waiting atomic.Int64 // calls that wait for a fetch
	shut    atomic.Bool  // whether nothing is answered from memory any more

	mu       sync.Mutex
	running  int           // fetches, and sweeps, that are under way
	timer    *time.Timer   // until the next sweep; nil: there is none to come
	shortest int64         // the Prefetch that it goes by
	orphans  []leftover    // of holdings that are no more, to be given back
	slots    chan struct{} // one for each row that sweeps give back to at once
	idle     chan struct{} // nil until Close; closed when nothing is under way any more
}

type holdingStripe struct {
	mu     sync.Mutex
	of     map[bucket.Key]*holding
	events []Prefetched // to tell the observer once mu is unlocked
	_      [24]byte     // a cache line each
}

// holding is what a process knows and keeps of one bucket. The lock of its stripe guards it.
type holding struct {
	key    bucket.Key
	limit  Limit         // to notice that the policy has changed
	terms  *bucket.Terms // of the bucket; what it points to does not change
	kept   bucket.Ahead
	sent   time.Duration // when kept was asked for, and
	ends   time.Duration // when what is left of it may not be used any more
	usedAt time.Duration // when something was taken last, from memory or from the row
	row    bucket.State  // as the database last answered, and
	rowNow int64         // when, on its clock, and
	heard  time.Duration // on ours
	known  bool          // whether it ever answered

	pace    bucket.Pace
	askedAt time.Duration // when the row was last asked
	asked   bool          // whether it ever was

	cost     float64 // of the last call that found too little
	fetching bool
	waiters  []*waiter // calls that wait for the fetch, in the order in which they came
	leave    context.CancelFunc
}

func newPrefetched(l *Limiter) *prefetched {
	p := &prefetched{limiter: l, seed: maphash.MakeSeed(), giveTo: l.session.Return, slots: make(chan struct{}, givingBack)}
	made := time.Now()
	p.now = func() time.Duration { return time.Since(made) }
	if l.config.AsOf != nil { // a test has time pass
		p.now = func() time.Duration { return l.config.AsOf().Sub(made) }
	}
	return p
}

func (p *prefetched) stripe(k *bucket.Key) *holdingStripe {
	return &p.stripes[(maphash.String(p.seed, k.Key)^uint64(len(k.Name)))%holdingStripes]
}

// unlock unlocks the stripe, and then reports the events of the time under the lock, because an observer may be slow or panic.
func (p *prefetched) unlock(s *holdingStripe) {
	events := s.events
	s.events = nil
	s.mu.Unlock()
	for _, event := range events {
		p.tell(event)
	}
}

// has reports whether the kept tokens are enough for cost.
func (h *holding) has(cost float64, now time.Duration) bool {
	return h.kept.Left >= cost && now < h.ends
}

// isFor reports whether the holding is for calls of a limit.
func (h *holding) isFor(limit Limit) bool { return h.limit.isAs(limit) }

// takeOne answers a Take of one request from memory, if it can.
func (p *prefetched) takeOne(ctx context.Context, requests []Request) (d Decision, ok bool) {
	l := p.limiter
	if len(requests) != 1 || ctx.Err() != nil || p.shut.Load() {
		return d, false
	}
	r := &requests[0]
	if r.pool != nil || r.limit.terms().Prefetch == 0 { // the call is resolved once then, and a rule's Prefetch served on its way
		return d, false
	}
	key, err := storedKey(l.config.HashKey, r)
	if err != nil {
		return d, false
	}
	var about int64
	s, defined := subjectOf(ctx, l, verbTake, r, key, &about)
	if defined.terms.Prefetch == 0 || s.mode != On || s.isPaused(about) || !(r.cost > 0) || checkCost(&defined, r.cost, math.Inf(1)) != nil {
		return d, false
	}
	k := bucket.Key{Name: defined.name, Key: key}
	v, ok := p.take(&k, s.limit, r.cost)
	if !ok {
		return d, false
	}
	one := &single{}
	d.States = one.states[:]
	v.state(&one.states[0], &one.held, &s, r.cost)
	first := &d.States[0]
	d.Allowed, d.Remaining, d.ResetAfter, d.At = true, first.Remaining, first.ResetAfter, first.Value.AsOf
	return d, true
}

// view is what a process knows of a bucket at some moment.
type view struct {
	terms *bucket.Terms
	row   bucket.State
	at    int64        // what time it is for the database, or a little less
	kept  bucket.Ahead // with what is left of it
}

// view returns what is known of the bucket at now.
func (p *prefetched) view(h *holding, now time.Duration) view {
	v := view{terms: h.terms, row: h.row, kept: h.kept, at: max(h.rowNow+max(now-h.heard, 0).Microseconds(), h.kept.TS)}
	if asOf := p.limiter.config.asOf(); asOf != nil {
		v.at = *asOf
	}
	return v
}

// state sets s to the answer to a request that was answered from memory. What the row holds by now is an estimate: others
// may have taken from it.
func (v *view) state(s *State, h *held, of *subject, cost float64) {
	t := v.terms
	tokens := min(t.Capacity, t.Tokens(v.row, v.at)+max(v.kept.Left, 0))
	of.tell(s, t)
	s.Limit, s.Cost, s.Charged, s.Allowed, s.Prefetched = of.holding(*t), cost, 1, true, true
	s.Remaining = max(tokens, 0)
	*h = held{*t, bucket.State{Value: tokens, TS: max(v.at, v.row.TS)}, nil}
	s.ResetAfter = t.FullAfter(h.state, v.at)
	s.Value = Value{Limit: s.Limit, Tokens: tokens, AsOf: time.UnixMicro(v.at), held: h}
}

// answer has the call be answered from memory, with what is known of each of its buckets.
func (c *call) answer(views []view) {
	states, holds, at := make([]State, len(views)), make([]held, len(views)), int64(math.MinInt64)
	for i := range views {
		views[i].state(&states[i], &holds[i], &c.plan.of[i], c.Asks[i].Cost)
		at = max(at, views[i].at)
	}
	d := c.plan.decision(states, at)
	c.cached, c.prefetched = &d, true
}

// take takes cost of what is kept of a bucket, unless there is too little, or others wait for it.
func (p *prefetched) take(k *bucket.Key, limit Limit, cost float64) (v view, ok bool) {
	now := p.now()
	s := p.stripe(k)
	s.mu.Lock()
	defer s.mu.Unlock()
	h := s.of[*k]
	if h == nil || h.fetching || !h.has(cost, now) || !h.isFor(limit) {
		return v, false
	}
	h.spend(cost, now)
	return p.view(h, now), true
}

// spend takes cost of what is kept.
func (h *holding) spend(cost float64, now time.Duration) {
	h.kept.Left -= cost
	h.usedAt = now
}

// putBack undoes a take, unless what it took of is not kept any more.
func (p *prefetched) putBack(k *bucket.Key, taken *view, cost float64) {
	s := p.stripe(k)
	s.mu.Lock()
	defer s.mu.Unlock()
	if h := s.of[*k]; h != nil && h.kept.TS == taken.kept.TS && h.kept.Taken == taken.kept.Taken {
		h.kept.Left += cost
	}
}

// mayServe reports whether the call may be answered from memory: a Take outside of transactions, of buckets that tokens are
// taken ahead of, each as its limit says.
func (p *prefetched) mayServe(c *call) bool {
	if c.Look || p.limiter.isConnection || p.shut.Load() || !c.plan.isPlain() {
		return false
	}
	for i := range c.Asks {
		a := &c.Asks[i]
		if a.Terms.Prefetch == 0 || a.Terms.Era != c.plan.of[i].limit.terms().Era || a.Cost == 0 {
			return false
		}
	}
	return true
}

// decide answers the call from memory, or else from the database.
func (p *prefetched) decide(ctx context.Context, c *call) error {
	if len(c.Asks) == 1 {
		return p.decideOne(ctx, c)
	}
	if p.takeAll(c) {
		return nil
	}
	for i := range c.Asks {
		p.noteMiss(c, i)
	}
	err := c.inBatch(ctx, p.limiter)
	for i := range c.Asks {
		p.noteAnswer(c, i, err)
		if err == nil && c.cached == nil && c.Answers[i].Allowed {
			p.fetchFor(ctx, c, i)
		}
	}
	return err
}

// takeAll answers a call for several buckets from memory if all of them have enough.
func (p *prefetched) takeAll(c *call) bool {
	var room [4]view
	views := room[:0]
	for i := range c.Asks {
		v, ok := p.take(&c.Asks[i].Key, c.plan.of[i].limit, c.Asks[i].Cost)
		if !ok {
			for j := range views {
				p.putBack(&c.Asks[j].Key, &views[j], c.Asks[j].Cost)
			}
			return false
		}
		views = append(views, v)
	}
	c.answer(views)
	return true
}

// decideOne answers a call for one bucket from memory. Where too little is kept it waits for the fetch that is under way, or
// begins one; or it goes to the database by itself, where nothing is to be taken ahead.
func (p *prefetched) decideOne(ctx context.Context, c *call) error {
	a, limit := &c.Asks[0], c.plan.of[0].limit
	now, s := p.now(), p.stripe(&a.Key)
	s.mu.Lock()
	h := p.holding(s, a, limit)
	switch {
	case h == nil || !h.isFor(limit):
		p.unlock(s)
		return c.inBatch(ctx, p.limiter)
	case !h.fetching && h.has(a.Cost, now):
		h.spend(a.Cost, now)
		v := p.view(h, now)
		p.unlock(s)
		c.answer([]view{v})
		return nil
	case !h.fetching && h.ahead(now, a.Cost, a.Cost) == 0 || !p.enter(h):
		p.unlock(s)
		err := c.inBatch(ctx, p.limiter)
		p.noteAnswer(c, 0, err)
		return err
	}
	w := &waiter{call: c, cost: a.Cost, done: make(chan struct{})}
	h.waiters = append(h.waiters, w)
	if !h.fetching {
		p.beginFetch(ctx, s, h)
	}
	p.unlock(s)
	return p.await(ctx, s, h, w)
}

// holding returns the holding of a bucket, and nil when there are too many. That of another policy is given up, unless it is
// in use. The stripe is locked.
func (p *prefetched) holding(s *holdingStripe, a *bucket.Ask, limit Limit) *holding {
	h := s.of[a.Key]
	switch {
	case h == nil:
		if p.count.Load() >= maxHoldings {
			return nil
		}
		if s.of == nil {
			s.of = make(map[bucket.Key]*holding)
		}
		p.count.Add(1)
	case h.fetching || h.isFor(limit):
		return h
	default:
		if terms, ok := h.terms.Under(a.Terms); ok {
			p.orphanOf(h.key, terms, h.kept)
		} else {
			s.events = append(s.events, Prefetched{Limit: h.key.Name, Lost: max(h.kept.Left, 0)})
		}
	}
	terms := a.Terms
	h = &holding{key: a.Key, limit: limit, terms: &terms}
	s.of[a.Key] = h
	p.arm(a.Terms.Prefetch)
	return h
}

// ahead returns how much is to be taken ahead beside what is asked now, when a call for cost found too little.
func (h *holding) ahead(now time.Duration, asked, cost float64) float64 {
	if h.asked {
		h.pace.Next(h.terms, (now - h.askedAt).Microseconds(), cost)
	}
	h.asked, h.askedAt, h.usedAt, h.cost = true, now, now, cost
	if !h.known {
		return 0
	}
	return h.pace.Ahead(h.row.Value, asked, cost)
}

// noteMiss notes that a call goes to the row of its i-th bucket.
func (p *prefetched) noteMiss(c *call, i int) {
	a := &c.Asks[i]
	now, s := p.now(), p.stripe(&a.Key)
	s.mu.Lock()
	defer p.unlock(s)
	limit := c.plan.of[i].limit
	if h := p.holding(s, a, limit); h != nil && h.isFor(limit) && !h.fetching {
		h.ahead(now, a.Cost, a.Cost)
	}
}

// noteAnswer notes what a call found in the row of its i-th bucket, unless it failed, and its batch may go on, or was refused
// from memory.
func (p *prefetched) noteAnswer(c *call, i int, err error) {
	if err != nil || c.cached != nil {
		return
	}
	a, s := &c.Asks[i], p.stripe(&c.Asks[i].Key)
	s.mu.Lock()
	defer s.mu.Unlock()
	if h := s.of[a.Key]; h != nil && h.isFor(c.plan.of[i].limit) && a.Terms.Era == h.terms.Era {
		h.note(&c.Answers[i], p.now())
	}
}

// note notes what the database has answered.
func (h *holding) note(r *bucket.Answer, now time.Duration) {
	h.row, h.rowNow, h.heard, h.known = r.State, r.Now, now, true
}
