package ratelimit

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/arg"
	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
)

// Policies supplies policies that aren't in the code. For example, package rules reads them from tables. A Limiter asks
// it once for each request, on any goroutine, so it must answer from memory, within nanoseconds.
//
// If Policies panics, or returns another limit's ruling, the definition in the code decides, and the Observer receives
// an [event.Failed].
//
// If Policies also has a method Ahead() time.Duration, it returns how far the database's clock is ahead of this
// process's, and Limiters correct their estimate by it.
type Policies interface {
	// RulingFor returns the ruling for a bucket, or nil if the definition in the code decides. limit is the request's
	// limit, plan its [Request.Plan], and key the stored form of its key: "" for [Limit.Global], and an HMAC if
	// Config.HashKey is set. See [Limiter.StoredKey].
	RulingFor(limit Limit, plan, key string) *Ruling

	// RulingsOf returns rulings for Prune that bound every ruling that RulingFor can return for the name: the one with the
	// largest capacity, the slowest to fill, and all whose changes scale debt.
	RulingsOf(name string) []*Ruling
}

// ShadowLimits returns Policies that put limits into the mode Shadow, to try them before they are enforced:
//
//	ratelimit.New(pool, ratelimit.Config{Policies: ratelimit.ShadowLimits(Everybody, PerAddress)})
//
// It's for limits that only the code defines, because a rule of package rules has its own mode. It panics if a limit is
// the zero Limit.
func ShadowLimits(limits ...Limit) Policies {
	all := make(shadowLimits, len(limits))
	for _, limit := range limits {
		rule, err := NewRuling(limit, RulingConfig{Revisions: []Revision{{Mode: Shadow}}})
		if err != nil {
			panic(err)
		}
		all[limit] = rule
	}
	return all
}

type shadowLimits map[Limit]*Ruling

func (s shadowLimits) RulingFor(limit Limit, _, _ string) *Ruling { return s[limit] }

// RulingsOf returns no rulings, because Prune knows the policies of the code.
func (s shadowLimits) RulingsOf(string) []*Ruling { return nil }

// Mode says whether a limit is enforced.
type Mode string

const (
	// On enforces the limit. The empty Mode means On.
	On Mode = "on"
	// Shadow tries a limit: it takes tokens as usual, but if it has too few, the request goes on and takes nothing from
	// it.
	Shadow Mode = "shadow"
	// Off disables a limit: its requests are allowed and take nothing.
	Off Mode = "off"
)

// OnChange says how a bucket's tokens change when a new policy of the same kind takes effect. Tokens up to that time
// are counted under the old policy, up to its capacity. A full bucket stays full under every OnChange, because an
// unused bucket is full. A policy of another kind needs ResetTokens.
//
// The empty OnChange means CarryUsage if the new policy is a window, and KeepTokens if it's a token bucket.
type OnChange string

const (
	// CarryUsage keeps the usage: after 900 of 1000, 9100 of 10,000 are left, and none of 500. Debt doesn't grow.
	CarryUsage OnChange = "carry"
	// KeepTokens keeps the balance or debt, up to the new capacity. A sliding window counts its usage under every OnChange
	// but ScaleTokens and ResetTokens.
	KeepTokens OnChange = "keep"
	// ScaleTokens keeps the tokens or what the bucket owes as a share of the capacity: 1.8 of 3 become 36 of 60.
	ScaleTokens OnChange = "scale"
	// AddTokens adds the difference of the capacities, which can be negative: 200 of 500 become 600 of 900.
	AddTokens OnChange = "add"
	// ResetTokens fills the bucket and forgets its owed tokens.
	ResetTokens OnChange = "reset"
)

// Revision is a policy and the instant from which it is in effect, until the next revision.
type Revision struct {
	// EffectiveAt is when the policy takes effect, on the database's clock. It's ignored in a ruling's first revision,
	// which is in effect until the second one.
	EffectiveAt time.Time
	// Policy is the policy. Defaults to nil: the definition in the code.
	Policy Policy
	// Mode defaults to On.
	Mode Mode
	// Name is a name for the policy. Decisions report it as State.Rule. Defaults to RulingConfig.Name. If neither Policy
	// nor Mode is set, the definition in the code decides, and it defaults to "".
	Name string
	// Unit is the unit of a token, such as "requests" or "tokens". Decisions report it as State.Unit.
	Unit string
	// OnChange defaults to CarryUsage for a window, and to KeepTokens for a token bucket. It's ignored in the first
	// revision, and must be ResetTokens in one whose kind of policy or number of Shards differs from the revision before
	// it.
	OnChange OnChange
}

// RulingConfig holds the settings of a ruling.
type RulingConfig struct {
	// Name is the name of the rule that the ruling is made from. Revisions without a name use it.
	Name string
	// Revisions are the policies of the ruling, sorted by EffectiveAt. Defaults to one revision with the definition in the
	// code.
	Revisions []Revision
	// PausedUntil is the end of a pause, on the database's clock, or the zero time. Until then Take and Check refuse, and
	// reserved work isn't ready. Tokens refill meanwhile, and Reset doesn't end the pause.
	PausedUntil time.Time
	// PauseReason is the reason that decisions report as State.PauseReason.
	PauseReason string
}

// Ruling has a bucket's checked policies, as a [Limiter] applies them. It never changes: to change a policy, make a new
// one.
type Ruling struct {
	config      RulingConfig
	limit       string
	revisions   []revision
	pausedUntil int64 // microseconds since 1970
}

type revision struct {
	from  int64
	limit Limit
	mode  Mode
	name  string
	unit  string
}

