package bucket

import "time"

// Calendar is the Kind of windows that begin at midnight in a time zone. A midnight that does not exist is the first instant after it, and if
// midnight occurs twice, the first one counts. The i-th window begins on the i-th day, week, month, quarter or year, counted from 1970 on.
// Step and Phase describe a run of windows of one length: see On.
type Calendar struct {
	Steps
	Zone         *time.Location
	Days, Months uint8 // the length of a window: one of them is 0
	Month        uint8 // the month of a begin, from 1, if windows are Months long
	First        uint8 // the day of that month, or its last day if it has fewer; or else the days from 1970-01-01 to a begin
}

const (
	microsOfDay = int64(24 * time.Hour / time.Microsecond)
	daysOfCycle = 146097 // after 400 years the calendar repeats

	// longestRun is the maximum number of windows of a run before the window of an instant, and after it. Rows from before the run are
	// decided under their lock.
	longestRun = 32
)

// mean returns the average length of a window, in microseconds.
func (c Calendar) mean() int64 {
	return int64(c.Days)*microsOfDay + int64(c.Months)*(daysOfCycle*microsOfDay/(400*12))
}

// date returns the midnight, as if in UTC, of the day on which the i-th window begins.
func (c Calendar) date(i int64) time.Time {
	if c.Days > 0 {
		return time.Unix((i*int64(c.Days)+int64(c.First))*86400, 0).UTC()
	}
	month := time.Date(1970, time.Month(int64(c.Month)+i*int64(c.Months)), 1, 0, 0, 0, 0, time.UTC)
	return month.AddDate(0, 0, min(int(c.First), month.AddDate(0, 1, -1).Day())-1)
}

// begin returns the instant at which the i-th window begins.
func (c Calendar) begin(i int64) int64 { return firstInstant(c.date(i), c.Zone) }

// index returns the number of the window that holds an instant. A window of a day that the zone leaves out holds none.
func (c Calendar) index(at int64) (i int64) {
	for i = (at - c.begin(0)) / c.mean(); c.begin(i) > at; i-- { // at most two times
	}
	for ; c.begin(i+1) <= at; i++ {
	}
	return i
}

// Begin implements Kind.
func (c Calendar) Begin(t Terms, at, n int64) int64 {
	if t.run.holds(at) {
		if begin := c.Steps.Begin(t, at, n); t.run.holds(begin - 1) {
			return begin
		}
	}
	return c.begin(c.index(at) + n)
}

// Between implements Kind.
func (c Calendar) Between(t Terms, from, until int64) int64 {
	if t.run.holds(from) && t.run.holds(until) {
		return c.Steps.Between(t, from, until)
	}
	return max(c.index(until)-c.index(from), 0)
}

// On implements Kind: the terms with the Step and the Phase of the windows at an instant.
func (c Calendar) On(t Terms, at int64) Terms {
	if !t.run.holds(at) {
		t.run = c.around(at)
		t.Step, t.Steps, t.Phase = t.run.Step, 1, PhaseOf(t.run.From, t.run.Step)
	}
	return t
}

// Span implements Kind: from when until when windows have the length Step.
func (Calendar) Span(t Terms) (since, until int64) { return t.run.From, t.run.Until }

// Pruning implements Kind. The windows are longer than any window of the calendar in any zone.
func (c Calendar) Pruning(t Terms) Terms {
	t.Step, t.Steps, t.Kind = c.mean()+3*microsOfDay, 1, Steps{}
	return t
}

// Run is windows of one length, one after the other.
type Run struct{ From, Until, Step int64 }

// holds reports whether an instant lies in one of the windows.
func (r Run) holds(at int64) bool { return at >= r.From && at < r.Until }

// around returns a run with the window that holds an instant.
func (c Calendar) around(at int64) Run {
	i := c.index(at)
	r := Run{From: c.begin(i), Until: c.begin(i + 1)}
	r.Step = r.Until - r.From
	for n := int64(1); n <= longestRun && c.begin(i-n) == r.From-r.Step; n++ {
		r.From -= r.Step
	}
	for n := int64(2); n <= longestRun && c.begin(i+n) == r.Until+r.Step; n++ {
		r.Until += r.Step
	}
	return r
}

// toldUntil returns the end of the last window of Runs: at least eight windows after an instant.
func (c Calendar) toldUntil(now int64) int64 {
	year := time.UnixMicro(now).In(c.Zone).Year()
	first := c.index(firstInstant(time.Date(year, time.January, 1, 0, 0, 0, 0, time.UTC), c.Zone))
	switch {
	case c.Days == 1:
		return c.begin(first + 366 + 62)
	case c.Days > 1:
		return c.begin(first + 53 + 20)
	default:
		return c.begin(int64((year-1970+2)*12/int(c.Months) + 9))
	}
}

// Runs returns the run of windows of one length around now, as far back as since, and the later runs in the era of t. The last ones
// are estimated: windows of average length.
func (c Calendar) Runs(t Terms, since, now int64) []Run {
	_, end := t.Eras.span(t.Era)
	first := c.around(now)
	for before := first; first.From > since && before.Step == first.Step; before = c.around(first.From - 1) {
		first.From = before.From
	}
	runs, told := []Run{first}, c.toldUntil(now)
	for last := &runs[0]; last.Until < min(told, end); last = &runs[len(runs)-1] {
		next := c.around(last.Until)
		if next.Step == last.Step {
			last.Until = next.Until
		} else {
			runs = append(runs, Run{last.Until, next.Until, next.Step})
		}
	}
	if told < end {
		runs[len(runs)-1].Until = told
		runs = append(runs, Run{told, end, c.mean()})
	}
	return runs
}

// firstInstant returns the first instant at which the clocks of a zone show a time or a later one, in microseconds since 1970. The
// time is given as if in UTC. It uses the offsets of the day before and the day after. If the time is left out, the clocks are put
// forward between the instants to which these lead.
func firstInstant(local time.Time, zone *time.Location) int64 {
	_, before := local.Add(-30 * time.Hour).In(zone).Zone()
	_, after := local.Add(30 * time.Hour).In(zone).Zone()
	low, high := local.Unix()-int64(max(before, after)), local.Unix()-int64(min(before, after))
	shows := func(at int64) bool {
		_, offset := time.Unix(at, 0).In(zone).Zone()
		return at+int64(offset) >= local.Unix()
	}
	if low < high && !shows(low) {
		low += first(1, high-low, func(n int64) bool { return shows(low + n) })
	}
	return low * time.Second.Microseconds()
}

// BoundPrice bounds the cost of the ask by a whole window of a calendar, unless the cost without a price is higher.
func (a *Ask) BoundPrice() {
	if _, is := a.Terms.Kind.(Calendar); is && a.Asked > 0 {
		a.Cost = min(a.Cost, max(a.Asked, a.Terms.Capacity))
	}
}
