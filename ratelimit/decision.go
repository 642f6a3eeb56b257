package ratelimit

import (
	"fmt"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/words"
)

// Decision is the answer to a call over one or several limits.
//
// If a limit with Shards had enough, Remaining, ResetAfter and Value are estimates: a call reads only the row that it takes
// from, and counts the other rows as if they held as much. A limit that refused was asked as a whole, so its refusal,
// Remaining and RetryAfter are exact. Check and Limiter.Value are exact, too.
type Decision struct {
	// Allowed is whether every limit had what was asked of it. When it is false nothing was taken.
	Allowed bool
	// RetryAfter is 0 when allowed. When refused it is the wait after which the same call would be allowed
	// if nobody else took anything meanwhile: the longest wait among the limits that refused. For slots it is an upper
	// bound: the wait until enough leases have ended, where their holders give none of them back earlier.
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
	// Limit is the limit asked, with the policy that decided.
	Limit Limit
	// Cost is what the request asked of it.
	Cost float64
	// Price is what a token costs: 1, or more of an [Adaptive] limit whose upstream has throttled. Cost times Price is
	// what is taken, where the policy has Apply; else it only would be.
	Price float64
	// Charged is the price that was charged, for [Request.Price] of a Refund: Cost times Charged is what was taken. It is 1 where the
	// policy has no Apply, or is not Adaptive, and below Price where a window of a calendar is not longer than that; 0 where
	// NotAsked. Of several requests for one bucket it is that of all of them together.
	Charged float64
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
	// Rule is the name of the rule of Config.Policies that has the policy; empty: the policy is that of the code.
	Rule string
	// Unit is what the rule says that a token is, such as "requests". It is empty where it says nothing.
	Unit string
	// Mode is On, or that of the rule. Where it is Shadow, Allowed is what would be decided: a refusal does not make that
	// of the Decision false, and has taken nothing from this limit. Where it is Off, the limit was not asked.
	Mode Mode
	// PausedUntil is when the pause ends that has refused the request, and PauseReason why there is one.
	PausedUntil time.Time
	PauseReason string
	// Borrowed is whether the tokens came from the pool of a [Borrow], because the bucket had too few. Nothing was taken from
	// it then. It is told in the first of the two states that such a request has.
	Borrowed bool
	// Prefetched is whether the tokens are of those that this process took ahead; see TokenBucket.Prefetch. Remaining,
	// ResetAfter and Value are then estimates: what it keeps, and what the row held when it last asked, with what has
	// arrived since. What others have taken meanwhile is not known.
	Prefetched bool
	// NotAsked is whether the bucket was left alone, because the limit is Off, or because one that the call asks for is
	// paused. Value is the zero Value then.
	NotAsked bool
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
		if !s.Allowed && s.Mode != Shadow {
			names = append(names, s.Limit.Name())
		}
	}
	return fmt.Sprintf("%v by %s: retry after %v", ErrLimited, strings.Join(names, ", "), words.Wait(e.Decision.RetryAfter))
}

// Is reports whether target is ErrLimited.
func (e *LimitedError) Is(target error) bool { return target == ErrLimited }

// single is the state of a bucket that was asked for alone, and what that holds: one allocation.
type single struct {
	states [1]State
	held   [1]bucket.Content
}

// room returns room for the states of n buckets, and for what these hold.
func room(n int) ([]State, []bucket.Content) {
	if n == 1 {
		one := &single{}
		return one.states[:], one.held[:]
	}
	return make([]State, n), make([]bucket.Content, n)
}

// decision returns the decision on a call that asks for this bucket alone, whose state is set.
func (one *single) decision(at time.Time) Decision {
	d := Decision{Allowed: true, At: at, States: one.states[:]}
	d.add(&one.states[0], true)
	return d
}

// decide turns what was answered for each bucket into the decision on the call as asked.
func (p *plan) decide(answers []bucket.Answer) Decision {
	states, holds := room(len(answers))
	now := p.now
	for i := range answers {
		p.setState(&states[i], i, &answers[i], &holds[i])
		now = answers[0].Now
	}
	if p.borrows {
		for i, wait := range bucket.BorrowWaits(p.asks, answers) {
			if wait > 0 {
				states[i].RetryAfter = wait
			}
		}
	}
	d := p.decision(states, now)
	if len(answers) > 1 && !d.Allowed && p.asks[0].Within > 0 {
		d.RetryAfter = max(d.RetryAfter, bucket.SoonEnoughTogether(p.asks, answers))
	}
	return d
}

