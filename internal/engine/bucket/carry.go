package bucket

// IsQuota reports whether the terms are a quota for each window: a fixed or a calendar window. Its usage carries over
// to another quota.
func (t *Terms) IsQuota() bool { return t.Step > 1 && t.Kind.Statement() == StepStatement }

// Carry returns the state of a row of t whose Capacity may be another one, because a request on another plan wrote it.
// If t is a quota, the usage carries over:
//
//	Value'    = max(min(Value, 0), Value + t.Capacity - Capacity), at most t.Capacity
//	Capacity' = Value' + Capacity - Value
//
// So Capacity' is t.Capacity, unless more was used than t allows. Then nothing is left, but the row still knows the
// usage. So requests that alternate between plans take no more in a window than the largest quota allows. What
// reservations owe stays owed, and becomes no more. Other kinds keep the tokens, up to their capacity: tokens of a
// token bucket arrive all the time. If it gained the difference of the capacities at a change, and lost no more than it
// has at the change back, it would gain tokens by each of two such changes.
func (t *Terms) Carry(s State) State {
	if s.Capacity == t.Capacity || !t.IsQuota() {
		return s
	}
	used := s.Capacity - s.Value
	if left := t.Capacity - used; left >= min(s.Value, 0) {
		s.Value, s.Capacity = min(left, t.Capacity), t.Capacity
		return s
	}
	s.Value = min(s.Value, 0)
	s.Capacity = s.Value + used
	return s
}

// most returns the value up to which a row takes tokens back: up to its capacity or most. The row of a quota may have
// used more than that.
func (t *Terms) most(s State, most float64) float64 {
	most = max(t.Capacity, most, s.Value)
	if t.IsQuota() {
		most = max(most, s.Capacity)
	}
	return most
}

// capacity returns the Capacity of a row after s that holds tokens at now, before a call takes from it. In a new
// window, and in a full token bucket, nothing was used.
func (t *Terms) capacity(s State, now int64, tokens float64) float64 {
	switch {
	case s.Capacity == t.Capacity, tokens >= t.Capacity, t.Kind.Statement() != StepStatement, t.Step > 1 &&
		t.Begin(now) > s.TS:
		return t.Capacity
	}
	return s.Capacity
}
