package ratelimit

import (
	"context"
	"hash/maphash"
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
	policy any           // Ask.Policy, to notice that it has changed
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

// tell returns the answer to a request that was answered from memory, and sets h to what the bucket holds. That is an estimate: others
// may have taken from the row.
func (v *view) tell(h *bucket.Content) bucket.Told {
	t := v.terms
	tokens := min(t.Capacity, t.Tokens(v.row, v.at)+max(v.kept.Left, 0))
	h.Terms, h.State.Value, h.State.TS = *t, tokens, max(v.at, v.row.TS)
	return bucket.Told{Content: h, Now: v.at, Allowed: true, Tokens: tokens, FullAfter: t.FullAfter(h.State, v.at)}
}

// take takes what the asks cost of what is kept of their buckets, unless one of them keeps too little, or others wait for it. It appends
// what is known of each bucket to views.
func (p *prefetched) take(asks []bucket.Ask, views []view) (taken []view, ok bool) {
	if p.count.Load() == 0 || !p.serves(asks) {
		return views, false
	}
	for i := range asks {
		v, ok := p.takeOne(&asks[i])
		if !ok {
			for j := range views {
				p.putBack(&asks[j].Key, &views[j], asks[j].Cost)
			}
			return views, false
		}
		views = append(views, v)
	}
	return views, true
}

func (p *prefetched) takeOne(a *bucket.Ask) (v view, ok bool) {
	now := p.now()
	s := p.stripe(&a.Key)
	s.mu.Lock()
	defer s.mu.Unlock()
	h := s.of[a.Key]
	if h == nil || h.fetching || !h.has(a.Cost, now) || h.policy != a.Policy {
		return v, false
	}
	h.spend(a.Cost, now)
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

// serves reports whether tokens are taken ahead of all the buckets.
func (p *prefetched) serves(asks []bucket.Ask) bool {
	for i := range asks {
		if asks[i].Terms.Prefetch == 0 || asks[i].Cost == 0 {
			return false
		}
	}
	return !p.limiter.isConnection && !p.shut.Load()
}

// given has the call be answered with tokens that were taken ahead of its bucket.
func (c *call) given(v view) {
	c.from = fromPrefetched
	c.states, c.at = statesOf([]view{v}, c.Asks, c.plan.of)
}

// decide answers the call from memory, or else from the database.
func (p *prefetched) decide(ctx context.Context, c *call) error {
	if len(c.Asks) == 1 {
		return p.decideOne(ctx, c)
	}
	for i := range c.Asks {
		p.noteMiss(c, i)
	}
	err := c.send(ctx, p.limiter)
	for i := range c.Asks {
		p.noteAnswer(c, i, err)
		if err == nil && c.Answers[i].Allowed {
			p.fetchFor(ctx, c, i)
		}
	}
	return err
}

// decideOne answers a call for one bucket from memory. Where too little is kept it waits for the fetch that is under way, or
// begins one; or it goes to the database by itself, where nothing is to be taken ahead.
func (p *prefetched) decideOne(ctx context.Context, c *call) error {
	a := &c.Asks[0]
	now, s := p.now(), p.stripe(&a.Key)
	s.mu.Lock()
	h := p.holding(s, a)
	switch {
	case h == nil || h.policy != a.Policy:
		p.unlock(s)
		return c.send(ctx, p.limiter)
	case !h.fetching && h.has(a.Cost, now):
		h.spend(a.Cost, now)
		v := p.view(h, now)
		p.unlock(s)
		c.given(v)
		return nil
	case !h.fetching && h.ahead(now, a.Cost, a.Cost) == 0 || !p.enter(h):
		p.unlock(s)
		err := c.send(ctx, p.limiter)
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
func (p *prefetched) holding(s *holdingStripe, a *bucket.Ask) *holding {
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
	case h.fetching || h.policy == a.Policy:
		return h
	default:
		if terms, ok := h.terms.Under(a.Terms); ok {
			p.orphanOf(h.key, terms, h.kept)
		} else {
			s.events = append(s.events, Prefetched{Limit: h.key.Name, Lost: max(h.kept.Left, 0)})
		}
	}
	terms := a.Terms
	h = &holding{key: a.Key, policy: a.Policy, terms: &terms}
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
	if h := p.holding(s, a); h != nil && h.policy == a.Policy && !h.fetching {
		h.ahead(now, a.Cost, a.Cost)
	}
}

// noteAnswer notes what a call found in the row of its i-th bucket, unless it failed, and its batch may go on.
func (p *prefetched) noteAnswer(c *call, i int, err error) {
	if err != nil {
		return
	}
	a, s := &c.Asks[i], p.stripe(&c.Asks[i].Key)
	s.mu.Lock()
	defer s.mu.Unlock()
	if h := s.of[a.Key]; h != nil && h.policy == a.Policy && a.Terms.Era == h.terms.Era {
		h.note(&c.Answers[i], p.now())
	}
}

// note notes what the database has answered.
func (h *holding) note(r *bucket.Answer, now time.Duration) {
	h.row, h.rowNow, h.heard, h.known = r.State, r.Now, now, true
}
