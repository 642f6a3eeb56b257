// Package refusalcache remembers refusals: what buckets held when the database last refused a call, for as long as that
// is enough to refuse the next call. It knows the keys and terms of buckets, and sends nothing.
package refusalcache

import (
	"hash/maphash"
	"math"
	"sync"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
)

const (
	// maxAge is how long the cache repeats a refusal before a call goes to the database again. It bounds how late tokens
	// returned by other processes become visible.
	maxAge = time.Second
	// stripes is the number of locks of a cache, and slots the number of counts of changes under each.
	stripes, slots = 64, 64
)

// Cache holds refusals only, each from committed rows, and for calls over several limits the rows of their limits that
// did not refuse. A nil Cache remembers nothing.
type Cache struct {
	seed    maphash.Seed
	now     func() time.Duration // since the cache was made: cheaper to ask for than the time
	asOf    func() *int64        // the clock of a test, in place of the database's; nil: none
	most    int                  // entries of a stripe
	stripes [stripes]stripe
}

type stripe struct {
	mu      sync.Mutex
	of      map[bucket.Key]*entry // by keys with a Shard of 0: what one row gives, no other may refuse
	changed [slots]uint32         // how often this process changed the buckets of each slot
}

// entry is the last known state of one bucket.
type entry struct {
	policy  any             // Ask.Policy, to notice that the policy has changed
	held    bucket.Snapshot // at now, by terms with the bucket's windows
	now     int64           // on the database's clock
	cost    float64         // this and every higher cost is refused
	until   int64           // until then, on the database's clock
	full    int64           // when the bucket is full if nothing is taken
	askedAt time.Duration   // before the database answered, and
	heardAt time.Duration   // after
}

// New returns a cache for at most that many buckets, and nil for 0.
func New(entries int, asOf func() *int64) *Cache {
	if entries == 0 {
		return nil
	}
	made := time.Now()
	since := func() time.Duration { return time.Since(made) }
	c := &Cache{seed: maphash.MakeSeed(), now: since, asOf: asOf, most: (entries + stripes - 1) / stripes}
	for i := range c.stripes {
		c.stripes[i].of = make(map[bucket.Key]*entry)
	}
	return c
}

// place returns the stripe of a bucket, and which of its counts is the bucket's.
func (c *Cache) place(k *bucket.Key) (s *stripe, slot int) {
	h := maphash.String(c.seed, k.Key)
	return &c.stripes[h%stripes], int((h/stripes + maphash.String(c.seed, k.Name)) % slots)
}

// Refuse reports whether the cache knows that a call with these asks is refused: all buckets are known, and one of them
// refuses. It appends the known state of each bucket to outcomes.
func (c *Cache) Refuse(asks []bucket.Ask, outcomes []bucket.Outcome) (all []bucket.Outcome, refused bool) {
	if c == nil {
		return outcomes, false
	}
	for i := range asks {
		a := &asks[i]
		e, now := c.find(a)
		if e == nil {
			return outcomes, false
		}
		outcomes = append(outcomes, e.tell(a.Cost, now))
		refused = refused || a.Cost >= e.cost
	}
	return outcomes, refused
}

// find returns the entry of a bucket, and the database's time or a little less: a wait that counts from there is not
// too short.
func (c *Cache) find(a *bucket.Ask) (found *entry, now int64) {
	s := &c.stripes[maphash.String(c.seed, a.Key.Key)%stripes]
	s.mu.Lock()
	found = s.of[a.Key.Whole()]
	if found != nil && found.policy != a.Policy {
		delete(s.of, a.Key.Whole())
		found = nil
	}
	s.mu.Unlock()
	if found == nil {
		return nil, 0
	}
	local := c.now()
	age := local - found.askedAt
	latest, now := found.now+age.Microseconds(), found.now+(local-found.heardAt).Microseconds()
	if c.asOf != nil {
		asOf := *c.asOf()
		latest, now = asOf, asOf
	}
	over := latest >= found.until && found.refuses()
	if age >= maxAge || over {
		return nil, 0
	}
	return found, now
}

func (e *entry) refuses() bool { return !math.IsInf(e.cost, 1) }

// tell returns the answer to an ask that the entry refuses, or that is refused because of another limit.
func (e *entry) tell(cost float64, now int64) bucket.Outcome {
	outcome := bucket.Outcome{
		Snapshot: &e.held, Now: now, Tokens: e.held.Tokens(now),
		FullAfter: time.Duration(max(e.full-now, 0)) * time.Microsecond,
	}
	if cost == e.cost {
		outcome.RetryAfter = time.Duration(e.until-now) * time.Microsecond
	} else {
		outcome.RetryAfter = e.held.Wait(now, cost)
	}
	outcome.Allowed = outcome.RetryAfter == 0
	return outcome
}

// Sent has the entries of a call before it was sent.
type Sent struct {
	at     time.Duration
	epochs []uint32 // how often each bucket was changed: a refusal that was decided before a change is not kept after it
}

// Send notes that a call is sent, in the room if that is enough. Keep needs the answer of Send when the database has
// answered.
func (c *Cache) Send(asks []bucket.Ask, room []uint32) Sent {
	s := Sent{c.now(), room}
	for i := range asks {
		of, slot := c.place(&asks[i].Key)
		of.mu.Lock()
		s.epochs = append(s.epochs, of.changed[slot])
		of.mu.Unlock()
	}
	return s
}

// Keep remembers a refusal, of the buckets that were not changed since the call was sent.
func (c *Cache) Keep(s Sent, asks []bucket.Ask, answers []bucket.Answer) {
	heardAt := c.now()
	for i := range asks {
		a, r := &asks[i], &answers[i]
		e := &entry{policy: a.Policy, now: r.Now, cost: math.Inf(1), askedAt: s.at, heardAt: heardAt}
		outcome := a.Tell(r, 0, &e.held)
		e.full = r.Now + outcome.FullAfter.Microseconds()
		if !r.Allowed {
			e.cost, e.until = a.Cost, r.Now+outcome.RetryAfter.Microseconds()
		}
		c.put(&a.Key, e, s.epochs[i])
	}
}

// put stores the entry, in place of some other when there is no room, unless the bucket was changed since the epoch.
func (c *Cache) put(k *bucket.Key, e *entry, epoch uint32) {
	s, slot := c.place(k)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.changed[slot] != epoch {
		return
	}
	old := s.of[k.Whole()]
	if old != nil && old.refuses() && !e.refuses() { // it refuses nothing, and must not replace what does
		return
	}
	if old == nil && len(s.of) >= c.most {
		for other := range s.of { // any one: a bucket that is used again comes back
			delete(s.of, other)
			break
		}
	}
	s.of[k.Whole()] = e
}

// Forget forgets a bucket, because tokens were taken from it or given back to it.
func (c *Cache) Forget(k *bucket.Key) {
	if c == nil {
		return
	}
	s, slot := c.place(k)
	s.mu.Lock()
	delete(s.of, k.Whole())
	s.changed[slot]++
	s.mu.Unlock()
}
