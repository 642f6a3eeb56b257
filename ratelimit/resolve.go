package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
)

// subject is the resolved limit of a request: its current policy, and the rule that supplied it.
type subject struct {
	limit Limit
	rule  *Ruling // nil: the definition in the code
	plan  string
	mode  Mode

	pausedUntil int64 // the end of the pause by the rule; bucket.MinInstant: no pause

	released bool // whether its ask was released
	plain    bool // whether its definition is plain

	shards   int     // how many rows the bucket has
	row      int     // the picked one
	together bool    // whether all of them are asked, each for the same part
	tokens   float64 // of all of them, once they have answered
}

// StoredKey returns the stored form of the key of a request: an HMAC if Config.HashKey is set, and "" for
// [Limit.Global]. Overrides and pauses of a key use this form. It returns the errors that a call returns for an invalid
// key.
func (l *Limiter) StoredKey(r Request) (string, error) { return storedKey(l.config.HashKey, &r) }

// Resolve returns the limit of the request with its current policy, to show it, or to check a cost against its
// capacity. It asks Config.Policies, but not the database: it estimates its clock. For an invalid key it returns the
// limit of the request.
func (l *Limiter) Resolve(r Request) Limit {
	if _, err := l.StoredKey(r); err != nil {
		return r.limit
	}
	return resolve(l, &r).limit
}

// Mode returns the mode in which the request is decided, as Resolve returns its limit. It is On while the limit is
// paused. For an invalid key it is the mode of keys without an override.
func (l *Limiter) Mode(r Request) Mode { return resolve(l, &r).mode }

// resolve returns the subject of a request by the clock of this process. Its mode is On while it is paused.
func resolve(l *Limiter, r *Request) subject {
	key, _ := storedKey(l.config.HashKey, r)
	var now int64
	s, _ := subjectOf(context.Background(), l, "resolve", r, key, &now)
	if s.mode == "" || s.pausedUntil > now { // the zero Limit, or a pause
		s.mode = On
	}
	return s
}

// HasPolicies reports whether Config.Policies is set, so that a rule can replace a definition in the code.
func (l *Limiter) HasPolicies() bool { return l != nil && l.config.Policies != nil }

// subjectOf returns the subject of a request, and the definition of its limit. It sets now to an estimate of the
// database's clock if the rule needs it.
func subjectOf(ctx context.Context, l *Limiter, verb string, r *Request, key string, now *int64) (subject, definition) {
	if r.limit == (Limit{}) {
		return subject{pausedUntil: bucket.MinInstant}, definition{}
	}
	d := r.limit.made.Value()
	if other := l.policies.note(d.name, r.limit); other != nil {
		l.reports.policyConflict(ctx, *other, r.limit)
	}
	rule := ruleFor(ctx, l, verb, r.limit, r.plan, key)
	if rule == nil {
		return subject{limit: r.limit, plan: r.plan, mode: On, pausedUntil: bucket.MinInstant, shards: d.shards}, d
	}
	if *now == 0 && rule.needsNow() {
		*now = l.config.estimate()
	}
	e := rule.holding(*now)
	d = e.limit.definition()
	return subject{
		limit: e.limit, rule: rule, plan: r.plan, mode: e.mode, pausedUntil: rule.pausedUntil,
		shards: d.shards,
	}, d
}

// ruleFor returns the rule of Config.Policies, or nil. It reports a source that fails to the Observer.
func ruleFor(ctx context.Context, l *Limiter, verb string, limit Limit, plan, key string) (rule *Ruling) {
	if l.config.Policies == nil {
		return nil
	}
	defer func() {
		if p := recover(); p != nil {
			rule = nil
			badSource(ctx, l, verb, limit, fmt.Errorf("it panicked: %v", p))
		}
	}()
	rule = l.config.Policies.RulingFor(limit, plan, key)
	if rule != nil && rule.limit != limit.Name() {
		badSource(ctx, l, verb, limit, fmt.Errorf("it returned a rule for %q", rule.limit))
		return nil
	}
	return rule
}

// badSource reports to the Observer that Config.Policies failed, so that the definition in the code decides.
func badSource(ctx context.Context, l *Limiter, verb string, limit Limit, err error) {
	err = fmt.Errorf("ratelimit: Config.Policies, asked for %q: %w", limit.Name(), err)
	l.reports.failed(ctx, event.Failed{Verb: verb, Limit: limit.Name(), Err: err}, l.reports.began())
}

