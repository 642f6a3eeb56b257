package ratelimit

import (
	"cmp"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"hash/fnv"
	"math"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
	"github.com/pgratelimit/pgratelimit/internal/engine/slots"
)

const (
	maxRequests       = slots.MaxShares // limits in one call: each locks a row until the end of the transaction
	maxKeyBytes       = 256             // the length of the key column
	maxPlanBytes      = maxKeyBytes     // isText checks keys and plans
	maxHashedKeyBytes = 1 << 16         // the maximum length of a hashed key
)

// plan holds the requests of a call in the form that the store needs: each bucket once, in the order of locking.
type plan struct {
	asks  []bucket.Ask
	of    []subject // of[i] belongs to asks[i]
	asked []asked   // in the order of the requests

	reserves  bool
	ruled     bool  // whether a request is under a rule or a pause
	sharded   bool  // whether a bucket has several rows
	keyed     bool  // whether a key is not in its stored form, so that the secret matters
	costless  bool  // whether all costs are 0
	now       int64 // an estimate of the database's clock, if a rule needed it; otherwise 0
	notBefore int64 // the latest end of the pauses; 0: none

	oneAsk   [1]bucket.Ask // memory for a single request, the usual case
	oneOf    [1]subject
	oneAsked [1]asked
}

type asked struct {
	ask   int    // index into asks; -1 if the answer is known
	known *State // the answer, if the limit is off, paused, or in shadow and can never give the cost
	cost  float64
	key   string // in its stored form
}

// arrange checks requests and adds them to the plan for a verb.
func (p *plan) arrange(ctx context.Context, l *Limiter, verb string, requests []Request) error {
	if len(requests) == 0 || len(requests) > maxRequests {
		return fmt.Errorf("%w: the call asks for %d limits; it takes from 1 to %d", ErrInvalidRequest, len(requests),
			maxRequests)
	}
	p.reserves = verb == verbReserve
	p.makeRoom(len(requests))
	paused := false
	for i := range requests {
		r := &requests[i]
		s, err := p.ask(ctx, l, verb, r)
		if err != nil {
			return err
		}
		paused = paused || s.pausedUntil > p.now
	}
	if !p.ruled {
		return p.finish(l)
	}
	if decides := verb == verbTake || verb == verbCheck || verb == verbAcquire; decides || p.reserves {
		if paused {
			p.pause(decides)
		}
		p.leaveOut()
	}
	if err := p.finish(l); err != nil {
		return err
	}
	if len(p.asks) == 0 && p.now == 0 { // no bucket returns the database's clock
		p.now = l.config.estimate()
	}
	return nil
}

// ask adds a request of the call to the plan and returns its subject.
func (p *plan) ask(ctx context.Context, l *Limiter, verb string, r *Request) (s subject, err error) {
	key, err := storedKey(l.config.HashKey, r)
	if err != nil {
		return s, err
	}
	s, d := subjectOf(ctx, l, verb, r, key, &p.now)
	if err := checkCost(&d, r.cost, math.Inf(1)); err != nil {
		return s, err
	}
	if verb == verbAcquire {
		if err := checkSlotsKept(ctx, r, &s); err != nil {
			return s, err
		}
	}
	if !d.plain {
		if err := checkVerb(s.limit, verb, r.cost); err != nil {
			return s, err
		}
	}
	s.plain = d.plain
	added, err := p.add(r, s, &d, key)
	if err != nil {
		return s, err
	}
	p.asked = append(p.asked, added)
	if a := &p.asks[added.ask]; p.reserves && r.within > 0 && s.mode != Shadow {
		a.MaxWait = min(cmp.Or(a.MaxWait, r.within), r.within)
	}
	p.ruled, p.keyed = p.ruled || s.rule != nil || s.pausedUntil > bucket.MinInstant, p.keyed || !r.stored
	return s, nil
}

// finish checks the cost of each bucket and sorts the buckets. It sets the calendar windows to the current ones.
func (p *plan) finish(l *Limiter) error {
	p.costless = true
	for i := range p.asks {
		a, s := &p.asks[i], &p.of[i]
		if !s.plain && a.Terms.HasSpan() {
			a.Terms = a.Terms.On(l.config.estimate())
		}
		if s.released {
			continue
		}
		if err := limitOwed(a, s.limit, p.reserves); err != nil {
			if s.mode != Shadow {
				return err
			}
			answer := State{Limit: s.limit, RetryAfter: longestWait, NotAsked: true}
			s.tell(&answer, nil)
			p.release(i, answer)
			continue
		}
		p.costless = p.costless && a.Cost == 0
	}
	if p.ruled {
		p.drop()
	}
	if p.sharded {
		p.split()
	}
	p.sort()
	return nil
}

