package store

import (
	"slices"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
)

// plan says how the calls of a batch are decided: groups by statements, and the others by a look or by decide_rows_1.
type plan struct {
	groups   []*group
	policies [][]*row // of calls for one bucket, for spend_1 and spend_windows_1: a call for each policy of each limit
	several  []*row   // of calls over several limits, for decide_groups_1
	others   []*Call  // in the order of arrival
	hidden   error    // why a look of others may have missed rows; the groups have taken by then

	rows   map[bucket.Key]*row
	ledger bucket.Ledger // for looks at the rows that were found
	shared *group        // the calls over several limits that share a bucket with another call
}

// group are calls of a batch that a statement takes for together. It takes for all of them, or for none.
type group struct {
	number int     // place in the plan
	row    *row    // one of its rows
	calls  []*Call // in the order of arrival
	// calls for the same rows that it does not take for: there can never be enough for them too, or a sum would round
	// their costs
	rest  []*Call
	first [1]*Call
}

type row struct {
	calls   int  // that take from the bucket
	several bool // whether one of them is over several limits
	apart   bool // whether one of them is decided in turn, and so all later ones

	group  *group
	ask    bucket.Ask // of the first call of the group, with the cost of all
	answer bucket.Answer
	found  bool // whether the statement answered

	acquired acquired // the leases of the calls, after that

	own group // the group of calls for this bucket alone
}

// maxStatements bounds the statements of a batch. Calls under more policies are decided in turn.
const maxStatements = 32

func planOf(calls []*Call) *plan {
	p := &plan{rows: make(map[bucket.Key]*row, len(calls)), groups: make([]*group, 0, len(calls))}
	var room []row
	for _, c := range calls {
		c.rows = c.oneRow[:0]
		for i := range c.Asks {
			r := p.rows[c.Asks[i].Key]
			if r == nil {
				if len(room) == 0 { // for more at once the more there are: they may also be for one bucket
					room = make([]row, min(len(p.rows)+1, 16))
				}
				r, room = &room[0], room[1:]
				p.rows[c.Asks[i].Key] = r
			}
			c.rows = append(c.rows, r)
			if !c.onlyLooks() {
				r.calls++
				r.several = r.several || len(c.Asks) > 1
			}
		}
	}
	for _, c := range calls {
		if c.onlyLooks() || !p.add(c) {
			p.others = append(p.others, c)
		}
	}
	byKey := func(r, o *row) int { return r.ask.Key.Compare(o.ask.Key) }
	for _, rows := range p.policies {
		slices.SortFunc(rows, byKey)
	}
	slices.SortFunc(p.several, byKey)
	return p
}

// onlyLooks reports whether nothing is taken for the call in this round.
func (c *Call) onlyLooks() bool { return c.Look || c.heldBy != nil }

func (p *plan) isOfOneRow() bool {
	return len(p.groups) == 1 && len(p.several)+len(p.others) == 0
}

// add adds a call to a group. It returns false if the call is decided in turn, because no statement can decide it, or
// because an earlier call for one of its buckets is decided in turn.
func (p *plan) add(c *Call) (added bool) {
	isFit := c.way == byStatement &&
		(c.traits.Statement == bucket.StepStatement || !c.rows[0].several)
	for i, r := range c.rows {
		isFit = isFit && !r.apart && (r.group == nil || r.fits(&c.Asks[i]))
	}
	if isFit {
		if first := c.rows[0]; first.several {
			added = p.addToSeveral(c)
		} else {
			added = p.addToRow(c, first)
		}
	}
	for _, r := range c.rows {
		r.apart = r.apart || !added
	}
	return added
}

func (r *row) fits(a *bucket.Ask) bool { return r.ask.Key == a.Key && r.ask.Terms == a.Terms }

// addToRow adds a call for one bucket to the group of calls for it.
func (p *plan) addToRow(c *Call, r *row) bool {
	a, g := &c.Asks[0], &r.own
	if r.group == nil {
		if r.ask = *a; c.turn == waits || a.Cost > a.Terms.Capacity || !p.addToPolicy(r) {
			return false
		}
		r.group, r.ask.Cost = g, 0
		g.row, g.calls = r, g.first[:0]
		p.append(g)
	}
	sum, capacity := r.ask.Cost+a.Cost, a.Terms.Capacity
	// so that one sum leaves the same tokens as the costs in turn
	isExact := len(g.calls) == 0 || capacity-(capacity-sum) == sum
	if c.takes(g) && sum <= capacity && isExact {
		r.ask.Cost, g.calls = sum, append(g.calls, c)
	} else {
		g.rest = append(g.rest, c)
	}
	return true
}

// addToPolicy adds a row to the statement for its policy. It returns false if there are too many statements.
func (p *plan) addToPolicy(r *row) bool {
	i := len(p.policies) - 1 // mostly the last one fits
	for i >= 0 && !p.policies[i][0].isUnder(r) {
		i--
	}
	switch {
	case i >= 0:
		p.policies[i] = append(p.policies[i], r)
	case len(p.policies) == maxStatements:
		return false
	default:
		p.policies = append(p.policies, append(make([]*row, 0, min(len(p.rows), 16)), r))
	}
	return true
}

