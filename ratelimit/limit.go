package ratelimit

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"time"
	"unique"

	"github.com/pgratelimit/pgratelimit/internal/arg"
	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
)

// Limit is a named policy. It's a value: copy it, keep it in a package variable, or make it where you call. Two
// definitions with the same name share buckets, in any program, so give them the same policy.
type Limit struct {
	made unique.Handle[definition] // one word; == compares it
}

type definition struct {
	name   string
	policy Policy       // an *incomparable if == cannot compare its type
	terms  bucket.Terms // of a row of a bucket
	shards int          // how many rows a bucket has

	// plain is whether tokens arrive in steps, without a calendar or revisions, and cost 1 each, as for most limits.
	plain bool
	// seeded is whether the phase of the windows is derived from the key, in at least one revision.
	seeded bool
}

// incomparable wraps a policy whose type cannot be compared with ==, such as a type of the program that embeds a
// policy. Only copies of a Limit with such a policy are equal to it.
type incomparable struct{ Policy }

// limitOf returns the limit of a compiled policy.
//
// A new kind of policy is one file with its type, and an entry in newText and, if it has a bucket.Kind of its own, in
// kindOf. Some packages show kinds in their own ways: httplimit (quota.go, refusal.go, client/ratelimit.js),
// and admin (preview.go and its form). A bucket.Kind whose rows hold more than value
// and ts also needs bucket.Parts, a column, buckets_prune.sql and internal/engine/reserved. Without a function of its
// own (bucket.Statement), its rows are locked and decided in Go.
func limitOf(name string, policy Policy, t bucket.Terms) Limit {
	d := definition{name: name, policy: policy, terms: t, shards: shardsOf(policy), plain: t.Kind == (bucket.Steps{}) &&
		!t.HasSpan(), seeded: bucket.IsSeeded(&t)}
	if !reflect.ValueOf(policy).Comparable() {
		d.policy = &incomparable{policy}
	}
	return Limit{unique.Make(d)}
}

func (d definition) capacity() float64 { return d.terms.Capacity * float64(d.shards) }

func (l Limit) definition() definition {
	if l == (Limit{}) {
		return definition{}
	}
	return l.made.Value()
}

func (l Limit) isZero() bool { return l == Limit{} }

// isAs reports whether the limits decide alike. Different policies can compile to the same terms.
func (l Limit) isAs(o Limit) bool {
	return l == o || l.terms() == o.terms() && l.definition().shards == o.definition().shards
}

// terms returns the policy as the arithmetic in package bucket uses it, for a row of a bucket.
func (l Limit) terms() bucket.Terms { return l.definition().terms }

var validName = regexp.MustCompile(`^[A-Za-z0-9_.:/-]{1,64}$`)

// Define returns the limit with a name and a policy, and panics if either is invalid, like regexp.MustCompile. Use it
// for package variables, and NewLimit for definitions from outside the program.
func Define(name string, policy Policy) Limit {
	limit, err := NewLimit(name, policy)
	if err != nil {
		panic(err)
	}
	return limit
}

