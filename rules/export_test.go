package rules

// Tiers returns the list of tiers that is loaded.
func (s *Set) Tiers() TierSet {
	if current := s.loaded(); current != nil {
		return current.tiers
	}
	return TierSet{}
}
