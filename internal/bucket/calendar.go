package bucket

import (
	"slices"
	"time"
)

// Unit is what part of the calendar a window is as long as.
type Unit uint8

// The units. The zero Unit is none: windows are as long as Step says.
const (
	_ Unit = iota
	OfDay
	OfWeek
	OfMonth
	OfQuarter
	OfYear
)

// Calendar says when windows begin: at midnight in a time zone. Terms with one cannot decide. What decides are the Eras that
// Terms.OnCalendar makes of them once it is known when the windows begin. A Calendar is a comparable value.
type Calendar struct {
	Zone    string
	Unit    Unit
	Weekday uint8 // OfWeek: on which windows begin; 0 is Sunday
	Day     uint8 // OfMonth, OfQuarter, OfYear: of the month, or its last when it has fewer
	Month   uint8 // OfQuarter, OfYear: of one of the begins
}

const (
	microsOfDay = int64(24 * time.Hour / time.Microsecond)
	daysOfCycle = 146097 // after 400 years the calendar repeats
)

// mean returns how long windows are on average, in microseconds.
func (c Calendar) mean() int64 {
	switch c.Unit {
	case OfDay:
		return microsOfDay
	case OfWeek:
		return 7 * microsOfDay
	default:
		return daysOfCycle * microsOfDay / (400 * 12) * int64(c.Months())
	}
}

// longest returns a length, in microseconds, that no window exceeds, whatever the zone does.
func (c Calendar) longest() int64 { return c.mean() + 3*microsOfDay }

// Days returns how many days a window has, and 0 where it is made of months.
func (c Calendar) Days() int {
	switch c.Unit {
	case OfDay:
		return 1
	case OfWeek:
		return 7
	default:
		return 0
	}
}

// Months returns how many months a window has, and 0 where it is made of days.
func (c Calendar) Months() int {
	switch c.Unit {
	case OfMonth:
		return 1
	case OfQuarter:
		return 3
	case OfYear:
		return 12
	default:
		return 0
	}
}

// Reach returns how many windows of a Table begin before the year that it is made in, and how many after its first day.
func (c Calendar) Reach() (before, after int) {
	switch c.Unit {
	case OfDay:
		return 3653, 366 + 62
	case OfWeek:
		return 522, 53 + 20
	default:
		return 120 / c.Months(), 24/c.Months() + 9
	}
}

// Run is windows of one length that follow each other.
type Run struct{ From, Step int64 }

// Table is when the windows of a Calendar begin: those of some ten years before a year, of that year and for a while after.
type Table struct {
	Runs []Run
	End  int64 // of the last window
}

// Covers reports whether decisions at an instant can be made by the table, and what comes after that be told.
func (t *Table) Covers(c Calendar, now int64) bool {
	return now >= t.Runs[0].From && now < t.End-8*c.longest()
}

// Equal reports whether two tables say the same.
func (t *Table) Equal(o *Table) bool { return t.End == o.End && slices.Equal(t.Runs, o.Runs) }

// TableOf returns the table that has these begins, which are in order, the last being the end.
func TableOf(begins []int64) *Table {
	t := &Table{End: begins[len(begins)-1]}
	for i, from := range begins[:len(begins)-1] {
		step := begins[i+1] - from
		if n := len(t.Runs); n == 0 || t.Runs[n-1].Step != step {
			t.Runs = append(t.Runs, Run{from, step})
		}
	}
	return t
}

// Begins returns when the windows of the table begin, and at last when it ends.
func (t *Table) Begins() (begins []int64) {
	for i, r := range t.Runs {
		until := t.End
		if i+1 < len(t.Runs) {
			until = t.Runs[i+1].From
		}
		for at := r.From; at < until; at += r.Step {
			begins = append(begins, at)
		}
	}
	return append(begins, t.End)
}

// FollowsCalendar reports whether the terms, or those that hold at another instant, have a Calendar.
func (t Terms) FollowsCalendar() bool {
	return t.Calendar.Unit != 0 || t.Eras != nil && t.Eras.calendars
}

// Calendars returns those of the terms and of the terms that hold at other instants.
func (t Terms) Calendars() (of []Calendar) {
	if t.Eras == nil {
		return append(of, t.Calendar)
	}
	for i := range t.Eras.eras {
		if c := t.Eras.eras[i].Terms.Calendar; c.Unit != 0 && !slices.Contains(of, c) {
			of = append(of, c)
		}
	}
	return of
}

