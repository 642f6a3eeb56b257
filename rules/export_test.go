package rules

import "github.com/pgratelimit/pgratelimit/ratelimit"

// Tiers returns the list of tiers that is loaded.
func (s *Set) Tiers() TierSet {
	if current := s.loaded(); current != nil {
		return current.tiers
	}
	return TierSet{}
}

// Tiers are tiers that are ready to ask.
type Tiers = readyTiers

// NewTiers returns tiers that are ready to ask.
func NewTiers(set TierSet, limitOf func(name string) (ratelimit.Limit, bool), attributes ...string) (*Tiers, error) {
	return newTiers(set, limitOf, attributes...)
}

// Requests returns what tiers ask of a request.
func (t *Tiers) Requests(a Attributes, stated func(source string) []string) ([]ratelimit.Request, error) {
	return t.requests(a, stated)
}
