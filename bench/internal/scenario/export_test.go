package scenario

// Judge is judge, for the tests.
func (r *Result) Judge() { r.judge() }