// firstLimit returns the name of the limit of the first request. The asks are in another order: the order of locking.
func (p *plan) firstLimit() string {
	if known := p.asked[0].known; known != nil {
		return known.Limit.Name()
	}
	return p.asks[p.asked[0].ask].Key.Name
}

func (p *plan) plans() (plans []string) {
	for i := range p.of {
		plans = append(plans, slices.Repeat([]string{p.of[i].plan}, p.of[i].shards)...)
	}
	return plans
}

// isPlain reports whether each request asks one bucket, of an enforced limit, for at most its tokens.
func (p *plan) isPlain() bool {
	for i := range p.of {
		if p.of[i].mode != On || p.asks[i].MinBalance != 0 || p.of[i].together {
			return false
		}
	}
	return !slices.ContainsFunc(p.asked, func(a asked) bool { return a.known != nil })
}

// makeRoom allocates memory for n requests, unless the plan has it.
func (p *plan) makeRoom(n int) {
	if n == 1 {
		p.asks, p.of, p.asked = p.oneAsk[:0], p.oneOf[:0], p.oneAsked[:0]
		return
	}
	p.asks, p.of, p.asked = make([]bucket.Ask, 0, n), make([]subject, 0, n), make([]asked, 0, n)
}

// add adds an ask for the request to the plan. If the bucket has an ask already, it adds the cost to that.
func (p *plan) add(r *Request, s subject, d *definition, key string) (asked, error) {
	k, terms := bucket.Key{Name: d.name, Key: key}, d.terms
	if d.seeded {
		terms = termsFor(d.terms, d.name, key)
	}
	if d.shards > 1 {
		terms, p.sharded = timesTokens(terms, float64(d.shards)), true // until split
	}
	for i := range p.asks {
		same := &p.asks[i]
		if same.Key != k {
			continue
		}
		switch {
		case same.Terms == terms, p.of[i].isRuledAs(&s):
		case p.of[i].plan != s.plan:
			return asked{}, fmt.Errorf("%w: the call asks for one bucket of %q on the plans %.40q and %.40q; say which one "+
				"its key is on",
				ErrInvalidRequest, k.Name, p.of[i].plan, s.plan)
		default:
			return asked{}, fmt.Errorf("%w: the call asks for one bucket of %q under two policies; give the name one policy",
				ErrInvalidRequest, k.Name)
		}
		same.Cost += r.cost
		return asked{ask: i, cost: r.cost, key: key}, nil
	}
	p.asks, p.of = append(p.asks, bucket.Ask{
		Key: k, Terms: terms, Policy: s.limit, Cost: r.cost,
		Unenforced: s.mode == Shadow,
	}), append(p.of, s)
	return asked{ask: len(p.asks) - 1, cost: r.cost, key: key}, nil
}

// limitOwed sets how low the bucket may go, and returns an error if it can never give the cost.
func limitOwed(a *bucket.Ask, limit Limit, reserve bool) error {
	if !reserve {
		return checkMost(limit, a.Cost, a.Terms.Capacity)
	}
	if !a.Terms.Reserves && !a.Terms.Kind.Owes() {
		return fmt.Errorf("%w: %q is %v, whose tokens cannot be reserved in advance; call Take, and again after its "+
			"RetryAfter", ErrNoReservations, limit.Name(), limit.Policy())
	}
	if !a.Terms.Reserves {
		return fmt.Errorf("%w: %q has NoReservations; call Take, or set MaxReserved", ErrNoReservations, limit.Name())
	}
	a.MinBalance, a.AllowDebt = -a.Terms.MaxDebt, true
	most := a.Terms.Capacity + a.Terms.MaxDebt
	if a.Cost <= most && a.Terms.Capacity-a.Cost < a.MinBalance { // most was rounded up
		most = math.Nextafter(a.Cost, 0)
	}
	if a.Cost > most {
		return fmt.Errorf("%w or MaxReserved", checkMost(limit, a.Cost, most))
	}
	return nil
}

// sort sorts the buckets by the primary key, the order in which every call locks them.
func (p *plan) sort() {
	if slices.IsSortedFunc(p.asks, func(a, b bucket.Ask) int { return a.Key.Compare(b.Key) }) {
		return
	}
	order := make([]int, len(p.asks))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(i, j int) int { return p.asks[i].Key.Compare(p.asks[j].Key) })
	asks, of, place := make([]bucket.Ask, len(order)), make([]subject, len(order)), make([]int, len(order))
	for to, from := range order {
		asks[to], of[to], place[from] = p.asks[from], p.of[from], to
	}
	p.asks, p.of = asks, of
	p.move(place)
}