// NewLimit returns an error where Define panics. A name has 1 to 64 letters, digits and _ . : / -. Errors
// wrap ErrInvalidLimit and say what to change.
func NewLimit(name string, policy Policy) (Limit, error) {
	if !validName.MatchString(name) {
		return Limit{}, fmt.Errorf("%w: name %.80q: use 1 to 64 letters, digits and _ . : / -", ErrInvalidLimit, name)
	}
	if arg.IsNil(policy) {
		return Limit{}, fmt.Errorf("%w %q: no policy; pass a TokenBucket, or another of the package's policies",
			ErrInvalidLimit, name)
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

// Policy returns the policy of the definition. If the definition has a pointer to a policy, it returns the value.
func (l Limit) Policy() Policy {
	policy := l.definition().policy
	if p, ok := policy.(*incomparable); ok {
		return p.Policy
	}
	return policy
}

// Capacity returns the maximum number of tokens of the limit, which is also the largest cost that Take accepts.
func (l Limit) Capacity() float64 { return l.definition().capacity() }

// String returns the name and the policy as text.
func (l Limit) String() string {
	if l.isZero() {
		return "undefined limit"
	}
	return l.Name() + ": " + l.Policy().String()
}

// MarshalJSON returns the name and the policy as text, as in {"name": "logins", "policy": "10 per minute"}, so that a
// Decision can be logged or stored as JSON. It cannot be read back. The zero Limit is null.
func (l Limit) MarshalJSON() ([]byte, error) {
	if l.isZero() {
		return []byte("null"), nil
	}
	return json.Marshal(struct {
		Name   string `json:"name"`
		Policy string `json:"policy"`
	}{l.Name(), l.Policy().String()})
}

// For returns a request for one token from a key's bucket: a user's, an address's, an account's. A key has 1 to 256
// bytes of UTF-8 without NUL, or with Config.HashKey 1 byte to 64 KiB of any content. Keys are compared byte for byte,
// so normalize names that people type. [ID], [UUID] and [Join] make keys of integers, UUIDs and several parts. A call
// with an empty key returns ErrInvalidKey, so a missing key can't put all callers into one bucket. If all should share
// one, use Global.
func (l Limit) For(key string) Request { return Request{limit: l, key: key, cost: 1} }

// Global returns a request for one token from the limit's only bucket without a key.
func (l Limit) Global() Request { return Request{limit: l, global: true, cost: 1} }

// ForStoredKey returns a request for one token from the bucket of a key in its stored form, as in [Limiter.StoredKey]
// and [Refusal]. That is an HMAC if [Config.HashKey] is set, and "" for Global. Use it in tools and pages that read
// keys from tables. Never pass it a key from a client, because the client could then choose the bucket. A Limiter needs
// no secret for a call whose keys are all in the stored form.
func (l Limit) ForStoredKey(key string) Request {
	return Request{limit: l, key: key, stored: true, cost: 1}
}

// Request is a cost in tokens from one bucket of a limit. Make it with [Limit.For] or [Limit.Global].
type Request struct {
	limit  Limit
	key    string
	global bool
	stored bool // whether key is in its stored form
	cost   float64
	plan   string
	within time.Duration // how soon a reservation must be ready; 0: however late
}

// Plan returns the request with the plan of its key, such as "pro". If [Config.Policies] has a rule for the plan, that
// rule decides. All plans share the bucket of a key, so set the plan in every request for the key. A request with
// another plan, a misspelled one or none is decided by the rule without a plan, or otherwise by the definition in the
// code. It also cuts a token bucket down to that capacity. See [event.PlanWithoutRule].
//
// When a key changes its plan, what it has used of a window carries over: after 900 of 1000, 9100 of 10,000 are left. A
// token bucket keeps its tokens, up to the new capacity. The new policy counts from the last call for the bucket. To
// change the policy at an exact instant, give the key an override. Without Policies the plan has no effect. A plan has
// up to 256 bytes of UTF-8 without NUL; calls return ErrInvalidRequest for others.
func (r Request) Plan(plan string) Request {
	r.plan = plan
	return r
}

// Cost returns the request with a cost of tokens in place of 1. The cost can be a fraction. A cost of 0 takes nothing:
// the call is allowed unless the bucket owes tokens.
func (r Request) Cost(tokens float64) Request {
	r.cost = tokens
	return r
}

// Tokens returns the cost.
func (r Request) Tokens() float64 { return r.cost }

// Times returns the request with n times its cost.
func (r Request) Times(n float64) Request { return r.Cost(r.cost * n) }

// MaxWait returns the request with a bound on its wait: [Limiter.Reserve] refuses, and takes nothing, if this limit's
// tokens would be repaid, or its pause would end, later than d after the decision. To bound the whole call, bound each
// of its requests. d counts in whole microseconds, and at least one, so with a d of 0 the tokens must be available now.
// After such a refusal RetryAfter is the time until the wait is short enough. CheckReserve answers as Reserve does.
// Other calls take only what is available, so the bound has no effect on them.
func (r Request) MaxWait(d time.Duration) Request {
	r.within = max(d.Truncate(time.Microsecond), time.Microsecond)
	return r
}

// Limit returns the limit of the request.
func (r Request) Limit() Limit { return r.limit }

// String returns the cost and the name of the limit. It leaves out the key, which can be personal data.
func (r Request) String() string { return fmt.Sprintf("%v of %s", r.cost, r.limit.Name()) }

// Policy says how many tokens a limit gives, and when: a [TokenBucket], a [FixedWindow], a [SlidingWindow], a
// [CalendarWindow] or a [Concurrency].
type Policy interface {
	fmt.Stringer
	compile() (bucket.Terms, error)
	// text returns the policy as a rules file has it.
	text() policyText
	// scaled returns the policy with its numbers of tokens multiplied by times.
	scaled(times float64) Policy
}

// valueOf returns the policy that a pointer points to, and other policies unchanged. So a type switch needs only value
// types, and later changes through the pointer do not change a limit.
func valueOf(policy Policy) Policy {
	v := reflect.ValueOf(policy)
	if v.Kind() != reflect.Pointer || v.IsNil() {
		return policy
	}
	if p, ok := v.Elem().Interface().(Policy); ok {
		return p
	}
	return policy
}

const (
	keySeparator = "|"
	keyEscape    = `\`
)

// Join makes a key of several parts, for example of a tenant and a user:
//
//	SendMessage.For(ratelimit.Join(tenant, ratelimit.ID(user.ID)))
//
// Different parts give different keys, because Join separates them with "|", and escapes "|" and "\" in a part with
// "\". If a part is empty, Join returns "", and calls return [ErrInvalidKey], so a missing part can't put several
// callers into one bucket. Make all keys of a limit in the same way, because a joined key can equal another plain key.
func Join(parts ...string) string {
	escaped := make([]string, len(parts))
	for i, part := range parts {
		if part == "" {
			return ""
		}
		part = strings.ReplaceAll(part, keyEscape, keyEscape+keyEscape)
		escaped[i] = strings.ReplaceAll(part, keySeparator, keyEscape+keySeparator)
	}
	return strings.Join(escaped, keySeparator)
}

// ID makes a key, or a part for [Join], of an integer: its decimal digits. For 0, which is usually an ID that wasn't
// set, it returns "", and calls return [ErrInvalidKey].
func ID[T ~int | ~int8 | ~int16 | ~int32 | ~int64 | ~uint | ~uint8 | ~uint16 | ~uint32 | ~uint64](id T) string {
	switch {
	case id == 0:
		return ""
	case id < 0:
		return strconv.FormatInt(int64(id), 10)
	}
	return strconv.FormatUint(uint64(id), 10)
}

// UUID makes a key, or a part for [Join], of a UUID: 36 characters in lower case. It accepts any type of 16 bytes; for
// a pgtype.UUID pass its Bytes. For the nil UUID it returns "", and calls return [ErrInvalidKey].
func UUID[T ~[16]byte](id T) string {
	b := [16]byte(id)
	if b == [16]byte{} {
		return ""
	}
	digits := hex.EncodeToString(b[:])
	return digits[:8] + "-" + digits[8:12] + "-" + digits[12:16] + "-" + digits[16:20] + "-" + digits[20:]
}

type requestText struct {
	Limit  string          `json:"limit"`
	Key    string          `json:"key,omitempty"`
	Plan   string          `json:"plan,omitempty"`
	Cost   float64         `json:"cost"`
	Policy json.RawMessage `json:"policy"`
}

// MarshalRequests returns requests as a JSON array, so that a queue or a table can keep them with the work that they
// are for:
//
//	[{"limit":"mail","key":"ada","plan":"pro","cost":5,"policy":{"kind":"token bucket","rate":10,"period":"1s"}}]
//
// Keys are in their stored form, as [Limiter.StoredKey] returns it. The policy is the definition in the code, as
// [MarshalPolicy] writes it. [Request.MaxWait] is left out, because it is about one call. MarshalRequests returns the
// errors of a call with these requests.
func (l *Limiter) MarshalRequests(requests ...Request) ([]byte, error) {
	texts := make([]requestText, len(requests))
	for i := range requests {
		r := &requests[i]
		if r.limit.isZero() {
			return nil, during("marshal", fmt.Errorf("%w: request %d has the zero Limit; make limits with Define or NewLimit",
				ErrInvalidLimit, i+1))
		}
		key, err := storedKey(l.config.HashKey, r)
		if err != nil {
			return nil, during("marshal", err)
		}
		policy, err := MarshalPolicy(r.limit.Policy())
		if err != nil {
			return nil, during("marshal", err)
		}
		texts[i] = requestText{r.limit.Name(), key, r.plan, r.cost, policy}
	}
	return json.Marshal(texts)
}

// UnmarshalRequests returns the requests that MarshalRequests has written. A request has the policy that this Limiter
// last used with the name of its limit, or the written one if it has not used the name. Rules apply to it as to any
// request.
func (l *Limiter) UnmarshalRequests(data []byte) ([]Request, error) {
	var texts []requestText
	if err := json.Unmarshal(data, &texts); err != nil {
		return nil, during("unmarshal", fmt.Errorf("%w: %.80q is not what MarshalRequests returns: %w", ErrInvalidRequest,
			data, err))
	}
	requests := make([]Request, len(texts))
	for i, t := range texts {
		policy, err := UnmarshalPolicy(t.Policy)
		if err != nil {
			return nil, during("unmarshal", err)
		}
		limit, err := NewLimit(t.Limit, policy)
		if err != nil {
			return nil, during("unmarshal", err)
		}
		if last := l.policies.last(t.Limit); last != nil {
			limit = *last
		}
		requests[i] = limit.ForStoredKey(t.Key).Plan(t.Plan).Cost(t.Cost)
	}
	return requests, nil
}
