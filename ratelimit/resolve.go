package ratelimit

import (
	"context"
	"fmt"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/store"
)

// subject is what a request is about: the limit with the policy that decides, and the rule that this comes from.
type subject struct {
	limit Limit
	rule  *Rule // nil: the definition in the code
	plan  string
	mode  Mode

	released bool // whether its bucket is asked for nothing
}

// StoredKey returns the form in which the key of a request is stored: an HMAC where Config.HashKey is set, and "" of
// [Limit.Global]. Overrides and pauses of a key name it so. It returns ErrInvalidKey as a call would.
func (l *Limiter) StoredKey(r Request) (string, error) { return storedKey(l.config.HashKey, &r) }

// Resolve returns the limit of the request with the policy that a call would now be decided under: to show it, or to
// check a cost against its capacity. It asks Config.Policies, and not the database, whose clock it takes to be that of
// this process.
func (l *Limiter) Resolve(r Request) Limit {
	key, err := storedKey(l.config.HashKey, &r)
	if err != nil {
		return r.limit
	}
	var now int64
	return l.subjectOf(context.Background(), "resolve", &r, key, &now).limit
}

// HasPolicies reports whether the Limiter has Config.Policies, so that a definition in the code may not be what decides.
func (l *Limiter) HasPolicies() bool { return l != nil && l.config.Policies != nil }

// subjectOf returns what the request is about. It sets now to about what time it is for the database where that matters.
func (l *Limiter) subjectOf(ctx context.Context, verb string, r *Request, key string, now *int64) subject {
	if r.limit.policy == nil {
		return subject{limit: r.limit}
	}
	l.policies.note(r.limit.name, &r.limit.terms)
	rule := l.ruleFor(ctx, verb, r.limit, r.plan, key)
	if rule == nil {
		return subject{limit: r.limit, plan: r.plan, mode: On}
	}
	if *now == 0 && rule.needsNow() {
		*now = l.config.estimate()
	}
	e := rule.holding(*now)
	return subject{limit: e.limit, rule: rule, plan: r.plan, mode: e.mode}
}

// ruleFor returns the rule that Config.Policies has, or nil. The Observer hears of a source that fails.
func (l *Limiter) ruleFor(ctx context.Context, verb string, limit Limit, plan, key string) (rule *Rule) {
	if l.config.Policies == nil {
		return nil
	}
	defer func() {
		if p := recover(); p != nil {
			rule = nil
			l.badSource(ctx, verb, limit, fmt.Errorf("it panicked: %v", p))
		}
	}()
	rule = l.config.Policies.RuleFor(limit, plan, key)
	if rule != nil && rule.limit != limit.name {
		l.badSource(ctx, verb, limit, fmt.Errorf("it returned a rule for %q", rule.limit))
		return nil
	}
	return rule
}

// badSource tells the Observer that the definition in the code decides, because Config.Policies failed.
func (l *Limiter) badSource(ctx context.Context, verb string, limit Limit, err error) {
	l.reports.failed(ctx, Failed{Verb: verb, Limit: limit.name, Err: fmt.Errorf("ratelimit: Config.Policies, asked for %q: %w", limit.name, err)}, l.reports.began())
}

// estimate returns about what time it is for the database, in microseconds since 1970.
func (c *Config) estimate() int64 {
	if now := c.asOf(); now != nil {
		return *now
	}
	return time.Now().UnixMicro()
}

// needsNow reports whether what the rule says may depend on the time.
func (r *Rule) needsNow() bool {
	return r.pausedUntil > bucket.MinInstant || int(r.begun.Load())+1 < len(r.eras)
}

// holding returns the era that holds at about now, unless none has begun since the latest that is known to have.
func (r *Rule) holding(now int64) *era {
	last := r.begun.Load()
	at := last
	for int(at)+1 < len(r.eras) && r.eras[at+1].from <= now {
		at++
	}
	if at != last {
		r.begun.CompareAndSwap(last, at)
	}
	return &r.eras[at]
}

// isPaused reports whether the rule lets nothing through at an instant.
func (s *subject) isPaused(now int64) bool { return s.rule != nil && s.rule.pausedUntil > now }

// isRuledAs reports whether another request for the same bucket is under the same rule, or was before a newer one came.
func (s *subject) isRuledAs(o *subject) bool {
	return s.rule != nil && o.rule != nil && s.plan == o.plan
}

// eraOf returns the era of the rule that the terms are of, which may be another by now than the one that the request was
// resolved in.
func (s *subject) eraOf(t bucket.Terms) *era {
	if t.Eras == nil { // there is one
		return &s.rule.eras[0]
	}
	return &s.rule.eras[t.Era]
}

// tell tells the state which rule has decided, by its terms.
func (s *subject) tell(state *State, t bucket.Terms) {
	state.Mode = s.mode
	if s.rule != nil {
		e := s.eraOf(t)
		state.Rule, state.Unit = e.name, e.unit
	}
}

// holding returns the limit with the policy of the terms, which may be those of another era by now.
func (s *subject) holding(t bucket.Terms) *Limit {
	if s.rule == nil {
		return &s.limit
	}
	return &s.eraOf(t).limit
}

// termsNow returns the terms that the limits of r have now, and the end of the latest of their pauses. Limits that this
// Limiter was not used with have those that r was made under, unless there is a rule.
func (l *Limiter) termsNow(ctx context.Context, verb string, r *store.Reservation) (now []bucket.Terms, pausedUntil int64) {
	now = make([]bucket.Terms, len(r.Names))
	for i, name := range r.Names {
		limit := Limit{name: name, policy: madeElsewhere{}, terms: r.TermsMade(i)}
		if last, known := l.policies.last(name); known {
			limit.terms = last
		}
		if rule := l.ruleFor(ctx, verb, limit, r.Plan(i), r.Keys[i]); rule != nil {
			limit = rule.holding(l.config.estimate()).limit
			pausedUntil = max(pausedUntil, rule.pausedUntil)
		}
		now[i] = limit.termsFor(r.Keys[i])
	}
	return now, pausedUntil
}

// madeElsewhere is the policy of a limit of which only the terms are known.
type madeElsewhere struct{}

func (madeElsewhere) String() string                 { return "defined elsewhere" }
func (madeElsewhere) compile() (bucket.Terms, error) { return bucket.Terms{}, ErrInvalidLimit }
