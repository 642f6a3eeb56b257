package ratelimit

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
	"github.com/pgratelimit/pgratelimit/internal/engine/store"
	"github.com/pgratelimit/pgratelimit/internal/words"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
)

// Decision is the answer to a call over one or several limits.
//
// If a limit has Shards, its Remaining, ResetAfter and Value are estimates, because a Take reads one row and assumes
// that the others hold as much. Limiter.Value adds up all rows.
type Decision struct {
	// Allowed reports whether every limit had enough tokens. If it is false, nothing was taken.
	Allowed bool
	// RetryAfter is 0 if the call was allowed. If it was refused, RetryAfter is the longest wait of the limits that
	// refused. After that time the same call will be allowed, if no other call takes tokens meanwhile. For slots it is an
	// upper bound, because their holders can release them before their leases end.
	RetryAfter time.Duration
	// Remaining is the number of tokens left after the decision in the limit that has the fewest. It is never below 0, and
	// it can be a fraction.
	Remaining float64
	// ResetAfter is the time until every limit of the call is full, if no more tokens are taken.
	ResetAfter time.Duration
	// At is the instant of the decision on the database's clock.
	At time.Time
	// States holds the answer of each limit, in the order of the requests.
	States []State
}

// State is the answer of one limit in a Decision.
type State struct {
	// Limit is the limit of the request, with the policy that decided.
	Limit Limit
	// Cost is the cost of the request in tokens.
	Cost float64
	// Allowed reports whether this limit had enough tokens. If another limit refused, nothing was taken from this one
	// either.
	Allowed bool
	// RetryAfter is the time until this limit allows the request; 0 if it allowed it.
	RetryAfter time.Duration
	// Remaining is the number of tokens left, never below 0.
	Remaining float64
	// ResetAfter is the time until the limit is full.
	ResetAfter time.Duration
	// Value is the bucket after the decision. Use it to compute the tokens at other instants. Its tokens are negative
	// while the bucket owes reserved tokens.
	Value Value
	// Rule is the name of the Config.Policies rule that decided, or empty if the definition in the code did.
	Rule string
	// Unit is the unit of a token that the rule sets, such as "requests". It is empty if the rule sets none.
	Unit string
	// Mode is the mode of the rule, or On without a rule. In Shadow, Allowed is the answer the limit would give: a refusal
	// takes nothing from this limit and does not refuse the Decision. In Off, the bucket is not read.
	Mode Mode
	// PausedUntil is the end of the pause that refused the request, and PauseReason the reason for the pause.
	PausedUntil time.Time
	PauseReason string
	// NotAsked reports whether the bucket wasn't read, because the limit is Off, another limit of the call is paused, or
	// the limit is in Shadow and can never give the cost. Value is then the zero Value.
	NotAsked bool
}

// Err returns nil if the decision is allowed, and otherwise a *LimitedError, which rolls back a transaction that
// returns it.
func (d Decision) Err() error {
	if d.Allowed {
		return nil
	}
	return &LimitedError{Decision: d}
}

// State returns the answer of the limit with this name (the first one, if several requests named it), and false if
// there is none.
func (d Decision) State(limit Limit) (State, bool) {
	i := slices.IndexFunc(d.States, func(s State) bool { return s.Limit.Name() == limit.Name() })
	if i < 0 {
		return State{}, false
	}
	return d.States[i], true
}

// LimitedError is a refusal as an error. errors.Is(err, ErrLimited) is true for it.
type LimitedError struct {
	Decision Decision
}

// Error returns a text with the names of the limits that refused and the wait. It contains no key.
func (e *LimitedError) Error() string {
	var names []string
	for _, s := range e.Decision.States {
		if !s.Allowed && s.Mode != Shadow {
			names = append(names, s.Limit.Name())
		}
	}
	return fmt.Sprintf("%v by %s: retry after %v", ErrLimited, strings.Join(names, ", "),
		words.Wait(e.Decision.RetryAfter))
}

// Is reports whether target is ErrLimited.
func (e *LimitedError) Is(target error) bool { return target == ErrLimited }

// single holds the state of the only bucket of a call, and the content of its Value, in one allocation.
type single struct {
	states [1]State
	held   [1]bucket.Snapshot
}

// room returns empty states of n buckets, and empty contents for their Values.
func room(n int) ([]State, []bucket.Snapshot) {
	if n == 1 {
		one := &single{}
		return one.states[:], one.held[:]
	}
	return make([]State, n), make([]bucket.Snapshot, n)
}

// decision returns the decision on a call for this one bucket, whose state is set.
func (one *single) decision(at time.Time) Decision {
	d := Decision{Allowed: true, At: at, States: one.states[:]}
	d.add(&one.states[0], true)
	return d
}

func (p *plan) decide(answers []bucket.Answer) Decision {
	states, holds := room(len(answers))
	now := p.now
	for i := range answers {
		p.setState(&states[i], i, &answers[i], &holds[i])
		now = answers[0].Now
	}
	return p.decision(states, now)
}

// decision returns the decision on the call from the states of its buckets at now.
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
		d.States[i].Cost = of.cost
		d.add(&d.States[i], i == 0)
	}
	return d
}

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

// setState sets s from the answer of the i-th bucket, and h to the content of the bucket.
func (p *plan) setState(s *State, i int, r *bucket.Answer, h *bucket.Snapshot) {
	of, a := &p.of[i], &p.asks[i]
	setState(s, of.holding(&a.Terms), a, r, h)
	of.tell(s, &a.Terms)
}

