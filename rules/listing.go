package rules

import (
	"errors"
	"fmt"
	"math"
	"regexp"
	"time"
)

// StoredRule is a rule as it was stated last.
type StoredRule struct {
	Rule
	// Version is that of the rules when it was stated. 0: it was written by hand.
	Version int64
	// From is the instant from which it holds.
	From time.Time
}

// StoredOverride is a span in which an override holds, or held. An override that was replaced has the beginning of its
// successor as its Until.
type StoredOverride struct {
	Override
	Edit
}

// StoredPause is a pause, which may be over.
type StoredPause struct {
	Pause
	Edit
}

// Listing is what the tables say.
type Listing struct {
	// Version counts the changes that were made.
	Version int64
	// Rules are in the order of their limits and plans.
	Rules []StoredRule
	// Overrides are in the order of their limits, keys and beginnings, with those that ended lately.
	Overrides []StoredOverride
	// Pauses are in the order of their limits, keys and beginnings.
	Pauses []StoredPause
	// Tiers is the list of tiers.
	Tiers TierSet
	// Err names the rows that the program cannot read, as they were written by hand or by a later version. They are not in the
	// list. Nil: there are none.
	Err error
}

const (
	maxTiers   = 1000
	maxPattern = 1024
	maxSource  = 256
	maxCost    = 1e12
)

var validSource = regexp.MustCompile(`^(fixed|(header|query):[!-~]+)$`)

func (s *TierSet) validate() error {
	switch {
	case s.Match != "" && s.Match != MatchAll && s.Match != MatchFirst:
		return invalid("tiers: Match is %.20q; use %q or %q", string(s.Match), MatchAll, MatchFirst)
	case len(s.Tiers) > maxTiers:
		return invalid("%d tiers; use up to %d", len(s.Tiers), maxTiers)
	}
	for i := range s.Tiers {
		if err := s.Tiers[i].check(); err != nil {
			return invalid("tier %d, of %.80q: %w", i, s.Tiers[i].Limit, err)
		}
	}
	return nil
}

// check checks what the table can hold.
func (t *Tier) check() error {
	for attribute, value := range t.When {
		if !isText(attribute, maxPattern) || !isText(value, maxPattern) {
			return fmt.Errorf("its When has %.80q; use up to %d bytes of UTF-8 without NUL", attribute, maxPattern)
		}
	}
	if t.Key != "" && isText(t.Key, maxPattern) {
		if _, err := parsePattern(t.Key); err != nil {
			return fmt.Errorf("its Key is %.80q: %w", t.Key, err)
		}
	}
	switch {
	case !validName.MatchString(t.Limit):
		return errors.New("its Limit is no name of a limit; use 1 to 64 letters, digits and _ . : / -")
	case !isText(t.Key, maxPattern):
		return fmt.Errorf("its Key has %d bytes; use up to %d of UTF-8 without NUL", len(t.Key), maxPattern)
	case !isText(t.Route, maxPattern):
		return fmt.Errorf("its Route has %d bytes; use up to %d of UTF-8 without NUL", len(t.Route), maxPattern)
	case t.CostSource != "" && (len(t.CostSource) > maxSource || !validSource.MatchString(t.CostSource)):
		return fmt.Errorf("its CostSource is %.80q; use fixed, header:<name> or query:<name>", t.CostSource)
	case !isCost(t.FixedCost):
		return fmt.Errorf("its FixedCost is %v; use a number from 0 to %g", t.FixedCost, maxCost)
	case !isCost(t.DefaultCost):
		return fmt.Errorf("its DefaultCost is %v; use a number from 0 to %g", t.DefaultCost, maxCost)
	}
	return nil
}

func isCost(cost float64) bool { return cost >= 0 && cost <= maxCost && !math.IsNaN(cost) }
