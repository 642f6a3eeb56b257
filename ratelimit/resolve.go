package ratelimit

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// subject is what a request is about: the limit with the policy that decides, and the rule that this comes from.
type subject struct {
	limit Limit
	rule  *Rule // nil: the definition in the code
	plan  string
	mode  Mode

	price       float64 // of an adaptive limit; 0: there is none
	factor      float64 // what the cost is multiplied by; 0: nothing
	pausedUntil int64   // the end of the pause by the rule or by the upstream; bucket.MinInstant: there is none

	released bool // whether its bucket is asked for nothing
	direct   bool // whether a request asks it for itself
	lends    bool // whether it is the pool of a Borrow
	spared   bool // whether it is in shadow because its pool is
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
	s, _ := subjectOf(context.Background(), l, "resolve", &r, key, &now)
	return s.limit
}

// HasPolicies reports whether the Limiter has Config.Policies, so that a definition in the code may not be what decides.
func (l *Limiter) HasPolicies() bool { return l != nil && l.config.Policies != nil }

// subjectOf returns what the request is about, and what its limit is. It sets now to about what time it is for the database
// where that matters.
func subjectOf(ctx context.Context, l *Limiter, verb string, r *Request, key string, now *int64) (subject, definition) {
	if r.limit == (Limit{}) {
		return subject{pausedUntil: bucket.MinInstant}, definition{}
	}
	d := r.limit.made.Value()
	if other := l.policies.note(d.name, r.limit); other != nil {
		l.reports.redefined(ctx, *other, r.limit)
	}
	rule := ruleFor(ctx, l, verb, r.limit, r.plan, key)
	if rule == nil {
		return subject{limit: r.limit, plan: r.plan, mode: On, pausedUntil: bucket.MinInstant}, d
	}
	if *now == 0 && rule.needsNow() {
		*now = l.config.estimate()
	}
	e := rule.holding(*now)
	return subject{limit: e.limit, rule: rule, plan: r.plan, mode: e.mode, pausedUntil: rule.pausedUntil}, e.limit.definition()
}

// ruleFor returns the rule that Config.Policies has, or nil. The Observer hears of a source that fails.
func ruleFor(ctx context.Context, l *Limiter, verb string, limit Limit, plan, key string) (rule *Rule) {
	if l.config.Policies == nil {
		return nil
	}
	defer func() {
		if p := recover(); p != nil {
			rule = nil
			badSource(ctx, l, verb, limit, fmt.Errorf("it panicked: %v", p))
		}
	}()
	rule = l.config.Policies.RuleFor(limit, plan, key)
	if rule != nil && rule.limit != limit.Name() {
		badSource(ctx, l, verb, limit, fmt.Errorf("it returned a rule for %q", rule.limit))
		return nil
	}
	return rule
}

// badSource tells the Observer that the definition in the code decides, because Config.Policies failed.
func badSource(ctx context.Context, l *Limiter, verb string, limit Limit, err error) {
	l.reports.failed(ctx, Failed{Verb: verb, Limit: limit.Name(), Err: fmt.Errorf("ratelimit: Config.Policies, asked for %q: %w", limit.Name(), err)}, l.reports.began())
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
	return r.pausedUntil > bucket.MinInstant || len(r.eras) > 1
}

// holding returns the era in effect at now.
func (r *Rule) holding(now int64) *era {
	i := len(r.eras) - 1
	for i > 0 && r.eras[i].from > now {
		i--
	}
	return &r.eras[i]
}

// clockSkew is how far the clocks of this process and the database may differ while a rule that is off follows the database's clock.
const clockSkew = time.Minute

// isOffAround reports whether the rule is off at now, and at the instants that differ from it by clockSkew.
func (r *Rule) isOffAround(now int64) bool {
	skew := clockSkew.Microseconds()
	return r.holding(now-skew).mode == Off && r.holding(now).mode == Off && r.holding(now+skew).mode == Off
}

