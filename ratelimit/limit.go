package ratelimit

import (
	"fmt"
	"regexp"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// Limit is a named policy. It is a value: copy it, keep it in a package variable, or make it at the call;
// two definitions with one name and key share a bucket, wherever they stand, so give them one policy.
type Limit struct {
	name   string
	policy Policy
	terms  bucket.Terms
}

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
		return Limit{}, fmt.Errorf("%w %q: no policy; pass a TokenBucket or a FixedWindow", ErrInvalidLimit, name)
	}
	t, err := policy.compile()
	if err != nil {
		return Limit{}, fmt.Errorf("%w %q: %w", ErrInvalidLimit, name, err)
	}
	return Limit{name: name, policy: policy, terms: t}, nil
}

// Name returns the limit's name.
func (l Limit) Name() string { return l.name }

// Policy returns the policy the limit was defined with.
func (l Limit) Policy() Policy { return l.policy }

// Capacity returns the most tokens the limit holds, and so the largest cost Take accepts.
func (l Limit) Capacity() float64 { return l.terms.Capacity }

// String returns the name and the policy in words.
func (l Limit) String() string {
	if l.policy == nil {
		return "undefined limit"
	}
	return l.name + ": " + l.policy.String()
}

// For returns a request for one token from the bucket of key: a user, an address, an account. The key
// is 1 to 256 bytes of UTF-8 without NUL and is compared byte for byte, so bring names that people type
// into one form first. An empty key is refused by the call it is used in, so that a forgotten one never
// makes everybody share a bucket; the bucket everybody shares is Global.
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
}

// Plan returns the request with the plan that its key is on, such as "pro": where [Config.Policies] has a rule for
// that plan, that one decides. The bucket is the same whatever the plan, so a key that changes its plan takes along what
// it has taken. The change counts from when the bucket was last taken from, as a changed definition does; for one that
// holds from an instant, give the key a rule of its own. Without Policies the plan plays no part.
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

// Limit returns the limit the request is for.
func (r Request) Limit() Limit { return r.limit }

// String names the limit and the cost. It leaves out the key, which may be personal.
func (r Request) String() string { return fmt.Sprintf("%v of %s", r.cost, r.limit.name) }
