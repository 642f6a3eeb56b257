package rules

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Registered is a limit that a program uses, and what it asks of it.
type Registered struct {
	// Limit is the limit as it is defined in the code.
	Limit ratelimit.Limit
	// MaxCost is the largest cost that the program is known to ask. A rule that can never give as much would have each
	// such request fail. 0: it is not known.
	MaxCost float64
}

// Validate checks rules, before they are stored, against the limits that a program uses: it returns an error for a rule
// that says what cannot be, for one of a limit that is not registered, for one whose capacity is below the largest cost, and
// for one that makes slots of tokens, or tokens of slots: the program calls Acquire for the ones and Take for the others. The
// error joins one for each rule at fault, and wraps ErrInvalid.
func Validate(rules []Rule, registered ...Registered) error {
	v := validator{registered: byName(registered)}
	for i := range rules {
		r := &rules[i]
		if err := r.validate(); err != nil {
			v.errs = append(v.errs, err)
			continue
		}
		policy, err := r.policy()
		if err == nil {
			err = v.check(r.Limit, policy)
		}
		v.note("rule %q, plan %q: %w", r.Limit, r.Plan, err)
	}
	return errors.Join(v.errs...)
}

// Validate checks what is loaded as the function Validate does: what holds now and what lies ahead, with overrides and
// tiers besides. Of the overrides of a limit, which are checked for a key on no plan, at most 100 at fault are named. Before
// the first load there is nothing to check.
func (s *Set) Validate(registered ...Registered) error {
	current := s.loaded()
	if current == nil {
		return nil
	}
	v, now := validator{registered: byName(registered)}, time.Now().Add(current.ahead).UnixMicro()
	for _, name := range slices.Sorted(maps.Keys(current.limits)) {
		v.limit(current.limits[name], now)
	}
	for i, tier := range current.tiers.Tiers {
		if _, ok := v.registered[tier.Limit]; !ok {
			v.note("tier %d, of %q: %w", i, tier.Limit, errUnknown)
		}
	}
	return errors.Join(v.errs...)
}

// maxNamed bounds the overrides of one limit that an error names.
const maxNamed = 100

var errUnknown = errors.New("the program does not know the limit; correct the name, or register it")

type validator struct {
	registered map[string][]Registered
	errs       []error
}

func byName(registered []Registered) map[string][]Registered {
	names := make(map[string][]Registered)
	for _, r := range registered {
		names[r.Limit.Name()] = append(names[r.Limit.Name()], r)
	}
	return names
}

// note notes an error, the last of args, unless it is nil.
func (v *validator) note(format string, args ...any) {
	if err, ok := args[len(args)-1].(error); ok && err != nil {
		v.errs = append(v.errs, invalid(format, args...))
	}
}

// check checks that a policy can give each cost that is asked of its limit.
func (v *validator) check(limit string, policy ratelimit.Policy) error {
	registered, ok := v.registered[limit]
	if !ok {
		return errUnknown
	}
	for _, r := range registered {
		if code := r.Limit.Policy(); hasSlots(code) != hasSlots(policy) {
			return fmt.Errorf("it is %v, and the program has %v: the one is asked by Acquire, the other by Take; change the program first", policy, code)
		}
	}
	most, ok := mostOf(policy)
	if !ok {
		return nil
	}
	for _, r := range registered {
		if r.MaxCost > most {
			return fmt.Errorf("it never gives more than %v at once and the program asks up to %v; raise its Capacity", most, r.MaxCost)
		}
	}
	return nil
}

// hasSlots reports whether a policy has slots, which are held, and not tokens, which are taken.
func hasSlots(policy ratelimit.Policy) bool {
	_, slots := policy.(ratelimit.Concurrency)
	return slots
}

// mostOf returns the most that a call can get: the capacity, and of a limit without one what may be reserved. ok is false
// when there is no bound.
func mostOf(policy ratelimit.Policy) (most float64, ok bool) {
	n, ok := numbersOf(policy)
	if !ok || n.capacity == 0 && n.maxReserved == 0 {
		return 0, false
	}
	return cmp.Or(n.capacity, n.maxReserved), true
}

// limit checks what is loaded of a limit, from an instant on.
func (v *validator) limit(of *limitRules, now int64) {
	registered, ok := v.registered[of.name]
	if !ok {
		v.note("rules of %q: %w", of.name, errUnknown)
		return
	}
	code := registered[0].Limit.Policy()
	for _, plan := range slices.Sorted(maps.Keys(of.plans)) {
		v.note("rule %q, plan %q: %w", of.name, plan, v.chain(of.name, of.plans[plan].between(now, maxInstant), code, now))
	}
	named := 0
	for _, key := range slices.Sorted(maps.Keys(of.keys)) {
		for _, o := range of.keys[key].overrides {
			if o.until <= now || named == maxNamed {
				continue
			}
			so := overridden([]held{o}, "", of.effective).between(max(o.from, now), o.until)
			if err := v.chain(of.name, so, code, now); err != nil {
				v.note("override of the key %q of %q: %w", key, of.name, err)
				named++
			}
		}
	}
}

// chain checks what a chain says, and not what it leaves to the definition in the code.
func (v *validator) chain(limit string, so chain, code ratelimit.Policy, now int64) error {
	for _, era := range so.eras(code, now) {
		if era.Policy == nil {
			continue
		}
		if err := v.check(limit, era.Policy); err != nil {
			return err
		}
	}
	return nil
}
