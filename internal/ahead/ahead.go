// Package ahead prefetches tokens from buckets whose policies have a Prefetch, and answers Takes outside of transactions with them.
// fetch.go takes more, and giveback.go returns unused tokens.
package ahead

import (
	"context"
	"hash/maphash"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/store"
)

const (
	// maxHoldings bounds the buckets that a Keeper keeps tokens of; calls for others go to the database.
	maxHoldings = 1 << 16
	// stripes is the number of locks of the holdings.
	stripes = 64
)

// Owner is who a Keeper works for.
type Owner interface {
	// Fetch decides on a call that takes tokens ahead.
	Fetch(ctx context.Context, c *store.Call) error
	// GiveBack returns kept tokens to their row, as store.Session.Return, and how many that were. An error was reported, unless the
	// row was locked for longer than most.
	GiveBack(ctx context.Context, k bucket.Key, t bucket.Terms, kept bucket.Ahead, most time.Duration) (float64, error)
	// Tell reports how many tokens were taken, returned and lost.
	Tell(e Event)
}

// Event is what became of tokens of a limit.
type Event struct {
	Limit                 string
	Taken, Returned, Lost float64
}

// Options are what a Keeper is made with.
type Options struct {
	MaxWaiting int           // calls that may wait for fetches
	Timeout    time.Duration // that a call may wait; none when it is not above 0
	AsOf       func() *int64 // the clock of a test, in place of the database's; nil: none
}

// Keeper keeps tokens. A nil Keeper keeps none.
type Keeper struct {
	owner   Owner
	options Options
	seed    maphash.Seed
	now     func() time.Duration // on the clock that holdings end by: since it was made
	stripes [stripes]stripe
	count   atomic.Int64 // of holdings
	waiting atomic.Int64 // calls that wait for a fetch
	shut    atomic.Bool  // whether nothing is answered from memory any more

	mu       sync.Mutex
	running  int           // fetches and sweeps in progress
	timer    *time.Timer   // until the next sweep; nil: there is none to come
	shortest int64         // its Prefetch
	orphans  []leftover    // of holdings that are no more, to be given back
	slots    chan struct{} // one for each row that sweeps give back to at once
	idle     chan struct{} // nil until Close; closed when all fetches and sweeps have ended
}

type stripe struct {
	mu     sync.Mutex
	of     map[bucket.Key]*holding
	events []Event  // to notify the owner once mu is unlocked
	_      [24]byte // a cache line each
}

// holding is what a process knows and keeps of one bucket. The lock of its stripe guards it.
type holding struct {
	key    bucket.Key
	policy any           // Ask.Policy, to notice that it has changed
	terms  *bucket.Terms // of the bucket; they do not change
	kept   bucket.Ahead
	sent   time.Duration // when the request for kept was sent, and
	ends   time.Duration // when the rest of it may not be used any more
	usedAt time.Duration // when something was taken last, from memory or from the row
	row    bucket.State  // as the database last answered, and
	rowNow int64         // when, on its clock, and
	heard  time.Duration // on ours
	known  bool          // whether it ever answered

	pace    pace
	askedAt time.Duration // when the row was last asked
	asked   bool          // whether it ever was

	cost     float64 // of the last call that found too little
	fetching bool
	waiters  []*waiter // calls that wait for the fetch, in the order in which they came
	leave    context.CancelFunc
}

// New returns a Keeper that keeps nothing yet.
func New(owner Owner, options Options) *Keeper {
	k := &Keeper{owner: owner, options: options, seed: maphash.MakeSeed(), slots: make(chan struct{}, givingBack)}
	made := time.Now()
	k.now = func() time.Duration { return time.Since(made) }
	if options.AsOf != nil { // a test has time pass
		k.now = func() time.Duration { return time.Duration(*options.AsOf()-made.UnixMicro()) * time.Microsecond }
	}
	return k
}

// IsEmpty reports whether the Keeper keeps tokens of no bucket.
func (k *Keeper) IsEmpty() bool { return k == nil || k.count.Load() == 0 }

// Serves reports whether a call with these asks may be answered with prefetched tokens of all the buckets.
func (k *Keeper) Serves(asks []bucket.Ask) bool {
	for i := range asks {
		if asks[i].Terms.Prefetch == 0 || asks[i].Cost == 0 {
			return false
		}
	}
	return k != nil && !k.shut.Load()
}