// estimate returns an estimate of the database's clock in microseconds since 1970: AsOf, or this process's clock, as
// far ahead as Policies knows.
func (c *Config) estimate() int64 {
	if now := c.asOf(); now != nil {
		return *now
	}
	now := time.Now()
	if p, knows := c.Policies.(interface{ Ahead() time.Duration }); knows {
		now = now.Add(p.Ahead())
	}
	return now.UnixMicro()
}

func (r *Ruling) needsNow() bool {
	return r.pausedUntil > bucket.MinInstant || len(r.revisions) > 1
}

func (r *Ruling) holding(now int64) *revision {
	i := len(r.revisions) - 1
	for i > 0 && r.revisions[i].from > now {
		i--
	}
	return &r.revisions[i]
}

// isRuledAs reports whether another request for the same bucket is under the same rule, or under an older version of
// it.
func (s *subject) isRuledAs(o *subject) bool {
	return s.rule != nil && o.rule != nil && s.plan == o.plan
}

// revisionOf returns the revision of the terms t. It can differ from the revision at which the request was resolved.
func (s *subject) revisionOf(t *bucket.Terms) *revision { return &s.rule.revisions[t.Revision] }

// madeElsewhere is the policy of a limit of which only the terms of its rows are known.
type madeElsewhere struct {
	terms bucket.Terms
	rows  int
}

func (madeElsewhere) String() string                   { return "defined elsewhere" }
func (p madeElsewhere) compile() (bucket.Terms, error) { return p.terms, nil }
func (p madeElsewhere) shards() int                    { return p.rows }
func (madeElsewhere) text() policyText                 { return nil }
func (p madeElsewhere) scaled(float64) Policy          { return p } // an override has scaled the terms before

const (
	maxNames    = 10_000 // the maximum number of names whose policies a Limiter remembers
	maxPolicies = 16     // the maximum number of policies of a name
)

// policies remembers the policies that a Limiter used with each name. So a call that names a limit only by its name,
// such as a call on a reservation, is decided under the current policy. Noting the same policy again costs a map lookup
// and a comparison.
type policies struct {
	names sync.Map // *usage by name
	count atomic.Int64
}

type usage struct {
	last atomic.Pointer[Limit]              // the latest policy
	seen [maxPolicies]atomic.Pointer[Limit] // distinct policies; a new one replaces the oldest

	mu   sync.Mutex
	next int // the place of the next policy in seen
}

// note records that a Limiter used limit. If this is the second policy of the name, it returns the first one, once.
func (p *policies) note(name string, limit Limit) (other *Limit) {
	if p == nil {
		return nil
	}
	found, ok := p.names.Load(name)
	if !ok {
		if p.count.Load() >= maxNames {
			return nil
		}
		var loaded bool
		if found, loaded = p.names.LoadOrStore(name, &usage{}); !loaded {
			p.count.Add(1)
		}
	}
	return found.(*usage).note(limit)
}

func (p *policies) isEmpty() bool { return p == nil || p.count.Load() == 0 }

func (p *policies) of(name string) *usage {
	if p == nil {
		return nil
	}
	found, _ := p.names.Load(name)
	u, _ := found.(*usage)
	return u
}

// last returns the limit called name as it was last used, or nil.
func (p *policies) last(name string) *Limit {
	if u := p.of(name); u != nil {
		return u.last.Load() // nil: another goroutine is noting it
	}
	return nil
}

// seen returns the distinct terms that the limit called name was used with.
func (p *policies) seen(name string) (seen []bucket.Terms) {
	u := p.of(name)
	if u == nil {
		return nil
	}
	for i := range u.seen {
		if l := u.seen[i].Load(); l != nil {
			seen = append(seen, l.terms())
		}
	}
	return seen
}