// isUnder reports whether two rows are of one limit under one policy. Their windows may begin at different instants.
func (r *row) isUnder(o *row) bool {
	a, b := r.ask.Terms, o.ask.Terms
	a.Phase, b.Phase, a.Seed, b.Seed = 0, 0, 0, 0
	return r.ask.Key.Name == o.ask.Key.Name && a == b
}

// addToSeveral adds a call over several limits, or for a bucket of such a call. All calls that share a bucket are one
// group.
func (p *plan) addToSeveral(c *Call) bool {
	if c.turn == waits { // it makes no rows, and shares some with a call that takes
		i := slices.IndexFunc(c.rows, func(r *row) bool { return r.group != nil })
		if i >= 0 {
			g := c.rows[i].group
			g.rest = append(g.rest, c)
		}
		return i >= 0
	}
	isShared := slices.ContainsFunc(c.rows, func(r *row) bool { return r.calls > 1 })
	g := p.shared
	if g == nil || !isShared {
		g = &group{}
		p.append(g)
	}
	if isShared {
		p.shared = g
	}
	for i := range c.Asks {
		a, r := &c.Asks[i], c.rows[i]
		if r.group == nil {
			r.ask, r.group = *a, g
			r.ask.Cost = 0
			p.several = append(p.several, r)
		}
		r.ask.Cost, r.ask.MinBalance = r.ask.Cost+a.Cost, max(r.ask.MinBalance, a.MinBalance)
		g.row = r
	}
	g.calls = append(g.calls, c)
	return true
}

// turn is what a call of a batch is to do, after a round in which nothing was taken for it.
type turn uint8

const (
	unknown turn = iota // which it is before that
	takes               // there was enough for it, after the calls before it
	waits               // there was not
)

// takes reports whether a group takes for the call, if there may be enough.
func (c *Call) takes(g *group) bool {
	return c.turn == takes || c.turn == unknown && len(g.rest) == 0
}

// setTurns decides on calls one after the other, on what was found, so that their groups take for those for which
// there's enough. It reports whether that, or a look at the rows of which nothing was found, may decide on some.
func setTurns(calls []*Call) (again bool) {
	asks := make([][]bucket.Ask, 0, len(calls))
	for _, c := range calls {
		switch {
		case c.isKnown():
			asks = append(asks, c.Asks)
		case c.way == byStatement:
			c.way, again = inGeneral, true
		}
	}
	p := bucket.NewLedger(asks...)
	for _, c := range calls {
		for i := range c.Answers {
			if at, found := p.Index(c.Asks[i].Key); found && c.way == byStatement {
				p.Put(at, c.Answers[i].State, c.Answers[i].Absent)
				p.Now = max(p.Now, c.Answers[i].Now)
			}
		}
	}
	for _, c := range calls {
		if c.turn = waits; c.way == byStatement && bucket.AllAllowed(p.Take(c.Asks, nil)) {
			c.turn, again = takes, true
		}
	}
	return again
}

// isKnown reports whether a statement has found all rows of the call, and can decide on it.
func (c *Call) isKnown() bool {
	return c.way == byStatement && !slices.ContainsFunc(c.rows, func(r *row) bool { return !r.found || r.acquired.ok() })
}

func (p *plan) append(g *group) {
	g.number = len(p.groups)
	p.groups = append(p.groups, g)
}

// answer answers the calls of the groups whose costs were taken. It returns the other calls, with the states that were
// found.
func (p *plan) answer() (undecided []*Call) {
	for _, g := range p.groups {
		if !g.row.answer.Allowed {
			g.calls, g.rest = nil, append(g.calls, g.rest...)
		}
		isAcquired := len(g.calls) > 0 && bucket.Holds(&g.row.ask.Terms)
		if isAcquired {
			g.setAcquired()
		}
		left := len(g.rest)
		for _, c := range slices.Backward(g.calls) {
			for ; left > 0 && g.rest[left-1].seq > c.seq; left-- { // it finds what the calls before it have left
				p.setFound(g.rest[left-1])
			}
			if !isAcquired {
				c.setTaken()
			}
		}
		for _, c := range g.rest[:left] {
			p.setFound(c)
		}
		undecided = append(undecided, g.rest...)
		for _, c := range g.calls {
			c.Answer(nil)
		}
	}
	return undecided
}

// setTaken sets the answers to a call that its group took for. The rows are as they were after the call, and then as
// they were before.
func (c *Call) setTaken() {
	c.Answers = c.room()
	for i := range c.Asks {
		r, a := c.rows[i], &c.Asks[i]
		c.Answers[i] = r.answer
		a.Untake(&r.answer, a.Cost)
	}
}

// setFound sets the answers to a call that no statement took for, as a look. Of a row without an answer nothing is
// known, and it does not refuse.
func (p *plan) setFound(c *Call) {
	c.Answers = c.room()
	for i := range c.Asks {
		c.Answers[i] = c.rows[i].answer
		c.Answers[i].Allowed = true
	}
	if c.isKnown() {
		c.Answers = p.ledger.LookAt(c.Asks, c.Answers, c.Answers)
	}
}

func (c *Call) room() []bucket.Answer {
	if len(c.Asks) == 1 {
		return c.one[:]
	}
	return make([]bucket.Answer, len(c.Asks))
}
