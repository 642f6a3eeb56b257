package ratelimit

import (
	"errors"
	"fmt"
	"math"
	"reflect"
	"regexp"
	"unique"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// Limit is a named policy. It is a value: copy it, keep it in a package variable, or make it at the call;
// two definitions with one name and key share a bucket, wherever they stand, so give them one policy.
type Limit struct {
	made unique.Handle[definition] // one word, by which equal limits are equal
}

// definition is what a Limit is.
type definition struct {
	name   string
	policy Policy // that of a type that cannot be compared is in an incomparable
	terms  bucket.Terms

	// plain is whether the limit is what most are: tokens arrive in steps, by no calendar and in one era, and cost 1 each.
	plain bool
	// seeded is whether the phase of windows is derived from the key, in any era.
	seeded bool
}

// incomparable is a policy of a type on which == cannot be used, as one of the program's that embeds a policy may be. A limit
// of it is equal to its copies.
type incomparable struct{ Policy }

// limitOf returns the limit of a policy that was compiled.
//
// A new kind of policy is also added to value.go, checkVerb, internal/telemetry (algorithmOf), httplimit (quota.go, clientstate.go,
// client/ratelimit.js), rules (kind.go, row.go, scale.go, filepolicy.go, and a migration), internal/cli (definition.go, policytext.go) and
// admin (policytext.go, formpolicy.go, preview.go). A kind with a bucket.Rule also needs bucket.Parts and a column if its rows hold more,
// buckets_prune.sql, and Reserved in internal/reserved. Locked rows decide on it until it has a statement (internal/store/window.go).
func limitOf(name string, policy Policy, t bucket.Terms) Limit {
	_, adapts := policy.(Adaptive)
	d := definition{name: name, policy: policy, terms: t, plain: !adapts && t.Rule == nil && !t.HasSpan(), seeded: t.NeedsSeed()}
	switch policy.(type) {
	case TokenBucket, FixedWindow, SlidingWindow, CalendarWindow, Concurrency, Adaptive, madeElsewhere:
	default:
		if !reflect.ValueOf(policy).Comparable() {
			d.policy = &incomparable{policy}
		}
	}
	return Limit{unique.Make(d)}
}

// definition returns what the limit is, and nothing for the zero Limit.
func (l Limit) definition() definition {
	if l == (Limit{}) {
		return definition{}
	}
	return l.made.Value()
}

// isZero reports whether the limit is the zero Limit.
func (l Limit) isZero() bool { return l == Limit{} }

// isAs reports whether the limits decide alike: policies may say the same in other words.
func (l Limit) isAs(o Limit) bool { return l == o || l.terms() == o.terms() }

// terms returns the policy as the algebra knows it.
func (l Limit) terms() bucket.Terms { return l.definition().terms }

var validName = regexp.MustCompile(`^[A-Za-z0-9_.:/-]{1,64}$`)

// Define returns the limit called name, and panics when it is invalid, as regexp.MustCompile does. It is
// meant for package variables, where a misspelt name of the variable does not compile. Use NewLimit for definitions
// that come from outside the program.
func Define(name string, policy Policy) Limit {
	limit, err := NewLimit(name, policy)
	if err != nil {
		panic(err)
	}
	return limit
}

// NewLimit returns the limit called name: 1 to 64 letters, digits and _ . : / -. It returns an error
// that wraps ErrInvalidLimit and says what to change.
func NewLimit(name string, policy Policy) (Limit, error) {
	if !validName.MatchString(name) {
		return Limit{}, fmt.Errorf("%w: name %.80q: use 1 to 64 letters, digits and _ . : / -", ErrInvalidLimit, name)
	}
	if isNil(policy) {
		return Limit{}, fmt.Errorf("%w %q: no policy; pass a TokenBucket, or another of the package's policies", ErrInvalidLimit, name)
	}
	policy = valueOf(policy)
	t, err := policy.compile()
	if err != nil {
		return Limit{}, fmt.Errorf("%w %q: %w", ErrInvalidLimit, name, err)
	}
	return limitOf(name, policy, t), nil
}

// Name returns the limit's name.
func (l Limit) Name() string { return l.definition().name }

// Policy returns the policy the limit was defined with: its value, where it was given by a pointer.
func (l Limit) Policy() Policy {
	policy := l.definition().policy
	if p, ok := policy.(*incomparable); ok {
		return p.Policy
	}
	return policy
}

// Capacity returns the most tokens the limit holds, and so the largest cost Take accepts. Of a [TokenBucket] with a Prefetch
// that is less than the Capacity of the policy, by what arrives within Prefetch.
func (l Limit) Capacity() float64 { return l.definition().terms.Capacity }

// String returns the name and the policy in words.
func (l Limit) String() string {
	if l.isZero() {
		return "undefined limit"
	}
	return l.Name() + ": " + l.Policy().String()
}

// For returns a request for one token from the bucket of key: a user, an address, an account. The key
// is 1 to 256 bytes of UTF-8 without NUL and is compared byte for byte, so bring names that people type
// into one form first. Of an integer or a UUID, [ID] and [UUID] make one, and [Join] of several parts. An empty key is
// refused by the call it is used in, so that a forgotten one never makes everybody share a bucket; the bucket everybody
// shares is Global.
func (l Limit) For(key string) Request { return Request{limit: l, key: key, cost: 1} }

// Global returns a request for one token from the one bucket of the limit that has no key.
func (l Limit) Global() Request { return Request{limit: l, global: true, cost: 1} }

// ForStored returns a request for one token from the bucket of a key as it is stored, which [Limiter.StoredKey] and
// [Refusal] say: an HMAC where [Config.HashKey] is set, and "" of Global. It is for tools and pages that read keys in
// tables. Never pass it what a client chose: the client would choose the bucket. A Limiter needs no secret for a call
// that names all of its keys so.
func (l Limit) ForStored(key string) Request {
	return Request{limit: l, key: key, stored: true, cost: 1}
}

// Request is what one call asks of one limit. Make it with [Limit.For] or [Limit.Global].
type Request struct {
	limit  Limit
	key    string
	global bool
	stored bool // whether key is in its stored form
	cost   float64
	plan   string
	pool   *Request // that it borrows from; nil: none
	price  float64  // 0: that which holds
}

// Plan returns the request with the plan of its key, such as "pro". If [Config.Policies] has a rule for the plan, that rule
// decides. Name the plan in every request for the key, because all plans share its bucket: a request that names another
// plan, a misspelled one or none is decided by the rule without a plan, or else by the definition in the code, and cuts the
// bucket down to that capacity. See [PlanWithoutRule].
//
// When a key changes its plan, its usage so far carries over. The new policy counts from the last call for the bucket; for a
// change at an instant, give the key an override. Without Policies the plan has no effect. A plan has up to 256 bytes of
// UTF-8 without NUL; calls return ErrInvalidRequest for others.
func (r Request) Plan(plan string) Request {
	r.plan = plan
	return r
}

// Cost returns the request with a cost of tokens instead of one. It may be a fraction. A cost of 0 takes
// nothing and asks only that nothing is owed.
func (r Request) Cost(tokens float64) Request {
	r.cost = tokens
	return r
}

// Price returns the request as one at a price of an [Adaptive] limit that charges its price: for Refund and Credit, what it
// was taken at, which is State.Charged of its decision, so that what was taken is given back, whatever the limit is by then; for
// Charge, too. Without it these three give and take tokens at 1 each. Take, Check and Reserve go by it in place of the price that
// holds, where one is charged. It is from 1 to 1000, and 0 is none. For limits that charge no price by their definition, nor by any
// policy of a rule that they have, it plays no part.
func (r Request) Price(price float64) Request {
	r.price = price
	return r
}

// Limit returns the limit the request is for.
func (r Request) Limit() Limit { return r.limit }

// String names the limit and the cost. It leaves out the key, which may be personal.
func (r Request) String() string { return fmt.Sprintf("%v of %s", r.cost, r.limit.Name()) }

// Policy is what a limit gives: a [TokenBucket], a [FixedWindow], a [SlidingWindow], a [CalendarWindow], a
// [Concurrency] or an [Adaptive].
type Policy interface {
	fmt.Stringer
	compile() (bucket.Terms, error)
}

// verbAcquire is the verb of Acquire.
const verbAcquire = "acquire"

// errHolds says what a verb does not do that is called on a limit on concurrency.
var errHolds = errors.New("call Acquire, which takes a lease on slots, and Release")

// valueOf returns the policy itself where it is given by a pointer, so that kinds are told apart by values only, and a limit
// stays as it is when what the pointer is to changes.
func valueOf(policy Policy) Policy {
	v := reflect.ValueOf(policy)
	if v.Kind() != reflect.Pointer || v.IsNil() {
		return policy
	}
	if p, ok := v.Elem().Interface().(Policy); ok {
		policy = p
	}
	if p, adapts := policy.(Adaptive); adapts {
		p.Contract = valueOf(p.Contract)
		return p
	}
	return policy
}

// checkVerb returns an error when a verb means nothing for the limit, or does not with that cost.
func checkVerb(limit Limit, verb string, cost float64) error {
	if !limit.terms().Holds() {
		return nil
	}
	switch verb {
	case verbAcquire, verbCheck:
		if cost == 0 && verb == verbAcquire {
			return fmt.Errorf("%w: 0 of %q; ask for one slot or more", ErrInvalidCost, limit.Name())
		}
		return checkSlots(limit, cost)
	case "value", "reset":
		return nil
	}
	return fmt.Errorf("%w: %s of %q, which is %v: %w", ErrInvalidRequest, verb, limit.Name(), limit.Policy(), errHolds)
}

// checkSlots returns an error when the limit is one on concurrency and cost is not a whole number of slots.
func checkSlots(limit Limit, cost float64) error {
	if limit.terms().Holds() && cost != math.Trunc(cost) {
		return fmt.Errorf("%w: %v of %q; slots are whole: ask for one or more of them", ErrInvalidCost, cost, limit.Name())
	}
	return nil
}
