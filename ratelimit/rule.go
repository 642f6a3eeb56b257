package ratelimit

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// Policies is a source of policies that are not in the code, such as package rules, which reads them from tables. A
// Limiter asks it once for each request, before the cost is checked. It has to answer from memory, in nanoseconds, and
// from any goroutine.
//
// A source that panics, or that returns the rule of another limit, counts as one that has no rule: the definition in the
// code decides, and the Observer is told of a [Failed].
type Policies interface {
	// RuleFor returns the rule for a bucket, or nil where the definition in the code decides. The limit is as the
	// request names it, the plan is that of [Request.Plan], and key is the key as stored: "" of [Limit.Global], and an
	// HMAC where Config.HashKey is set; see [Limiter.StoredKey].
	RuleFor(limit Limit, plan, key string) *Rule

	// RulesOf returns rules that bound those that RuleFor returns for the limits of a name, for Prune: one with as large a
	// capacity as any, one that is as slow as any, and those whose changes scale debts.
	RulesOf(name string) []*Rule
}

// Mode is whether a rule refuses anybody.
type Mode string

const (
	// On is the mode of a limit that is enforced. It is what the empty Mode means.
	On Mode = "on"
	// Shadow is the mode of a limit that is tried: it takes as always, and where it does not have what is asked the
	// request goes through all the same, and takes nothing from it.
	Shadow Mode = "shadow"
	// Off is the mode of a limit that is not in use: its requests go through and take nothing.
	Off Mode = "off"
)

// OnChange is what becomes of the tokens of a bucket at the instant at which a policy takes the place of another. What
// had arrived until then has been counted under the policy before, up to its capacity. A bucket that is full then stays
// full, whatever OnChange says: that is what a bucket nobody has used is.
type OnChange string

const (
	// KeepTokens keeps what the bucket holds or owes, up to the new capacity. It is what the empty OnChange means. With
	// Shards it cannot raise the capacity: use another OnChange.
	KeepTokens OnChange = "keep"
	// ScaleTokens keeps the share of the capacity that the bucket holds or owes: 1.8 of 3 become 36 of 60.
	ScaleTokens OnChange = "scale"
	// AddTokens adds what the capacity gains, or takes away what it loses: 200 of 500 become 600 of 900.
	AddTokens OnChange = "add"
	// ResetTokens fills the bucket, and forgets what is owed.
	ResetTokens OnChange = "reset"
)

// Era is a policy and the instant from which it holds.
type Era struct {
	// From is the instant, on the database's clock. That of a rule's first era is not looked at: what comes before the
	// second has held for ever.
	From time.Time
	// Policy is what holds. Defaults to nil: what the limit is defined with in the code.
	Policy Policy
	// Mode defaults to On.
	Mode Mode
	// Name is what people call the policy. It is told with each decision, as State.Rule. Defaults to RuleConfig.Name, and
	// where neither Policy nor Mode is set, so that the definition in the code decides, to none.
	Name string
	// Unit is what a token is, for people and programs: "requests", "tokens". It is told as State.Unit.
	Unit string
	// OnChange defaults to KeepTokens. That of the first era is not looked at. An era with another number of Shards than the
	// one before it needs ResetTokens.
	OnChange OnChange
}

// RuleConfig is what a rule says.
type RuleConfig struct {
	// Name is what people call the rule. Its eras have this name unless they have one of their own.
	Name string
	// Eras are the policies of the rule, in the order of their From. Defaults to one: what the limit is defined with.
	Eras []Era
	// PausedUntil is the instant, on the database's clock, until which the bucket gives nothing: Take and Check refuse
	// until then, and what is reserved is ready no earlier. Tokens arrive meanwhile, and Reset does not end it. The zero
	// time is no pause.
	PausedUntil time.Time
	// PauseReason is told with each decision that the pause has made.
	PauseReason string
}

// Rule is what a source of policies says of a bucket, checked and ready to decide. It does not change: a source that
// learns something new makes another one.
type Rule struct {
	limit       string
	name        string
	eras        []era
	pausedUntil int64 // microseconds since 1970
	pauseReason string
}

// era is an Era that has been checked.
type era struct {
	from  int64
	limit Limit
	mode  Mode
	name  string
	unit  string
}