func (u *usage) note(limit Limit) (other *Limit) {
	if last := u.last.Load(); last != nil && (*last == limit || last.isAs(limit)) {
		return nil
	}
	if known := u.find(limit); known != nil {
		u.last.Store(known)
		return nil
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	known := u.find(limit) // another goroutine may have added it
	if known == nil {
		added := limit
		known = &added
		u.seen[u.next%maxPolicies].Store(known)
		u.next++
		if u.next == 2 {
			other = u.seen[0].Load()
		}
	}
	u.last.Store(known)
	return other
}

// find returns the limit in seen that decides as limit does, or nil.
func (u *usage) find(limit Limit) *Limit {
	for i := range u.seen {
		if known := u.seen[i].Load(); known != nil && known.isAs(limit) {
			return known
		}
	}
	return nil
}

// pause answers all requests of a call from memory if one of them is paused and the call decides, or reserves and may
// not wait so long. It sets the instant before which a reservation is not ready.
func (p *plan) pause(decides bool) {
	for i := range p.asks {
		decides = decides || p.isBarred(i)
	}
	for i := range p.asked {
		at := p.asked[i].ask
		s := &p.of[at]
		if s.pausedUntil > p.now {
			p.notBefore = max(p.notBefore, s.pausedUntil)
		}
		if !decides {
			continue
		}
		answer := State{Limit: s.limit, Allowed: true, NotAsked: true}
		s.tell(&answer, nil)
		if until := s.pausedUntil; p.isBarred(at) {
			wait := time.Duration(min(until-p.now, bucket.Horizon))*time.Microsecond - p.asks[at].MaxWait
			answer.Allowed, answer.Mode, answer.RetryAfter, answer.ResetAfter = false, On, wait, wait
			answer.PausedUntil, answer.PauseReason = time.UnixMicro(until), s.rule.config.PauseReason
		}
		p.asked[i].ask, p.asked[i].known = -1, &answer
	}
	if decides {
		p.asks, p.of = nil, nil
	}
}

// isBarred reports whether the pause of a bucket refuses the call. A reservation waits for the end of the pause if it
// may.
func (p *plan) isBarred(i int) bool {
	until, within := p.of[i].pausedUntil, p.asks[i].MaxWait.Microseconds()
	return until > max(p.now, 0) && (!p.reserves || within > 0 && until-p.now > within)
}

// leaveOut removes limits that are off from the call.
func (p *plan) leaveOut() {
	for i := range p.of {
		s := &p.of[i]
		if s.mode == Off {
			answer := State{Limit: s.limit, Allowed: true, Remaining: s.limit.Capacity(), NotAsked: true}
			s.tell(&answer, nil)
			p.release(i, answer)
		}
	}
}

// release removes ask i from the call and records its answer. The plan of a reservation keeps the ask without a cost,
// so that its cost can be settled.
func (p *plan) release(i int, answer State) {
	for j := range p.asked {
		if p.asked[j].ask == i {
			p.asked[j].ask, p.asked[j].known = -1, &answer
		}
	}
	a := &p.asks[i]
	a.Cost, a.MinBalance, a.AllowDebt, a.MaxWait = 0, -math.MaxFloat64, false, 0
	a.Unenforced, p.of[i].released = true, true
}

// drop deletes released asks, unless the call reserves.
func (p *plan) drop() {
	released := false
	for i := range p.of {
		released = released || p.of[i].released
	}
	if p.reserves || !released {
		return
	}
	place, n := make([]int, len(p.asks)), 0
	for i := range p.asks {
		place[i] = n
		if !p.of[i].released {
			p.asks[n], p.of[n] = p.asks[i], p.of[i]
			n++
		}
	}
	p.asks, p.of = p.asks[:n], p.of[:n]
	p.move(place)
}

// refusedInShadow returns the buckets that refused, or nil if a bucket of an enforced limit did. The call is run again
// without them.
func (p *plan) refusedInShadow(answers []bucket.Answer) (refused []int) {
	for i := range answers {
		if answers[i].Allowed {
			continue
		}
		if p.of[i].mode != Shadow {
			return nil
		}
		refused = append(refused, i)
	}
	return refused
}

// leaveShadowsOut runs a call again without the buckets that refused in shadow, until none does or an enforced limit
// refuses. It uses a new call, because a batch may still use the first one.
func (c *call) leaveShadowsOut(run func(again *call) error) error {
	for !c.Look {
		refused := c.plan.refusedInShadow(c.Answers)
		if refused == nil {
			return nil
		}
		again := &call{plan: c.plan.withoutShadows(refused, c.Answers)}
		again.Question, again.Asks = c.Question, again.plan.asks
		again.Look = again.plan.costless && !again.plan.reserves
		err := run(again)
		if err == nil || errors.Is(err, ErrCommitUnknown) { // otherwise a batch that the call has left may still write to it
			c.plan, c.Question, c.Outcome = again.plan, again.Question, again.Outcome
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (p *plan) withoutShadows(refused []int, answers []bucket.Answer) plan {
	left := *p
	left.asks, left.of, left.asked = slices.Clone(p.asks), slices.Clone(p.of), slices.Clone(p.asked)
	left.now = answers[0].Now
	for _, i := range refused {
		var state State
		p.setState(&state, i, &answers[i], &bucket.Snapshot{})
		left.release(i, state)
	}
	left.drop()
	left.costless = bucket.AllCostless(left.asks)
	return left
}