func (k *Keeper) stripe(of *bucket.Key) *stripe {
	return &k.stripes[(maphash.String(k.seed, of.Key)^uint64(len(of.Name)))%stripes]
}

// unlock unlocks the stripe, and then reports the events of the time under the lock, because an observer may be slow or panic.
func (k *Keeper) unlock(s *stripe) {
	events := s.events
	s.events = nil
	s.mu.Unlock()
	for _, event := range events {
		k.tell(event)
	}
}

// tell notifies the owner of tokens.
func (k *Keeper) tell(e Event) {
	if e != (Event{Limit: e.Limit}) {
		k.owner.Tell(e)
	}
}

// has reports whether the kept tokens are enough for cost.
func (h *holding) has(cost float64, now time.Duration) bool {
	return h.kept.Left >= cost && now < h.ends
}

// View is what a process knows of a bucket at some moment.
type View struct {
	terms *bucket.Terms
	row   bucket.State
	at    int64        // what time it is for the database, or a little less
	kept  bucket.Ahead // with the tokens that are left
}

// view returns the known state of the bucket at now.
func (k *Keeper) view(h *holding, now time.Duration) View {
	v := View{terms: h.terms, row: h.row, kept: h.kept, at: max(h.rowNow+max(now-h.heard, 0).Microseconds(), h.kept.TS)}
	if k.options.AsOf != nil {
		v.at = *k.options.AsOf()
	}
	return v
}

// Tell returns the answer to a call that got kept tokens, and sets c to what the bucket holds. That is an estimate: others may have
// taken from the row.
func (v *View) Tell(c *bucket.Content) bucket.Told {
	t := v.terms
	tokens := min(t.Capacity, t.Kind.Tokens(*t, v.row, v.at)+max(v.kept.Left, 0))
	c.Terms, c.State.Value, c.State.TS = *t, tokens, max(v.at, v.row.TS)
	return bucket.Told{Content: c, Now: v.at, Allowed: true, Tokens: tokens, FullAfter: bucket.FullAfter(t, c.State, v.at)}
}

// Take takes the cost of the asks from kept tokens, unless one of the buckets keeps too few, or others wait for them. It does not
// wait, and appends the view of each bucket to views, which is empty.
func (k *Keeper) Take(asks []bucket.Ask, views []View) (all []View, taken bool) {
	if k.IsEmpty() || !k.Serves(asks) {
		return views, false
	}
	for i := range asks {
		views = append(views, View{})
		if !k.takeOne(&asks[i], &views[i]) {
			for j := range views[:i] {
				k.putBack(&asks[j], &views[j])
			}
			return views, false
		}
	}
	return views, true
}

func (k *Keeper) takeOne(a *bucket.Ask, v *View) (taken bool) {
	now, s := k.now(), k.stripe(&a.Key)
	s.mu.Lock()
	defer s.mu.Unlock()
	h := s.of[a.Key]
	if h == nil || h.fetching || !h.has(a.Cost, now) || h.policy != a.Policy {
		return false
	}
	h.spend(a.Cost, now)
	*v = k.view(h, now)
	return true
}

// spend takes cost of the kept tokens.
func (h *holding) spend(cost float64, now time.Duration) {
	h.kept.Left -= cost
	h.usedAt = now
}

// putBack undoes a take, unless the tokens that it took of are not kept any more.
func (k *Keeper) putBack(a *bucket.Ask, taken *View) {
	s := k.stripe(&a.Key)
	s.mu.Lock()
	defer s.mu.Unlock()
	if h := s.of[a.Key]; h != nil && h.kept.TS == taken.kept.TS && h.kept.Taken == taken.kept.Taken {
		h.kept.Left += a.Cost
	}
}

