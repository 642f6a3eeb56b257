package ratelimit

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// Decision is the answer to a call over one or several limits.
//
// Of a limit with Shards, what is left is the sum over its rows, as they were in the moments of the call. In a
// transaction at REPEATABLE READ or SERIALIZABLE, InTx included, an allowed call reads none but the row that it
// takes from, lest it conflict with others: Remaining, ResetAfter and Value are then estimates, made as if the
// other rows held as much as that one did. A limit that refused was asked as a whole, so RetryAfter is no estimate.
type Decision struct {
	// Allowed is whether every limit had what was asked of it. When it is false nothing was taken.
	Allowed bool
	// RetryAfter is 0 when allowed. When refused it is the wait after which the same call would be allowed
	// if nobody else took anything meanwhile: the longest wait among the limits that refused.
	RetryAfter time.Duration
	// Remaining is the number of tokens left after the decision in the limit that has fewest: never below
	// 0, and a fraction between two whole tokens.
	Remaining float64
	// ResetAfter is the wait until every limit of the call is full again if nothing more is taken.
	ResetAfter time.Duration
	// At is the instant of the decision on the database's clock.
	At time.Time
	// States has the answer of each limit, in the order asked.
	States []State
}

// State is what a Decision says of one limit.
type State struct {
	// Limit is the limit asked.
	Limit Limit
	// Cost is what the request asked of it.
	Cost float64
	// Allowed is whether this limit had what was asked of it. When another limit refused, nothing was
	// taken from this one either.
	Allowed bool
	// RetryAfter is 0 when this limit allowed the request, else the wait until it would.
	RetryAfter time.Duration
	// Remaining is the number of tokens left, never below 0.
	Remaining float64
	// ResetAfter is the wait until the limit is full.
	ResetAfter time.Duration
	// Value is the bucket after the decision, to project to other instants; its tokens are negative while
	// reservations are owed.
	Value Value
}

// Err returns nil when the decision is to allow, and otherwise a *LimitedError that carries it.
// Return it from a transaction to roll back.
func (d Decision) Err() error {
	if d.Allowed {
		return nil
	}
	return &LimitedError{Decision: d}
}

// LimitedError is a refusal as an error. errors.Is(err, ErrLimited) is true of it.
type LimitedError struct {
	Decision Decision
}

// Error names the limits that refused and the wait. It holds no key.
func (e *LimitedError) Error() string {
	var names []string
	for _, s := range e.Decision.States {
		if !s.Allowed {
			names = append(names, s.Limit.name)
		}
	}
	return fmt.Sprintf("%v by %s: retry after %v", ErrLimited, strings.Join(names, ", "), e.Decision.RetryAfter)
}

// Is reports whether target is ErrLimited.
func (e *LimitedError) Is(target error) bool { return target == ErrLimited }

// Value is what a bucket's row holds, with the policy to project it.
type Value struct {
	// Limit is the limit the bucket belongs to.
	Limit Limit
	// Tokens is what the bucket holds at AsOf: negative while reservations are owed.
	Tokens float64
	// AsOf is the instant of the reading on the database's clock.
	AsOf time.Time

	terms bucket.Terms
	state bucket.State
	rows  []bucket.State // of each row, when the bucket is spread over several
}

// At returns what the bucket holds at another instant if nothing more is taken: never above the
// capacity. Instants before the last change of the bucket count as that change.
func (v Value) At(instant time.Time) float64 {
	if v.Limit.policy == nil { // the zero Value, as after an error
		return 0
	}
	return v.tokens(clampInstant(instant))
}

// tokens is Terms.Tokens for what the bucket holds.
func (v *Value) tokens(now int64) float64 {
	if v.rows != nil {
		return v.terms.TokensOf(v.rows, now)
	}
	return v.terms.Tokens(v.state, now)
}

// RetryAfter returns how long from instant it takes until cost tokens can be taken, if nothing more
// is taken meanwhile: 0 when they can be at once. It returns ErrCostExceedsCapacity when they never can.
func (v Value) RetryAfter(instant time.Time, cost float64) (time.Duration, error) {
	if err := checkCost(v.Limit, cost, v.terms.Capacity); err != nil {
		return 0, err
	}
	return v.wait(clampInstant(instant), cost, 0), nil
}

// wait is Terms.Wait for what the bucket holds.
func (v *Value) wait(now int64, cost, lowest float64) time.Duration {
	if v.rows != nil {
		return v.terms.WaitOf(v.rows, now, cost, lowest)
	}
	return v.terms.Wait(v.state, now, cost, lowest)
}