// decision turns the states of the buckets at now into the decision on the call as asked.
func (p *plan) decision(states []State, now int64) Decision {
	d := Decision{Allowed: true, At: time.UnixMicro(now), States: states}
	if len(p.asked) > 1 || p.asked[0].known != nil {
		d.States = make([]State, len(p.asked))
	}
	for i, of := range p.asked {
		switch {
		case of.known != nil:
			d.States[i] = *of.known
		case len(p.asked) > 1:
			d.States[i] = states[of.ask]
		}
		d.States[i].Cost = of.cost * p.units()
		d.add(&d.States[i], i == 0)
	}
	return d
}

// add folds one limit's state into the decision on all of them.
func (d *Decision) add(s *State, isFirst bool) {
	if isFirst || s.Remaining < d.Remaining {
		d.Remaining = s.Remaining
	}
	d.ResetAfter = max(d.ResetAfter, s.ResetAfter)
	if s.Mode != Shadow {
		d.Allowed = d.Allowed && s.Allowed
		d.RetryAfter = max(d.RetryAfter, s.RetryAfter)
	}
}

// setState sets s to what the answer means for the i-th bucket. What the bucket holds is put into h.
func (p *plan) setState(s *State, i int, r *bucket.Answer, h *bucket.Content) {
	of, a := &p.of[i], &p.asks[i]
	if p.taken > 1 {
		several := *a
		several.Cost *= p.units()
		a = &several
	}
	setState(s, of.holding(&a.Terms), a, r, h)
	of.tell(s, &a.Terms)
}

// units returns how many units of its requests the call took, and 1 of one that took none.
func (p *plan) units() float64 { return float64(max(p.taken, 1)) }

// stateOf returns what the answer means for one bucket. What it holds is put into h.
func stateOf(limit Limit, a *bucket.Ask, r *bucket.Answer, h *bucket.Content) (s State) {
	setState(&s, limit, a, r, h)
	return s
}

// setState sets s, which is empty, to what the answer means for one bucket. What that holds is put into h, which is empty,
// too. Both are written where they stay: to copy them would be most of what this takes.
func setState(s *State, limit Limit, a *bucket.Ask, r *bucket.Answer, h *bucket.Content) {
	o := a.Terms.Outlook(r, a.Cost, a.Lowest)
	if a.Within > 0 && !r.Allowed {
		o.RetryAfter = a.SoonEnoughAfter(r)
	}
	h.Terms, h.State, h.Rows = a.Terms, o.State, o.Rows
	s.Mode, s.Price, s.Borrowed = On, 1, r.Borrowed
	s.set(limit, a, &bucket.Told{Content: h, Now: r.Now, Allowed: r.Allowed, Tokens: o.Tokens, RetryAfter: o.RetryAfter, FullAfter: o.FullAfter})
}

// set sets what the state says of an ask, by the decision on it.
func (s *State) set(limit Limit, a *bucket.Ask, told *bucket.Told) {
	s.Limit, s.Cost, s.Charged, s.Allowed = limit, a.Cost, min(a.Price(), maxPrice), told.Allowed
	s.RetryAfter, s.Remaining, s.ResetAfter = told.RetryAfter, max(told.Tokens, 0), told.FullAfter
	s.Value = Value{Limit: limit, Tokens: told.Tokens, AsOf: time.UnixMicro(told.Now), held: told.Content}
}

// tell tells the state which rule has decided, by the terms that have; nil: by those that the request was resolved to.
func (s *subject) tell(state *State, t *bucket.Terms) {
	state.Mode, state.Price = s.mode, max(s.price, 1)
	if s.rule == nil {
		return
	}
	if t == nil {
		resolved := s.limit.terms()
		t = &resolved
	}
	e := s.eraOf(t)
	state.Rule, state.Unit = e.name, e.unit
}

// holding returns the limit with the policy of the terms, which may be those of another era by now.
func (s *subject) holding(t *bucket.Terms) Limit {
	if s.rule == nil {
		return s.limit
	}
	return s.eraOf(t).limit
}
