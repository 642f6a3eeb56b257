package ratelimit

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"math"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

const (
	maxRequests    = 64      // limits in one call: each is a row lock held to the end of the transaction
	maxKeyBytes    = 256     // what the key column holds
	maxSecretBytes = 1 << 16 // what a key may be long before it is hashed
)

// ask is one row that a call needs, and what the call asks of it.
type ask struct {
	limit  Limit
	key    string // as stored
	shard  int32  // 0, or which row of a bucket that is spread over several
	terms  bucket.Terms
	cost   float64
	lowest float64 // the least value that may remain
	most   float64 // what a credit may fill it to, where that is more than its capacity
}

// rowKey is the key of the row.
func (b *ask) rowKey() bucket.Key { return bucket.Key{Name: b.limit.name, Key: b.key, Shard: b.shard} }

// bucketKey is the key of the bucket, on however many rows it is.
func (b *ask) bucketKey() bucket.Key { return b.rowKey().Whole() }

// plan is a call's requests as the statements need them: every bucket once, in the order of locking.
type plan struct {
	buckets []ask
	asked   []asked // in the order asked

	oneBucket [1]ask // the room for them when there is one, as there mostly is
	oneAsked  [1]asked
	oneAnswer [1]answer // and for its answer
	call      call      // of which this is the plan, when it is one of Take, Check, Value or Reserve
}

type asked struct {
	bucket int // index into buckets
	cost   float64
}

// plan checks requests and arranges them. It fails before any SQL, because a statement that fails
// takes the caller's transaction with it.
func (l *Limiter) plan(requests []Request, reserve bool) (*plan, error) {
	if len(requests) == 0 || len(requests) > maxRequests {
		return nil, fmt.Errorf("%w: the call asks for %d limits; it takes from 1 to %d", ErrInvalidRequest, len(requests), maxRequests)
	}
	p := newPlan(len(requests))
	for i, r := range requests {
		key, err := l.storedKey(r)
		if err != nil {
			return nil, err
		}
		if err := checkCost(r.limit, r.cost, math.Inf(1)); err != nil {
			return nil, err
		}
		l.policies.note(r.limit.name, &r.limit.terms)
		at, err := p.merge(ask{limit: r.limit, key: key, terms: r.limit.termsFor(key), cost: r.cost})
		if err != nil {
			return nil, err
		}
		p.asked[i] = asked{bucket: at, cost: r.cost}
	}
	for i := range p.buckets {
		if err := p.buckets[i].bound(reserve); err != nil {
			return nil, err
		}
	}
	p.sort()
	return p, nil
}

// of returns the call for the plan: made with it, so that the two are one allocation.
func (p *plan) of(verb string, look, reserve bool) *call {
	c := &p.call
	c.Of, c.verb, c.plan, c.look, c.reserve = c, verb, p, look, reserve
	return c
}

// newPlan returns a plan with room for n requests.
func newPlan(n int) *plan {
	p := &plan{}
	if n == 1 {
		p.buckets, p.asked = p.oneBucket[:0], p.oneAsked[:]
		return p
	}
	p.buckets, p.asked = make([]ask, 0, n), make([]asked, n)
	return p
}

// merge adds b to the plan, or its cost to the bucket of the same name and key, and returns its index.
func (p *plan) merge(b ask) (int, error) {
	for i := range p.buckets {
		same := &p.buckets[i]
		if same.limit.name != b.limit.name || same.key != b.key {
			continue
		}
		if same.terms != b.terms {
			return 0, fmt.Errorf("%w: the call asks for one bucket of %q under two policies; give the name one policy", ErrInvalidRequest, b.limit.name)
		}
		same.cost += b.cost
		return i, nil
	}
	p.buckets = append(p.buckets, b)
	return len(p.buckets) - 1, nil
}

// bound sets how low the bucket may go, and checks that the cost can ever be met.
func (b *ask) bound(reserve bool) error {
	if !reserve {
		return checkCost(b.limit, b.cost, b.terms.Capacity)
	}
	if !b.terms.Reserves {
		return fmt.Errorf("%w: %q has NoReservations; call Take, or set MaxReserved", ErrNoReservations, b.limit.name)
	}
	b.lowest = -b.terms.MaxDebt
	most := b.terms.Capacity + b.terms.MaxDebt
	if b.cost <= most && b.terms.Capacity-b.cost < b.lowest { // the sum was rounded up
		most = math.Nextafter(b.cost, 0)
	}
	return checkCost(b.limit, b.cost, most)
}

// sort puts the buckets in the order in which every call locks them: that of the primary key.
func (p *plan) sort() {
	if len(p.buckets) == 1 {
		return
	}
	order := make([]int, len(p.buckets))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(i, j int) int {
		a, b := &p.buckets[i], &p.buckets[j]
		return a.rowKey().Compare(b.rowKey())
	})
	sorted, place := make([]ask, len(order)), make([]int, len(order))
	for to, from := range order {
		sorted[to], place[from] = p.buckets[from], to
	}
	p.buckets = sorted
	for i := range p.asked {
		p.asked[i].bucket = place[p.asked[i].bucket]
	}
}

// free reports whether the call takes nothing, so that it has nothing to write.
func (p *plan) free() bool {
	return !slices.ContainsFunc(p.buckets, func(b ask) bool { return b.cost > 0 })
}

// checkCost returns an error unless cost is a number of tokens that limit can tell from nothing and that
// is no more than most.
func checkCost(limit Limit, cost, most float64) error {
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
func (l *Limiter) storedKey(r Request) (string, error) {
	invalid := func(problem string) (string, error) {
		return "", fmt.Errorf("%w for %q: %s", ErrInvalidKey, r.limit.name, problem)
	}
	hashed := len(l.config.HashKey) > 0
	switch {
	case r.global || r.limit.policy == nil: // the latter is reported by checkCost
		return "", nil
	case r.key == "":
		return invalid("it is empty; name who is being limited, or use Global for the bucket everybody shares")
	case hashed && len(r.key) > maxSecretBytes:
		return invalid(fmt.Sprintf("it has %d bytes; at most %d can be hashed", len(r.key), maxSecretBytes))
	case hashed:
		return hashKey(l.config.HashKey, r.limit.name, r.key), nil
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
