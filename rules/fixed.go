package rules

import "fmt"

// SetOf returns a Set of what a file says, as if it had always held: for simulations and tests, without a database. Overrides
// end when they say so. Load and Run of the Set return an error that wraps ErrInvalidConfig. An error of SetOf wraps ErrInvalid.
func SetOf(file Document) (*Set, error) {
	l := &loaded{version: 1, match: string(file.Tiers.Match)}
	for i := range file.Rules {
		r := &file.Rules[i]
		if err := r.validate(); err != nil {
			return nil, err
		}
		l.rules = append(l.rules, loadedRule{name: r.Limit, plan: r.Plan, from: minInstant, row: ruleRowOf(*r)})
	}
	for i := range file.Overrides {
		o := &file.Overrides[i]
		if err := o.validate(); err != nil {
			return nil, err
		}
		l.overrides = append(l.overrides, loadedOverride{name: o.Limit, key: o.Key, from: minInstant, row: overrideRowOf(*o)})
	}
	for _, t := range file.Tiers.Tiers {
		l.tiers = append(l.tiers, tierRowOf(t))
	}
	if err := file.validate(); err != nil {
		return nil, err
	}
	s := &Set{}
	current := compile(l, nil, &s.limits)
	if current.err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalid, current.err)
	}
	s.current.Store(current)
	return s, nil
}
