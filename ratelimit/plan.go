package ratelimit

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"hash/fnv"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"unicode/utf8"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

const (
	maxRequests       = 64      // limits in one call: each is a row lock held to the end of the transaction
	maxKeyBytes       = 256     // what the key column holds
	maxHashedKeyBytes = 1 << 16 // how long a key that is hashed may be
)

// plan is a call's requests as the store needs them: every bucket once, in the order of locking.
type plan struct {
	asks   []bucket.Ask
	limits []Limit // of the asks
	asked  []asked // in the order asked

	costless bool // whether nothing is to be taken

	oneAsk   [1]bucket.Ask // the room for them when there is one, as there mostly is
	oneLimit [1]Limit
	oneAsked [1]asked
}

// asked is a request of the call.
type asked struct {
	bucket int // index into asks
	cost   float64
}

// arrange checks requests and arranges them.
func (p *plan) arrange(config *Config, policies *policies, requests []Request, reserve bool) error {
	if len(requests) == 0 || len(requests) > maxRequests {
		return fmt.Errorf("%w: the call asks for %d limits; it takes from 1 to %d", ErrInvalidRequest, len(requests), maxRequests)
	}
	p.makeRoom(len(requests))
	for i := range requests {
		r := &requests[i]
		key, err := storedKey(config.HashKey, r)
		if err != nil {
			return err
		}
		if rule := config.ruleFor(r, key); rule != nil {
			resolved := *r
			resolved.limit = rule.holding(config.estimate()).limit
			r = &resolved
		}
		if err := checkCost(&r.limit, r.cost, math.Inf(1)); err != nil {
			return err
		}
		policies.note(r.limit.name, &r.limit.terms)
		if p.asked[i], err = p.add(r, key); err != nil {
			return err
		}
	}
	p.costless = true
	for i := range p.asks {
		p.costless = p.costless && p.asks[i].Cost == 0
		if err := limitDebt(&p.asks[i], &p.limits[i], reserve); err != nil {
			return err
		}
	}
	p.sort()
	return nil
}

// makeRoom makes room for n requests.
func (p *plan) makeRoom(n int) {
	if n == 1 {
		p.asks, p.limits, p.asked = p.oneAsk[:0], p.oneLimit[:0], p.oneAsked[:]
		return
	}
	p.asks, p.limits, p.asked = make([]bucket.Ask, 0, n), make([]Limit, 0, n), make([]asked, n)
}

// add adds a request to the plan, or its cost to that for the bucket of the same name and key.
func (p *plan) add(r *Request, key string) (asked, error) {
	k, terms := bucket.Key{Name: r.limit.name, Key: key}, r.limit.termsFor(key)
	for i := range p.asks {
		same := &p.asks[i]
		if same.Key != k {
			continue
		}
		if same.Terms != terms {
			return asked{}, fmt.Errorf("%w: the call asks for one bucket of %q under two policies; give the name one policy", ErrInvalidRequest, k.Name)
		}
		same.Cost += r.cost
		return asked{i, r.cost}, nil
	}
	p.asks, p.limits = append(p.asks, bucket.Ask{Key: k, Terms: terms, Cost: r.cost}), append(p.limits, r.limit)
	return asked{len(p.asks) - 1, r.cost}, nil
}

// limitDebt sets how low the bucket may go, and checks that the cost can ever be met.
func limitDebt(a *bucket.Ask, limit *Limit, reserve bool) error {
	if !reserve {
		return checkCost(limit, a.Cost, a.Terms.Capacity)
	}
	if !a.Terms.Reserves {
		return fmt.Errorf("%w: %q has NoReservations; call Take, or set MaxReserved", ErrNoReservations, limit.name)
	}
	a.Lowest = -a.Terms.MaxDebt
	most := a.Terms.Capacity + a.Terms.MaxDebt
	if a.Cost <= most && a.Terms.Capacity-a.Cost < a.Lowest { // the sum was rounded up
		most = math.Nextafter(a.Cost, 0)
	}
	return checkCost(limit, a.Cost, most)
}

// sort puts the buckets in the order in which every call locks them: that of the primary key.
func (p *plan) sort() {
	if len(p.asks) == 1 {
		return
	}
	order := make([]int, len(p.asks))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(i, j int) int { return p.asks[i].Key.Compare(p.asks[j].Key) })
	asks, limits, place := make([]bucket.Ask, len(order)), make([]Limit, len(order)), make([]int, len(order))
	for to, from := range order {
		asks[to], limits[to], place[from] = p.asks[from], p.limits[from], to
	}
	p.asks, p.limits = asks, limits
	for i := range p.asked {
		p.asked[i].bucket = place[p.asked[i].bucket]
	}
}

// checkCost returns an error unless cost is a number of tokens that limit can tell from nothing and that
// is no more than most.
func checkCost(limit *Limit, cost, most float64) error {
	switch {
	case limit.policy == nil:
		return fmt.Errorf("%w: the request is for the zero Limit; make limits with Define or NewLimit", ErrInvalidLimit)
	case !(cost >= 0) || math.IsInf(cost, 1):
		return fmt.Errorf("%w: %v of %q; a cost is a number from 0 up", ErrInvalidCost, cost, limit.name)
	case cost > 0 && cost < max(limit.terms.Capacity*bucket.MinCostShare, bucket.MinTokens):
		return fmt.Errorf("%w: %v of %q is too small beside its capacity of %v; use a larger unit of cost or a smaller capacity",
			ErrInvalidCost, cost, limit.name, limit.terms.Capacity)
	case cost > most:
		return fmt.Errorf("%w: %v of %q, which can never give more than %v at once; lower the cost or raise the capacity",
			ErrCostExceedsCapacity, cost, limit.name, most)
	}
	return nil
}