// OnCalendar returns the eras of terms that have a Calendar, or of which others have: each run of windows of one length is
// an era of its own, in which they are those of a fixed window. What arrives at the begin of an era is the window that
// would begin there under the terms before, so that tokens are kept as they are.
//
// Before the first window of a table and after its last, windows have the average length. No decision is made there: the
// terms are Unknown. A row that was last changed before the first has gained as many windows as began since by that, and
// what is told of instants after the last is estimated so.
func (t Terms) OnCalendar(table func(Calendar) *Table) *Eras {
	eras := []Era{{Terms: t}}
	if t.Eras != nil {
		eras = t.Eras.eras
	}
	var all []Era
	for i, era := range eras {
		era.Origin = int32(i)
		if era.Terms.Calendar.Unit == 0 {
			all = append(all, era)
			continue
		}
		until := MaxInstant
		if i+1 < len(eras) {
			until = eras[i+1].From
		}
		if i == 0 {
			era.From = MinInstant
		}
		all = append(all, era.windows(table(era.Terms.Calendar), until)...)
	}
	return NewEras(all)
}

// windows returns the eras that an era with a Calendar consists of.
func (e Era) windows(table *Table, until int64) (eras []Era) {
	c := e.Terms.Calendar
	e.Follows, e.Terms.Calendar = c, Calendar{}
	add := func(r Run, end int64, unknown bool) {
		if end <= e.From || r.From >= until {
			return
		}
		of := e
		of.Terms.Step, of.Terms.Steps, of.Terms.Phase, of.Unknown = r.Step, 1, PhaseOf(r.From, r.Step), unknown
		if len(eras) > 0 {
			of.From, of.Change, of.Continues = r.From, Keep, true
		}
		eras = append(eras, of)
	}
	add(Run{table.Runs[0].From - c.mean(), c.mean()}, table.Runs[0].From, true)
	for i, r := range table.Runs {
		end := table.End
		if i+1 < len(table.Runs) {
			end = table.Runs[i+1].From
		}
		add(r, end, false)
	}
	add(Run{table.End, c.mean()}, MaxInstant+1, true)
	return eras
}

// IsUnknown reports whether it is not known when the windows begin in which the terms hold.
func (t Terms) IsUnknown() bool { return t.Eras != nil && t.Eras.eras[t.Era].Unknown }

// Followed returns the calendar that says when the windows begin in which the terms hold, or none.
func (t Terms) Followed() Calendar {
	if t.Eras == nil {
		return t.Calendar
	}
	return t.Eras.eras[t.Era].Follows
}

// AnyUnknown reports whether the terms of one of the asks are Unknown, or of an era with another mode: the call cannot be decided as
// it was made.
func AnyUnknown(asks []Ask) bool {
	return anyOf(asks, func(a *Ask) bool { return a.Terms.IsUnknown() || a.IsInOtherMode() })
}

// Origin returns which of the eras the terms are of that they were made from; see OnCalendar.
func (t Terms) Origin() int32 { return t.Eras.eras[t.Era].Origin }

// next returns the terms that the calendar has after t, and from when on.
func (t Terms) next() (next Terms, from int64, found bool) {
	if t.Eras == nil || int(t.Era)+1 >= len(t.Eras.eras) || !t.Eras.eras[t.Era+1].Continues {
		return Terms{}, 0, false
	}
	return t.within(t.Era + 1), t.Eras.eras[t.Era+1].From, true
}

// OnWindows reports whether the terms are of windows of a calendar that are of one length, as OnCalendar makes them.
func (t Terms) OnWindows() bool {
	_, _, found := t.next()
	return found || t.Eras != nil && t.Eras.eras[t.Era].Continues
}

// Next returns the terms of the windows that follow, which are of another length, and from when on they do.
func (t Terms) Next() (next Terms, from int64, found bool) { return t.next() }

// Follow returns the terms and the state that a bucket has at an instant, as far as its calendar goes on that way.
func (t Terms) Follow(s State, now int64) (Terms, State) {
	for t.Eras != nil && t.Eras.eras[t.Era].Continues && now < t.since() {
		t = t.within(t.Era - 1)
	}
	for {
		next, from, found := t.next()
		if !found || now < from {
			return t, s
		}
		t, s = next, t.stateAt(s, next, from)
	}
}

// stateAt returns the state at the begin of the next terms of the calendar.
func (t Terms) stateAt(s State, next Terms, from int64) State {
	if s.TS < from {
		s = next.enterRow(t, s, from)
	}
	return s
}