// Take returns what the bucket would hold, and what a call would be told, if cost tokens were taken at an instant: the
// step of the algebra without a database, for simulations, tests and previews. The decisions are those of Limiter.Take
// to the last bit, when nobody else changes the bucket in between; nothing is stored. A refusal leaves the tokens as
// they are. An instant before the last change of the bucket counts as that change, unless it is more than a minute and a
// window before: the bucket is then taken to be from a clock that was wrong, and goes on from the instant.
//
// A cost that is no number of tokens, or more than the limit can ever give, is refused with a RetryAfter of 250 years,
// the longest there is; so is every cost of the zero Value. RetryAfter, the method, says with an error what is wrong.
// Of a limit with Shards it takes from all rows together, as a call does that finds too few tokens in the one it tries.
func (v Value) Take(instant time.Time, cost float64) (Value, Decision) {
	const longest = time.Duration(bucket.Horizon) * time.Microsecond
	now := clampInstant(instant)
	if v.Limit.policy == nil {
		return v, State{Cost: cost, RetryAfter: longest}.alone(time.UnixMicro(now))
	}
	b, a := v.bucket(cost), v.answer(now)
	invalid := checkCost(v.Limit, cost, v.terms.Capacity) != nil
	switch {
	case invalid:
	case cost == 0: // which writes nothing
		a.allowed = v.tokens(now) >= 0
	case a.rows != nil:
		a.allowed = v.terms.TakeRows(a.rows, now, cost, 0)
	default:
		a.state, a.allowed = v.terms.Take(a.state, now, cost, 0)
	}
	if a.rows != nil {
		a.of(&b, a.rows) // each row has grown by itself, whatever was decided
	}
	s := b.decide(a)
	if invalid {
		s.RetryAfter = longest
	}
	return s.Value, s.alone(s.Value.AsOf)
}

// Full returns the value, at an instant, of a bucket that nobody has used: the first one of a simulation. The request's
// cost does not matter. With Config.HashKey, fixed windows without a Start begin at other instants than here, where no
// secret is known.
func (r Request) Full(instant time.Time) Value {
	if r.limit.policy == nil {
		return Value{}
	}
	now := clampInstant(instant)
	b := ask{limit: r.limit, terms: r.limit.termsFor(r.key)}
	a := answer{now: now, state: b.terms.Full(now)}
	if b.sharded() {
		shard := b.terms.OfShard()
		a.of(&b, slices.Repeat([]bucket.State{shard.Full(now)}, int(b.terms.Shards)))
	}
	return b.reading(a)
}

// bucket returns the bucket of the value, and a request for cost tokens of it.
func (v *Value) bucket(cost float64) ask {
	return ask{limit: v.Limit, terms: v.terms, cost: cost}
}

// answer returns what a call at now would find in the bucket, with a wrong clock in it put right.
func (v *Value) answer(now int64) answer {
	a := answer{now: now, state: v.terms.FixClock(v.state, now)}
	if v.rows != nil {
		a.rows = v.terms.FixClocks(v.rows, now)
	}
	return a
}

// alone returns the decision on a call that asks for this limit alone.
func (s State) alone(at time.Time) Decision {
	return Decision{
		Allowed: s.Allowed, RetryAfter: s.RetryAfter, Remaining: s.Remaining, ResetAfter: s.ResetAfter,
		At: at, States: []State{s},
	}
}

// clampInstant returns instant in microseconds since 1970, no further out than a row can hold.
func clampInstant(instant time.Time) int64 {
	switch { // before UnixMicro, which is undefined for instants that microseconds cannot count
	case instant.Before(time.UnixMicro(bucket.MinInstant)):
		return bucket.MinInstant
	case instant.After(time.UnixMicro(bucket.MaxInstant)):
		return bucket.MaxInstant
	}
	return instant.UnixMicro()
}

// reading returns what the bucket held at a.now as a caller sees it.
func (b *ask) reading(a answer) Value {
	v := Value{Limit: b.limit, AsOf: time.UnixMicro(a.now), terms: b.terms, state: b.terms.FixClock(a.state, a.now)}
	if b.sharded() {
		v.rows = b.terms.FixClocks(a.rows, a.now)
	}
	v.Tokens = b.terms.Tokens(v.state, a.now)
	return v
}

// decide turns what the statement answered for each bucket into the decision on the call as asked.
func (p *plan) decide(answers []answer) Decision {
	if len(p.asked) == 1 {
		s := p.buckets[0].decide(answers[0])
		return s.alone(s.Value.AsOf)
	}
	states := make([]State, len(p.buckets))
	for i := range p.buckets {
		states[i] = p.buckets[i].decide(answers[i])
	}
	return p.decision(states, answers[0].now)
}

// decision turns the states of the buckets at now into the decision on the call as asked.
func (p *plan) decision(states []State, now int64) Decision {
	d := Decision{Allowed: true, At: time.UnixMicro(now), States: make([]State, len(p.asked))}
	for i := range states {
		d.add(states[i], i == 0)
	}
	for i, of := range p.asked {
		d.States[i] = states[of.bucket]
		d.States[i].Cost = of.cost
	}
	return d
}

// add folds one limit's state into the decision on all of them.
func (d *Decision) add(s State, isFirst bool) {
	d.Allowed = d.Allowed && s.Allowed
	d.RetryAfter = max(d.RetryAfter, s.RetryAfter)
	d.ResetAfter = max(d.ResetAfter, s.ResetAfter)
	if isFirst || s.Remaining < d.Remaining {
		d.Remaining = s.Remaining
	}
}

// decide returns what the answer means for one bucket.
func (b *ask) decide(a answer) State {
	value := b.reading(a)
	s := State{
		Limit:      b.limit,
		Cost:       b.cost,
		Allowed:    a.allowed,
		Remaining:  max(value.Tokens, 0),
		ResetAfter: value.wait(a.now, b.terms.Capacity, 0),
		Value:      value,
	}
	if !a.allowed {
		s.RetryAfter = value.wait(a.now, b.cost, b.lowest)
	}
	return s
}