// storedKey checks the request's key and returns the form that is stored: "" for the global bucket.
func storedKey(secret []byte, r *Request) (string, error) {
	invalid := func(problem string) (string, error) {
		return "", fmt.Errorf("%w for %q: %s", ErrInvalidKey, r.limit.name, problem)
	}
	hashed := len(secret) > 0
	switch {
	case r.global || r.limit.policy == nil: // the latter is reported by checkCost
		return "", nil
	case r.key == "":
		return invalid("it is empty; name who is being limited, or use Global for the bucket everybody shares")
	case hashed && len(r.key) > maxHashedKeyBytes:
		return invalid(fmt.Sprintf("it has %d bytes; at most %d can be hashed", len(r.key), maxHashedKeyBytes))
	case hashed:
		return hashKey(secret, r.limit.name, r.key), nil
	case len(r.key) > maxKeyBytes:
		return invalid(fmt.Sprintf("it has %d bytes and at most %d fit; shorten it, or set Config.HashKey", len(r.key), maxKeyBytes))
	case !utf8.ValidString(r.key):
		return invalid("it is not valid UTF-8; encode it, or set Config.HashKey")
	case strings.IndexByte(r.key, 0) >= 0:
		return invalid("it holds a NUL byte, which Postgres cannot store; encode it, or set Config.HashKey")
	}
	return r.key, nil
}

// hashKey returns HMAC-SHA-256 of the limit's name and the key, 43 characters of base64url. The name
// is part of it so that one key does not look the same under two limits.
func hashKey(secret []byte, name, key string) string {
	mac := hmac.New(sha256.New, secret)
	mac.Write([]byte(name))
	mac.Write([]byte{0}) // no name holds it, so no two pairs run together
	mac.Write([]byte(key))
	return base64.RawURLEncoding.EncodeToString(mac.Sum(nil))
}

// termsFor returns the terms of the bucket of key: where the policy does not say when a window begins, these do.
func (l Limit) termsFor(key string) bucket.Terms {
	t := l.terms
	if !t.PhaseByKey {
		return t
	}
	h := fnv.New64a()
	h.Write([]byte(l.name))
	h.Write([]byte{0})
	h.Write([]byte(key))
	t.Phase = bucket.PhaseOf(int64(h.Sum64()%uint64(t.Step)), t.Step)
	return t
}

const (
	maxNames    = 10_000 // of limits whose policies a Limiter remembers
	maxPolicies = 16     // of one name
)

// policies remembers which policies a Limiter was used with under each name, so that what names a limit by its
// name alone, as a reservation does, is decided under the policy the limit has now. To note the policy that was
// noted last costs a look into a map and a comparison.
type policies struct {
	names sync.Map // of *usage by name
	count atomic.Int64
}

// usage is how a name was used.
type usage struct {
	last atomic.Pointer[bucket.Terms]              // the latest policy
	seen [maxPolicies]atomic.Pointer[bucket.Terms] // the distinct policies; the oldest one gives way to a new one

	mu   sync.Mutex
	next int // the place of the next policy in seen
}

// note notes that the limit called name was used with these terms.
func (p *policies) note(name string, t *bucket.Terms) {
	if p == nil {
		return
	}
	found, ok := p.names.Load(name)
	if !ok {
		if p.count.Load() >= maxNames {
			return
		}
		var loaded bool
		if found, loaded = p.names.LoadOrStore(name, &usage{}); !loaded {
			p.count.Add(1)
		}
	}
	found.(*usage).note(t)
}

// last returns the terms that the limit called name was last used with, if it was used at all.
func (p *policies) last(name string) (bucket.Terms, bool) {
	if p == nil {
		return bucket.Terms{}, false
	}
	found, ok := p.names.Load(name)
	if !ok {
		return bucket.Terms{}, false
	}
	last := found.(*usage).last.Load()
	if last == nil { // it is being noted
		return bucket.Terms{}, false
	}
	return *last, true
}

// seen returns the distinct terms that the limit called name was used with.
func (p *policies) seen(name string) (seen []bucket.Terms) {
	if p == nil {
		return nil
	}
	found, ok := p.names.Load(name)
	if !ok {
		return nil
	}
	u := found.(*usage)
	for i := range u.seen {
		if t := u.seen[i].Load(); t != nil {
			seen = append(seen, *t)
		}
	}
	return seen
}

func (u *usage) note(t *bucket.Terms) {
	if last := u.last.Load(); last != nil && *last == *t {
		return
	}
	if known := u.find(t); known != nil {
		u.last.Store(known)
		return
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	known := u.find(t) // somebody may have been quicker
	if known == nil {
		added := *t
		known = &added
		u.seen[u.next%maxPolicies].Store(known)
		u.next++
	}
	u.last.Store(known)
}

// find returns the terms in seen that are equal to t, or nil.
func (u *usage) find(t *bucket.Terms) *bucket.Terms {
	for i := range u.seen {
		if known := u.seen[i].Load(); known != nil && *known == *t {
			return known
		}
	}
	return nil
}