// NewRuling returns a ruling for the buckets of a limit. Errors wrap ErrInvalidRule and say what to change.
func NewRuling(limit Limit, config RulingConfig) (*Ruling, error) {
	invalid := func(format string, args ...any) (*Ruling, error) {
		return nil, fmt.Errorf("%w %q for %q: %w", ErrInvalidRule, config.Name, limit.Name(), fmt.Errorf(format, args...))
	}
	if limit.isZero() {
		return invalid("the limit is the zero Limit; make it with Define or NewLimit")
	}
	if len(config.Revisions) == 0 {
		config.Revisions = []Revision{{}}
	}
	config.Revisions = slices.Clone(config.Revisions)
	r := &Ruling{config: config, limit: limit.Name(), revisions: make([]revision, len(config.Revisions))}
	changes := make([]bucket.Change, len(config.Revisions))
	for i, e := range config.Revisions {
		of, change, err := e.check(limit)
		if err != nil {
			return invalid("revision %d: %w", i, err)
		}
		from := clampInstant(e.EffectiveAt)
		switch {
		case i == 0:
			from = bucket.MinInstant
		case from <= r.revisions[i-1].from:
			return invalid("revision %d takes effect at %v, which is not after the one before it; sort them", i, e.EffectiveAt)
		}
		if of.name == "" && !(arg.IsNil(e.Policy) && of.mode == On) {
			of.name = config.Name
		}
		if i > 0 {
			if err := checkChange(r.revisions[i-1].limit, of.limit, change); err != nil {
				return invalid("revision %d: %w", i, err)
			}
		}
		r.revisions[i], changes[i] = of, change
		r.revisions[i].from = from
	}
	r.link(changes)
	return r.Paused(config.PausedUntil, config.PauseReason), nil
}

// checkChange returns an error if a bucket cannot change so from one limit to another.
func checkChange(from, to Limit, change bucket.Change) error {
	before, after := from.definition(), to.definition()
	switch was, is := kindOf(&before.terms), kindOf(&after.terms); {
	case was != is && change != bucket.Reset:
		return fmt.Errorf("it changes the kind from %s to %s; set OnChange to reset, which fills the bucket, or keep the "+
			"kind", was, is)
	case before.shards != after.shards && change != bucket.Reset:
		return fmt.Errorf("it changes Shards from %d to %d; keep Shards as it is, or set OnChange to reset, which fills "+
			"the bucket", before.shards, after.shards)
	}
	return nil
}

func (e Revision) check(limit Limit) (revision, bucket.Change, error) {
	of := revision{limit: limit, mode: e.Mode, name: e.Name, unit: e.Unit}
	switch e.Mode {
	case "":
		of.mode = On
	case On, Shadow, Off:
	default:
		return revision{}, 0, fmt.Errorf("its mode is %.20q; use on, shadow or off", string(e.Mode))
	}
	if !arg.IsNil(e.Policy) {
		var err error
		if of.limit, err = NewLimit(limit.Name(), e.Policy); err != nil {
			return of, 0, err
		}
	}
	changes := map[OnChange]bucket.Change{
		CarryUsage: bucket.Carry, KeepTokens: bucket.Keep, ScaleTokens: bucket.Scale, AddTokens: bucket.Add,
		ResetTokens: bucket.Reset,
	}
	change, known := changes[cmp.Or(e.OnChange, usualChange(of.limit))]
	if !known {
		return revision{}, 0, fmt.Errorf("its change is %.20q; use carry, keep, scale, add or reset", string(e.OnChange))
	}
	return of, change, nil
}

// usualChange returns the meaning of an empty OnChange. The tokens of a token bucket are about time, not usage: its
// rate counts at once.
func usualChange(limit Limit) OnChange {
	if limit.Spec().Kind == KindTokenBucket {
		return KeepTokens
	}
	return CarryUsage
}

// link stores all revisions of the ruling in the terms of each revision. They are terms of as many rows as that
// revision has: a process whose clock differs asks these rows in another revision, too, and together they have to give
// what one bucket gives.
func (r *Ruling) link(changes []bucket.Change) {
	if len(r.revisions) == 1 {
		return
	}
	apart := slices.Clone(r.revisions)
	for i, e := range apart {
		revisions := make([]bucket.Revision, len(apart))
		for j, of := range apart {
			terms := timesTokens(of.limit.terms(), float64(of.limit.definition().shards)/float64(e.limit.definition().shards))
			revisions[j] = bucket.Revision{From: of.from, Terms: terms, Change: changes[j]}
		}
		r.revisions[i].limit = limitOf(r.limit, e.limit.Policy(), bucket.NewRevisions(revisions).Holding(e.from))
	}
}

// Paused returns the ruling with another pause. The zero time means no pause.
func (r *Ruling) Paused(until time.Time, reason string) *Ruling {
	paused := *r
	paused.config.PausedUntil, paused.config.PauseReason, paused.pausedUntil = time.Time{}, "", bucket.MinInstant
	if !until.IsZero() {
		paused.config.PausedUntil, paused.config.PauseReason, paused.pausedUntil = until, reason, clampInstant(until)
	}
	return &paused
}

// Config returns the settings of the ruling, so that a [Policies] can wrap another one and change its rulings.
func (r *Ruling) Config() RulingConfig {
	config := r.config
	config.Revisions = slices.Clone(config.Revisions)
	return config
}

// Name returns the name of the ruling.
func (r *Ruling) Name() string { return r.config.Name }

// longestWait is the RetryAfter of a cost that can never be given.
const longestWait = time.Duration(bucket.Horizon) * time.Microsecond