// stateOf returns the state of one bucket from its answer, and sets h to the content of the bucket.
func stateOf(limit Limit, a *bucket.Ask, r *bucket.Answer, h *bucket.Snapshot) (s State) {
	setState(&s, limit, a, r, h)
	return s
}

// setState sets s from the answer of one bucket, and h to the content of the bucket. Both must be empty. It writes them
// in place, because copying them would take most of its time.
func setState(s *State, limit Limit, a *bucket.Ask, r *bucket.Answer, h *bucket.Snapshot) {
	outcome := a.Tell(r, a.MinBalance, h)
	s.Mode = On
	s.set(limit, a, &outcome)
}

// set sets the fields of the state that an ask and the decision on it determine.
func (s *State) set(limit Limit, a *bucket.Ask, outcome *bucket.Outcome) {
	s.Limit, s.Cost, s.Allowed = limit, a.Cost, outcome.Allowed
	s.RetryAfter, s.Remaining, s.ResetAfter = outcome.RetryAfter, max(outcome.Tokens, 0), outcome.FullAfter
	s.Value = Value{Limit: limit, Tokens: outcome.Tokens, AsOf: time.UnixMicro(outcome.Now), held: outcome.Snapshot}
}

// tell sets the rule, unit and mode of state. The revision of t supplies the rule and the unit. A nil t means the
// revision at which the request was resolved.
func (s *subject) tell(state *State, t *bucket.Terms) {
	if s.shards > 1 && state.Value.held != nil {
		s.widen(state)
	}
	state.Mode = s.mode
	if s.rule == nil {
		return
	}
	if t == nil {
		resolved := s.limit.terms()
		t = &resolved
	}
	e := s.revisionOf(t)
	state.Rule, state.Unit = e.name, e.unit
}

// holding returns the limit with the policy of t. The revision of t can differ from the one at which the request was
// resolved.
func (s *subject) holding(t *bucket.Terms) Limit {
	if s.rule == nil {
		return s.limit
	}
	return s.revisionOf(t).limit
}

const (
	retryBase = 5 * time.Millisecond   // the first pause is up to this long
	retryCap  = 200 * time.Millisecond // no pause is longer than this
)

// again says whether and when to run an attempt again.
type again int

const (
	never again = iota
	afterPause
	atOnce
)

// whenAgain returns when to run a statement again that failed with err.
func whenAgain(err error) again {
	if store.IsRetryable(err) && !errors.Is(err, ErrContended) { // which says that a batch has tried often enough
		return afterPause
	}
	return never
}

// retry runs attempt again after it failed with err, until it returns never, the attempts are used up, or ctx ends. The
// pause before the n-th retry is random, from 0 to min(retryCap, retryBase * 2^(n-1)), not counting retries at once.
// This is full jitter: https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/.
func retry(ctx context.Context, l *Limiter, verb string, when again, err error, attempt func() (again, error)) error {
	ceiling := retryBase
	for n := 1; when != never; n++ {
		if store.IsRetryable(err) { // otherwise the connection was lost
			l.reports.tell(ctx, event.Conflicted{Verb: verb, Attempt: n, Err: err})
		}
		switch {
		case ctx.Err() != nil:
			return prefixed(fmt.Errorf("gave up after %d attempts: %w (last: %w)", n, ctx.Err(), err))
		case n >= l.config.MaxAttempts && !store.IsRetryable(err):
			return err
		case n >= l.config.MaxAttempts:
			return prefixed(fmt.Errorf("%w: gave up after %d attempts: %w", ErrContended, n, err))
		}
		if when == afterPause {
			if !pause(ctx, rand.N(ceiling)) {
				return prefixed(fmt.Errorf("gave up after %d attempts: %w (last: %w)", n, ctx.Err(), err))
			}
			ceiling = min(2*ceiling, retryCap)
		}
		when, err = attempt()
	}
	return err
}

// pause waits for d. It returns false if ctx ends first.
func pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// Jitter returns a random duration from 0 up to, but not including, span, or 0 if span isn't above 0. Add it to a
// RetryAfter or ReadyAt that many callers share, so that they don't all return at once. Don't subtract it, because a
// caller that returns early is refused.
func Jitter(span time.Duration) time.Duration {
	if span <= 0 {
		return 0
	}
	return rand.N(span)
}

// JitterFor is a Jitter that is partly fixed: identity determines share of the span, from 0 to 1, and chance the rest.
// So each client returns at its own place among the others, at every call and from every process.
//
//	offset = span * (share * place(identity) + (1 - share) * chance)        place, chance in [0, 1)
//
// A share above 1 counts as 1, and one below 0, or not a number, as 0.
func JitterFor(identity string, span time.Duration, share float64) time.Duration {
	if span <= 0 {
		return 0
	}
	if !(share > 0) {
		return Jitter(span)
	}
	fixed := min(time.Duration(float64(span)*min(share, 1)), span)
	own := min(time.Duration(place(identity)*float64(fixed)), max(fixed-1, 0)) // rounding may reach fixed
	return own + Jitter(span-fixed)
}

// place returns a number in [0, 1) that depends only on identity.
func place(identity string) float64 {
	sum := sha256.Sum256([]byte(identity))
	return float64(binary.BigEndian.Uint64(sum[:8])>>11) / (1 << 53)
}