// NewRule returns a rule for the buckets of a limit. It returns an error that wraps ErrInvalidRule and says what to
// change.
func NewRule(limit Limit, config RuleConfig) (*Rule, error) {
	invalid := func(format string, args ...any) (*Rule, error) {
		return nil, fmt.Errorf("%w %q for %q: %w", ErrInvalidRule, config.Name, limit.Name(), fmt.Errorf(format, args...))
	}
	if limit.isZero() {
		return invalid("the limit is the zero Limit; make it with Define or NewLimit")
	}
	if len(config.Eras) == 0 {
		config.Eras = []Era{{}}
	}
	r := &Rule{limit: limit.Name(), name: config.Name, eras: make([]era, len(config.Eras))}
	changes := make([]bucket.Change, len(config.Eras))
	for i, e := range config.Eras {
		of, change, err := e.check(limit)
		if err != nil {
			return invalid("era %d: %w", i, err)
		}
		from := clampInstant(e.From)
		switch {
		case i == 0:
			from = bucket.MinInstant
		case from <= r.eras[i-1].from:
			return invalid("era %d is from %v on, which is not after the one before it; sort them", i, e.From)
		}
		if of.name == "" && !(isNil(e.Policy) && of.mode == On) {
			of.name = config.Name
		}
		if i > 0 {
			if err := checkRows(r.eras[i-1].limit.terms(), of.limit.terms(), change); err != nil {
				return invalid("era %d: %w", i, err)
			}
		}
		r.eras[i], changes[i] = of, change
		r.eras[i].from = from
	}
	r.link(changes)
	return r.Paused(config.PausedUntil, config.PauseReason), nil
}

// checkRows returns an error if a bucket cannot go from the terms before to t row by row.
func checkRows(before, t bucket.Terms, change bucket.Change) error {
	switch {
	case t.IsByRow(change, before):
		return nil
	case t.Shards != before.Shards:
		return fmt.Errorf("it changes Shards from %d to %d; keep Shards as it is, or set OnChange to reset, which fills the bucket", before.Shards, t.Shards)
	default:
		return errors.New("it has Shards and keeps the tokens under a larger capacity; set OnChange to scale, add or reset")
	}
}

// check returns the era of the limit.
func (e Era) check(limit Limit) (era, bucket.Change, error) {
	of := era{limit: limit, mode: e.Mode, name: e.Name, unit: e.Unit}
	switch e.Mode {
	case "":
		of.mode = On
	case On, Shadow, Off:
	default:
		return era{}, 0, fmt.Errorf("its mode is %.20q; use on, shadow or off", string(e.Mode))
	}
	changes := map[OnChange]bucket.Change{
		"": bucket.Keep, KeepTokens: bucket.Keep, ScaleTokens: bucket.Scale, AddTokens: bucket.Add, ResetTokens: bucket.Reset,
	}
	change, known := changes[e.OnChange]
	if !known {
		return era{}, 0, fmt.Errorf("its change is %.20q; use keep, scale, add or reset", string(e.OnChange))
	}
	if isNil(e.Policy) {
		return of, change, nil
	}
	var err error
	of.limit, err = NewLimit(limit.Name(), e.Policy)
	return of, change, err
}

// modeNumber returns a number for the mode, from 1. Slots have other numbers than tokens.
func (e *era) modeNumber() uint8 {
	n := slices.Index([]Mode{On, Shadow, Off}, e.mode) + 1
	if e.limit.terms().Holds() {
		n += 3
	}
	return uint8(n)
}

// link tells the terms of each era what the others are.
func (r *Rule) link(changes []bucket.Change) {
	if len(r.eras) == 1 {
		return
	}
	eras := make([]bucket.Era, len(r.eras))
	for i, e := range r.eras {
		eras[i] = bucket.Era{From: e.from, Terms: e.limit.terms(), Change: changes[i], Mode: e.modeNumber()}
	}
	linked := bucket.NewEras(eras)
	for i := range r.eras {
		r.eras[i].limit = limitOf(r.limit, r.eras[i].limit.Policy(), linked.Holding(r.eras[i].from))
	}
}