// Do answers a call that Serves accepts and Take did not answer. A call for one bucket waits for a fetch, and gets tokens of it. If
// there is nothing to prefetch, send lets the database answer the call, and returns the answers.
func (k *Keeper) Do(ctx context.Context, asks []bucket.Ask, send func() ([]bucket.Answer, error)) (v View, given bool, err error) {
	if len(asks) == 1 {
		return k.doOne(ctx, &asks[0], send)
	}
	for i := range asks {
		now, s := k.now(), k.stripe(&asks[i].Key)
		s.mu.Lock()
		if h := k.holding(s, &asks[i]); h != nil && !h.fetching {
			h.ahead(now, asks[i].Cost, asks[i].Cost)
		}
		k.unlock(s)
	}
	answers, err := send()
	for i := range answers { // none after an error
		k.noteAnswer(ctx, &asks[i], &answers[i], answers[i].Allowed)
	}
	return v, false, err
}

func (k *Keeper) doOne(ctx context.Context, a *bucket.Ask, send func() ([]bucket.Answer, error)) (v View, given bool, err error) {
	now, s := k.now(), k.stripe(&a.Key)
	s.mu.Lock()
	h := k.holding(s, a)
	switch {
	case h == nil:
	case !h.fetching && h.has(a.Cost, now):
		h.spend(a.Cost, now)
		v = k.view(h, now)
		k.unlock(s)
		return v, true, nil
	case (h.fetching || h.ahead(now, a.Cost, a.Cost) > 0) && k.enter(h):
		w := &waiter{cost: a.Cost, done: make(chan struct{})}
		h.waiters = append(h.waiters, w)
		if !h.fetching {
			k.beginFetch(ctx, s, h)
		}
		k.unlock(s)
		if err := k.await(ctx, s, h, w); err != errApart { //nolint:errorlint // it is ours
			return w.got, err == nil, err
		}
		s.mu.Lock()
	}
	k.unlock(s)
	answers, err := send()
	if err == nil {
		k.noteAnswer(ctx, a, &answers[0], false)
	}
	return v, false, err
}

// holding returns the holding of a bucket, and nil when there are too many, or another policy's is in use. If that is not in use, its
// tokens are given up. The stripe is locked.
func (k *Keeper) holding(s *stripe, a *bucket.Ask) *holding {
	h := s.of[a.Key]
	switch {
	case h == nil:
		if k.count.Load() >= maxHoldings {
			return nil
		}
		if s.of == nil {
			s.of = make(map[bucket.Key]*holding)
		}
		k.count.Add(1)
	case h.policy == a.Policy:
		return h
	case h.fetching:
		return nil
	default:
		if terms, ok := bucket.Under(*h.terms, a.Terms); ok {
			k.orphan(h.key, terms, h.kept)
		} else {
			s.events = append(s.events, Event{Limit: h.key.Name, Lost: max(h.kept.Left, 0)})
		}
	}
	terms := a.Terms
	h = &holding{key: a.Key, policy: a.Policy, terms: &terms}
	s.of[a.Key] = h
	k.arm(a.Terms.Prefetch)
	return h
}

// ahead returns how many tokens to prefetch in addition to the tokens asked, after a call for cost found too few.
func (h *holding) ahead(now time.Duration, asked, cost float64) float64 {
	if h.asked {
		h.pace.next(h.terms, (now - h.askedAt).Microseconds(), cost)
	}
	h.asked, h.askedAt, h.usedAt, h.cost = true, now, now, cost
	if !h.known {
		return 0
	}
	return h.pace.ahead(h.row.Value, asked, cost)
}

// noteAnswer notes the state of the row of a bucket that a call found. With fetches it begins a fetch in the background, if more calls
// are expected.
func (k *Keeper) noteAnswer(ctx context.Context, a *bucket.Ask, r *bucket.Answer, fetches bool) {
	s := k.stripe(&a.Key)
	s.mu.Lock()
	defer s.mu.Unlock()
	h := s.of[a.Key]
	if h == nil || h.policy != a.Policy || a.Terms.Era != h.terms.Era {
		return
	}
	h.note(r, k.now())
	if fetches && !h.fetching && !h.has(a.Cost, k.now()) && h.pace.ahead(h.row.Value, 0, h.cost) > 0 && k.start() {
		k.beginFetch(ctx, s, h)
	}
}

// note notes what the database has answered.
func (h *holding) note(r *bucket.Answer, now time.Duration) {
	h.row, h.rowNow, h.heard, h.known = r.State, r.Now, now, true
}
