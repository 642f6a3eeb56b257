package rules

import (
	"fmt"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// SetOf returns a Set of a file's rules, as if they had always been in effect, for simulations and tests without a
// database. Overrides end at their Until. observer is Config.Observer, and can be nil. Load and Run of the Set return
// an error that wraps ErrInvalidConfig, and SetOf's own errors wrap ErrInvalid.
func SetOf(file Document, observer ratelimit.Observer) (*Set, error) {
	l := &loaded{version: 1}
	add := func(r row, err error) error {
		r.from = minInstant
		l.rows = append(l.rows, r)
		return err
	}
	for i := range file.Rules {
		if err := file.Rules[i].validate(); err != nil {
			return nil, err
		}
		if err := add(rowOfRule(file.Rules[i])); err != nil {
			return nil, err
		}
	}
	for i := range file.Overrides {
		if err := file.Overrides[i].Validate(); err != nil {
			return nil, err
		}
		if err := add(rowOfOverride(file.Overrides[i])); err != nil {
			return nil, err
		}
	}
	if err := add(rowOfTiers(file.Tiers)); err != nil {
		return nil, err
	}
	if err := file.validate(); err != nil {
		return nil, err
	}
	s := &Set{config: Config{Observer: observer}}
	current := compile(l, &s.limits)
	if current.err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalid, current.err)
	}
	s.current.Store(current)
	return s, nil
}
