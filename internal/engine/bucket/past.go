package bucket

// Past is what decides on a row that was written before the terms held, for a server that knows only one policy at a
// time.
type Past struct {
	From   int64 // when the policy of the terms began
	Passed int64 // steps that begin after the row and From, up to the begin of the span of the terms

	Change    string // of the policy before the terms to theirs; empty: the row is of theirs
	Was       Terms  // the policy of the row; unused for a reset
	WasPassed int64  // its steps that begin after the row, up to From
}

// Past returns what to know about a row that was written at ts.
func (t *Terms) Past(ts int64) (p Past) {
	since, _ := t.Span()
	p.From = t.Revisions.since(t.Revision)
	p.Passed = t.between(max(ts, p.From), since)
	switch {
	case ts >= p.From:
	case ts < t.Revisions.lastReset(t.Revision):
		p.Change = Reset.String()
	default:
		p.Change = t.Revisions.revisions[t.Revision].Change.String()
		p.Was = t.Revisions.Holding(ts).Seeded(t.Seed).On(p.From - 1)
		p.WasPassed = p.Was.between(ts, p.From)
	}
	return p
}

// String returns the name by which decide_rows_1 knows the change.
func (c Change) String() string { return [...]string{"keep", "carry", "scale", "add", "reset"}[c] }