// askTime returns the time of the database. It looks at the first bucket that the plan was made for.
func askTime(ctx context.Context, l *Limiter, p *plan, verb string) (int64, error) {
	look := &call{plan: plan{asked: []asked{{}}, keyed: p.keyed}}
	look.Verb, look.Look = verb, true
	look.Asks = []bucket.Ask{{
		Key: bucket.Key{Name: p.firstLimit(), Key: p.asked[0].key}, Terms: bucket.Terms{Capacity: 1, Rate: 1, Step: 1, Steps: 1},
	}}
	look.plan.asks = look.Asks
	if err := look.run(ctx, l); err != nil {
		return 0, err
	}
	return look.Answers[0].Now, nil
}

// arrangeAgain returns a plan for an instant at which the terms of all asks of the call are in effect, because a rule is in another mode by
// the database's clock than by the clock of this process. The call is then decided in these modes, also if a rule changes meanwhile.
func (c *call) arrangeAgain(ctx context.Context, l *Limiter) (plan, error) {
	verb, now := c.Verb, l.config.estimate()
	if c.plan.reserves {
		verb = verbReserve // also of CheckReserve
	}
	for i := range c.Asks {
		since, until := c.Asks[i].Terms.Span()
		now = min(max(now, since), until-1)
	}
	arranged := plan{now: now}
	if err := arranged.arrange(ctx, l, verb, c.requests); err != nil {
		return plan{}, err
	}
	for i := range arranged.asks {
		arranged.asks[i].Within, arranged.asks[i].Mode = c.Asks[0].Within, 0
	}
	return arranged, nil
}

// isRuledAs reports whether another request for the same bucket is under the same rule, or was before a newer one came.
func (s *subject) isRuledAs(o *subject) bool {
	return s.rule != nil && o.rule != nil && s.plan == o.plan
}

// eraOf returns the era of the rule that the terms are of, which may be another by now than the one that the request was
// resolved in.
func (s *subject) eraOf(t *bucket.Terms) *era { return &s.rule.eras[t.Era] }

// madeElsewhere is the policy of a limit of which only the terms are known.
type madeElsewhere struct{}

func (madeElsewhere) String() string                 { return "defined elsewhere" }
func (madeElsewhere) compile() (bucket.Terms, error) { return bucket.Terms{}, ErrInvalidLimit }

const (
	maxNames    = 10_000 // of limits whose policies a Limiter remembers
	maxPolicies = 16     // of one name
)

// policies remembers which policies a Limiter was used with under each name, so that what names a limit by its
// name alone, as a reservation does, is decided under the policy the limit has now. To note the policy that was
// noted last costs a look into a map and a comparison.
type policies struct {
	names sync.Map // of *usage by name
	count atomic.Int64
}

// usage is how a name was used.
type usage struct {
	last atomic.Pointer[Limit]              // with the latest policy
	seen [maxPolicies]atomic.Pointer[Limit] // with the distinct policies; the oldest one gives way to a new one

	mu   sync.Mutex
	next int // the place of the next policy in seen
}

// note notes that the limit of that name was used. When it is the second policy of the name it returns the first: once.
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

// last returns the terms that the limit called name was last used with, if it was used at all.
func (p *policies) last(name string) (bucket.Terms, bool) {
	if p == nil {
		return bucket.Terms{}, false
	}
	found, ok := p.names.Load(name)
	if !ok {
		return bucket.Terms{}, false
	}
	last := found.(*usage).last.Load()
	if last == nil { // it is being noted
		return bucket.Terms{}, false
	}
	return last.terms(), true
}

// seen returns the distinct terms that the limit called name was used with.
func (p *policies) seen(name string) (seen []bucket.Terms) {
	if p == nil {
		return nil
	}
	found, ok := p.names.Load(name)
	if !ok {
		return nil
	}
	u := found.(*usage)
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
	known := u.find(limit) // somebody may have been quicker
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

// find returns the limit in seen whose terms are the limit's, or nil.
func (u *usage) find(limit Limit) *Limit {
	for i := range u.seen {
		if known := u.seen[i].Load(); known != nil && known.isAs(limit) {
			return known
		}
	}
	return nil
}