// Paused returns the rule with another pause; the zero time is none.
func (r *Rule) Paused(until time.Time, reason string) *Rule {
	paused := *r
	paused.pausedUntil, paused.pauseReason = bucket.MinInstant, ""
	if !until.IsZero() {
		paused.pausedUntil, paused.pauseReason = clampInstant(until), reason
	}
	return &paused
}

// Name returns what people call the rule.
func (r *Rule) Name() string { return r.name }

// longestWait is the wait for what can never be given.
const longestWait = time.Duration(bucket.Horizon) * time.Microsecond

// pause answers all requests when one of them is paused: a call that decides is refused from memory. A reservation is made,
// and ready no earlier than the pause ends.
func (p *plan) pause(decides bool) {
	for i := range p.asked {
		s := &p.of[p.asked[i].ask]
		until := int64(0)
		if s.pausedUntil > p.now {
			until = s.pausedUntil
			p.notBefore = max(p.notBefore, until)
		}
		if !decides {
			continue
		}
		answer := State{Limit: s.limit, Allowed: true, NotAsked: true}
		s.tell(&answer, nil)
		if until > 0 {
			wait := time.Duration(min(until-p.now, bucket.Horizon)) * time.Microsecond
			answer.Allowed, answer.Mode, answer.RetryAfter, answer.ResetAfter = false, On, wait, wait
			answer.PausedUntil, answer.PauseReason = time.UnixMicro(until), retryAfterReason
			if s.rule != nil && s.rule.pausedUntil == until {
				answer.PauseReason = s.rule.pauseReason
			}
		}
		p.asked[i].ask, p.asked[i].known = -1, &answer
	}
	if decides {
		p.asks, p.of = nil, nil
	}
}

// leaveOut removes the limits that are off from the call. The pool of a guarantee that is off or in shadow decides alone. isEstimate
// says that the clock of this process chose the modes.
func (p *plan) leaveOut(isEstimate bool) {
	for i := range p.of {
		s := &p.of[i]
		p.asks[i].Mode = p.asks[i].Terms.Mode()
		p.moded = p.moded || p.asks[i].Mode != 0
		p.doubtful = p.doubtful || isEstimate && s.mode == Off && !s.rule.isOffAround(p.now)
		if s.mode == Off || s.mode == Shadow && !s.spared {
			p.passOn(i)
		}
		if s.mode == Off {
			answer := State{Limit: s.limit, Allowed: true, Remaining: s.limit.Capacity(), NotAsked: true}
			s.tell(&answer, nil)
			p.release(i, answer)
		}
	}
}

// release has the i-th bucket be asked for nothing, because the answer is known. A reservation still names it, so that its
// cost can be settled.
func (p *plan) release(i int, answer State) {
	for j := range p.asked {
		if p.asked[j].ask == i {
			p.asked[j].ask, p.asked[j].known = -1, &answer
		}
	}
	a := &p.asks[i]
	a.Cost, a.Asked, a.Lowest, a.MayOwe, a.Unenforced, p.of[i].released = 0, 0, -math.MaxFloat64, false, true, true
}

// drop removes the buckets that are asked for nothing, unless a reservation has to name them.
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

// refusedInShadow returns the buckets that refused, when none did whose limit is enforced, so that the others are to be
// asked without these.
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

// leaveShadowsOut runs a call again without the buckets that refused in shadow, while no others have refused.
func (c *call) leaveShadowsOut(run func(again *call) error) error {
	for !c.Look {
		refused := c.plan.refusedInShadow(c.Answers)
		if refused == nil {
			return nil
		}
		if err := c.retryWith(c.plan.withoutShadows(refused, c.Answers), run); err != nil {
			return err
		}
	}
	return nil
}

// withoutShadows returns the plan without the buckets that refused in shadow.
func (p *plan) withoutShadows(refused []int, answers []bucket.Answer) plan {
	left := *p
	left.asks, left.of, left.asked = slices.Clone(p.asks), slices.Clone(p.of), slices.Clone(p.asked)
	left.now, left.taken = answers[0].Now, 0
	for _, i := range refused {
		var state State
		p.setState(&state, i, &answers[i], &bucket.Content{})
		left.release(i, state)
	}
	left.drop()
	left.costless = bucket.AllCostless(left.asks)
	return left
}