// move updates the indexes of the requests after the buckets have moved to place.
func (p *plan) move(place []int) {
	for i := range p.asked {
		if p.asked[i].known == nil {
			p.asked[i].ask = place[p.asked[i].ask]
		}
	}
}

func checkMost(limit Limit, cost, most float64) error {
	if cost <= most {
		return nil
	}
	d := limit.definition()
	return checkCost(&d, cost, most)
}

// checkCost returns an error if cost is not a valid number of tokens for the limit, or above most.
func checkCost(d *definition, cost, most float64) error {
	switch {
	case d.policy == nil:
		return fmt.Errorf("%w: the request is for the zero Limit; make limits with Define or NewLimit", ErrInvalidLimit)
	case !(cost >= 0) || math.IsInf(cost, 1):
		return fmt.Errorf("%w: %v of %q; a cost is a number from 0 up", ErrInvalidCost, cost, d.name)
	case cost > 0 && cost < max(d.capacity()*bucket.MinCostShare, bucket.MinTokens):
		return fmt.Errorf("%w: %v of %q is too small beside its capacity of %v; use a larger unit of cost or a smaller "+
			"capacity",
			ErrInvalidCost, cost, d.name, d.capacity())
	case cost > most:
		return &CapacityError{Limit: d.name, Cost: cost, Most: most}
	}
	return nil
}

// storedKey checks the key and the plan of a request, and returns the stored form of the key: "" for the global bucket.
func storedKey(secret []byte, r *Request) (string, error) {
	invalid := func(problem string) (string, error) {
		return "", fmt.Errorf("%w for %q: %s", ErrInvalidKey, r.limit.Name(), problem)
	}
	hashed := len(secret) > 0 && !r.stored
	switch {
	case r.plan != "" && !isText(r.plan):
		return "", fmt.Errorf("%w: the plan of %q is %.40q; a plan has up to %d bytes of UTF-8 without NUL",
			ErrInvalidRequest, r.limit.Name(), r.plan, maxPlanBytes)
	case r.global || r.limit == Limit{}: // checkCost reports a zero Limit
		return "", nil
	case r.key == "" && r.stored: // the stored key of Global
		return "", nil
	case r.stored && !isText(r.key):
		return invalid(fmt.Sprintf("nothing is stored under it; a stored key has up to %d bytes of UTF-8 without NUL, as "+
			"Limiter.StoredKey returns it", maxKeyBytes))
	case r.key == "":
		return invalid("it is empty (an ID of 0, a nil UUID and a Join with an empty part also give an empty key); name " +
			"who is being limited, or use Global for the bucket everybody shares")
	case hashed && len(r.key) > maxHashedKeyBytes:
		return invalid(fmt.Sprintf("it has %d bytes; at most %d can be hashed", len(r.key), maxHashedKeyBytes))
	case hashed:
		return hashKey(secret, r.limit.Name(), r.key), nil
	case len(r.key) > maxKeyBytes:
		return invalid(fmt.Sprintf("it has %d bytes and at most %d fit; shorten it, or set Config.HashKey", len(r.key),
			maxKeyBytes))
	case !utf8.ValidString(r.key):
		return invalid("it is not valid UTF-8; encode it, or set Config.HashKey")
	case strings.IndexByte(r.key, 0) >= 0:
		return invalid("it holds a NUL byte, which Postgres cannot store; encode it, or set Config.HashKey")
	}
	return r.key, nil
}

// isText reports whether s can be a stored key or a plan: up to maxKeyBytes bytes of UTF-8 without NUL.
func isText(s string) bool {
	return len(s) <= maxKeyBytes && utf8.ValidString(s) && strings.IndexByte(s, 0) < 0
}

// hashKey returns the HMAC-SHA-256 of the limit's name and the key, as 43 characters of base64url. With the name in it,
// one key differs under two limits.
func hashKey(secret []byte, name, key string) string {
	mac := hmac.New(sha256.New, secret)
	mac.Write([]byte(name))
	mac.Write([]byte{0}) // no name contains it, so different pairs give different inputs
	mac.Write([]byte(key))
	return base64.RawURLEncoding.EncodeToString(mac.Sum(nil))
}

// termsFor returns the terms of the bucket of key. If the policy does not set the start of windows, the name and the
// key do.
func (l Limit) termsFor(key string) bucket.Terms { return termsFor(l.terms(), l.Name(), key) }

func termsFor(t bucket.Terms, name, key string) bucket.Terms {
	if !bucket.IsSeeded(&t) {
		return t
	}
	h := fnv.New64a()
	h.Write([]byte(name))
	h.Write([]byte{0})
	h.Write([]byte(key))
	return t.Seeded(h.Sum64())
}
