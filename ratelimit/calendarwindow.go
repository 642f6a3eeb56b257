package ratelimit

import (
	"fmt"
	"regexp"
	"sort"
	"sync"
	"time"
	_ "time/tzdata" // for machines without time zone data

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
	"github.com/pgratelimit/pgratelimit/internal/words"
)

// Calendar is the length of the windows of a [CalendarWindow].
type Calendar string

const (
	Daily     Calendar = "day"
	Weekly    Calendar = "week"
	Monthly   Calendar = "month"
	Quarterly Calendar = "quarter"
	Yearly    Calendar = "year"
)

// CalendarWindow gives Rate tokens in each day, week, month, quarter or year of a time zone: "1000 a month, from
// midnight of the 1st in Berlin". Unused tokens don't roll over, and each window repays up to Rate of a debt.
//
// A window begins at local midnight, so daylight saving and the months' lengths are right, while a [FixedWindow] of 24
// hours starts at another local time after each clock change. If that midnight doesn't exist, the window begins at the
// first moment after it. If it occurs twice, the first counts.
//
// Windows follow the time zone data that [time.LoadLocation] finds on the machine, or otherwise the program's own
// (package time/tzdata, about 450 KB). If two programs have different data for a zone, their windows can begin hours
// apart.
//
// A reservation can reach into the next window, but not further.
type CalendarWindow struct {
	// Rate is the number of tokens in each window: from 1e-9 to 1e12. It is also the capacity.
	Rate float64
	// Resets is the length of a window. It is required.
	Resets Calendar
	// Zone is the name of a time zone: "UTC", or a name with a slash, such as "Europe/Berlin". NewLimit returns
	// ErrInvalidLimit for a name that is not in the program's time zone data. Defaults to "UTC".
	Zone string
	// FirstWeekday is the day on which a Weekly window begins. The zero value is Sunday.
	FirstWeekday time.Weekday
	// FirstDay is the day of the month on which a Monthly, Quarterly or Yearly window begins, from 1 to 31. In a shorter
	// month it is the last day. Defaults to 1.
	FirstDay int
	// FirstMonth is the month in which a Yearly window begins, and the first of the months in which Quarterly windows do.
	// Defaults to January.
	FirstMonth time.Month
	// MaxReserved is the most tokens that reservations can owe: at most Rate, because they reach only into the next
	// window. Defaults to Rate. None and NoReservations are as in [TokenBucket].
	MaxReserved float64
}

// String returns the policy as text, such as "1000 per month in Europe/Berlin". It adds the first day if that is not
// the default: "1000 per week in UTC from Monday on".
func (p CalendarWindow) String() string {
	text := fmt.Sprintf("%s per %s in %s", words.Number(p.Rate), p.Resets, p.zone())
	day, month := max(p.FirstDay, 1), max(p.FirstMonth, time.January)
	switch {
	case p.Resets == Weekly && p.FirstWeekday != time.Sunday:
		text += fmt.Sprintf(" from %v on", p.FirstWeekday)
	case month != time.January:
		text += fmt.Sprintf(" from %v %d on", month, day)
	case day != 1:
		text += fmt.Sprintf(" from day %d on", day)
	}
	return text + describeRest(p.MaxReserved, 1)
}

func (p CalendarWindow) zone() string {
	if p.Zone == "" {
		return "UTC"
	}
	return p.Zone
}

func (p CalendarWindow) compile() (bucket.Terms, error) {
	c, length, err := p.calendar()
	if err != nil {
		return bucket.Terms{}, err
	}
	owed := p.MaxReserved
	if owed == 0 {
		owed = p.Rate
	}
	t, err := compile(p.Rate, Day, p.Rate, owed, 1) // the bounds of the numbers are the same for a day and a year
	if err != nil {
		return bucket.Terms{}, err
	}
	if p.MaxReserved > p.Rate {
		return bucket.Terms{}, fmt.Errorf("its MaxReserved is %v; it must be up to its Rate of %v, as a reservation "+
			"reaches into the next window only", p.MaxReserved, p.Rate)
	}
	t.Windows, t.Step, t.Steps = c, length.Microseconds(), 1 // On sets the Step of an instant
	return t, nil
}

// calendar returns the calendar of the windows, and their approximate length. It checks the fields that determine when
// they begin.
func (p CalendarWindow) calendar() (c calendar, length time.Duration, err error) {
	switch p.Resets {
	case Daily:
		c.days, length = 1, Day
	case Weekly:
		c.days, length = 7, Week
	case Monthly:
		c.months, length = 1, 30*Day
	case Quarterly:
		c.months, length = 3, 91*Day
	case Yearly:
		c.months, length = 12, 365*Day
	}
	invalid := func(format string, args ...any) (calendar, time.Duration, error) {
		return calendar{}, 0, fmt.Errorf(format, args...)
	}
	switch {
	case p.Resets == "":
		return invalid("its Resets is not set; use Daily, Weekly, Monthly, Quarterly or Yearly (in a file: day, week, " +
			"month, quarter or year)")
	case length == 0:
		return invalid("its Resets is %.20q; use Daily, Weekly, Monthly, Quarterly or Yearly (in a file: day, week, month, "+
			"quarter or year)", string(p.Resets))
	case p.FirstWeekday < time.Sunday || p.FirstWeekday > time.Saturday:
		return invalid("its FirstWeekday is %d; use time.Sunday to time.Saturday", int(p.FirstWeekday))
	case p.FirstWeekday != time.Sunday && p.Resets != Weekly:
		return invalid("it has a FirstWeekday, which is for Weekly windows; leave it out of one for each %s", p.Resets)
	case p.FirstDay < 0 || p.FirstDay > 31:
		return invalid("its FirstDay is %d; it must be from 1 to 31, or 0 for 1", p.FirstDay)
	case p.FirstDay != 0 && c.months == 0:
		return invalid("it has a FirstDay, which is for Monthly, Quarterly and Yearly windows; leave it out of one for "+
			"each %s", p.Resets)
	case p.FirstMonth < 0 || p.FirstMonth > time.December:
		return invalid("its FirstMonth is %d; use time.January to time.December, or 0 for January", int(p.FirstMonth))
	case p.FirstMonth != 0 && c.months < 3:
		return invalid("it has a FirstMonth, which is for Quarterly and Yearly windows; leave it out of one for each %s",
			p.Resets)
	}
	if c.months > 0 {
		c.first = uint8(max(p.FirstDay, 1))
		c.month = uint8(max(p.FirstMonth, 1)-1)%c.months + 1 // February, May, August and November make the same quarters
	} else {
		c.first = uint8(p.FirstWeekday+7-time.Thursday) % c.days // 1970 began on a Thursday
	}
	c.zone, err = zoneOf(p.zone())
	return c, length, err
}

// zoneName matches the form of a time zone's name. A file system would also accept "Europe//Berlin". A name without a
// slash can be another zone in SQL, where CET is an abbreviation without daylight saving, or on each machine, as Local.
var zoneName = regexp.MustCompile(`^([A-Za-z][A-Za-z0-9_+-]*(/[A-Za-z0-9_+-]+)+|UTC)$`)

// zones are the time zones that were loaded, by name. They are never forgotten: some 600 exist.
var zones sync.Map //nolint:gochecknoglobals // a memo of time.LoadLocation, so that equal calendars have the same zone

func zoneOf(name string) (zone *time.Location, err error) {
	if known, found := zones.Load(name); found {
		zone, _ = known.(*time.Location)
		return zone, nil
	}
	if zoneName.MatchString(name) {
		zone, err = time.LoadLocation(name)
	}
	if zone == nil || err != nil {
		return nil, fmt.Errorf("this program knows no time zone %.80q; use UTC, or a name with a slash, such as %q or %q, "+
			"which is three hours ahead of UTC", name, "Europe/Berlin", "Etc/GMT-3")
	}
	known, _ := zones.LoadOrStore(name, zone)
	zone, _ = known.(*time.Location)
	return zone, nil
}

// calendar is the windows of a CalendarWindow. The i-th begins at midnight of the i-th day, week, month, quarter or
// year, counted from 1970 on.
type calendar struct {
	zone         *time.Location
	days, months uint8 // the length of a window: one of them is 0
	month        uint8 // the month of a begin, from 1, if windows are months long
	first        uint8 // the day of that month, or its last one if it has fewer; else the days from 1970-01-01 to a begin
}

const microsOfDay = int64(24 * time.Hour / time.Microsecond)

// mean returns the average length of a window, in microseconds. After 400 years the calendar repeats.
func (c calendar) mean() int64 {
	return int64(c.days)*microsOfDay + int64(c.months)*(146097*microsOfDay/(400*12))
}

// Begin implements bucket.Windows.
func (c calendar) Begin(i int64) int64 {
	if c.days > 0 {
		return firstInstant(time.Unix((i*int64(c.days)+int64(c.first))*86400, 0).UTC(), c.zone)
	}
	month := time.Date(1970, time.Month(int64(c.month)+i*int64(c.months)), 1, 0, 0, 0, 0, time.UTC)
	return firstInstant(month.AddDate(0, 0, min(int(c.first), month.AddDate(0, 1, -1).Day())-1), c.zone)
}

// Index implements bucket.Windows. The window of a day that the zone leaves out holds no instant.
func (c calendar) Index(at int64) (i int64) {
	for i = (at - c.Begin(0)) / c.mean(); c.Begin(i) > at; i-- { // at most two times
	}
	for ; c.Begin(i+1) <= at; i++ {
	}
	return i
}

// String implements bucket.Windows.
func (c calendar) String() string {
	return fmt.Sprintf("%d %d %d %d %s", c.days, c.months, c.month, c.first, c.zone)
}

// windowsOf returns the windows of a stored form, and nil if it is empty or the program does not know the time zone.
func windowsOf(text string) bucket.Windows {
	var c calendar
	var zone string
	_, err := fmt.Sscanf(text, "%d %d %d %d %s", &c.days, &c.months, &c.month, &c.first, &zone)
	if err == nil {
		c.zone, err = zoneOf(zone)
	}
	if err != nil || c.days+c.months == 0 {
		return nil
	}
	return c
}

// windowsFrom returns the window of an instant and the later ones: those of a year, eight more, and an estimate of the
// rest, by the average length.
func (c calendar) windowsFrom(at int64) (all []windows) {
	i, length := c.Index(at), c.mean()
	for end := i + 366*microsOfDay/length + 9; i < end; i++ {
		begin, next := c.Begin(i), c.Begin(i+1)
		if n := len(all); n > 0 && all[n-1].Period == next-begin {
			all[n-1].Until = next
		} else if next > begin {
			all = append(all, windows{next - begin, startOf(begin, next-begin), next})
		}
	}
	return append(all, windows{Period: length, Start: startOf(c.Begin(i), length)})
}

// firstInstant returns the first instant at which the clocks of a zone show a time or a later one, in microseconds
// since 1970. The time is given as if in UTC. It uses the offsets of the day before and the day after. If the time is
// left out, the clocks are put forward between the instants to which these lead.
func firstInstant(local time.Time, zone *time.Location) int64 {
	_, before := local.Add(-30 * time.Hour).In(zone).Zone()
	_, after := local.Add(30 * time.Hour).In(zone).Zone()
	low, high := local.Unix()-int64(max(before, after)), local.Unix()-int64(min(before, after))
	low += int64(sort.Search(int(high-low), func(n int) bool {
		at := low + int64(n)
		_, offset := time.Unix(at, 0).In(zone).Zone()
		return at+int64(offset) >= local.Unix()
	}))
	return low * time.Second.Microseconds()
}

type calendarText struct {
	Kind         Kind     `json:"kind"`
	Rate         float64  `json:"rate"`
	Resets       Calendar `json:"resets"`
	Zone         string   `json:"zone,omitempty"`
	FirstWeekday weekday  `json:"first_weekday,omitzero"`
	FirstDay     int      `json:"first_day,omitempty"`
	FirstMonth   month    `json:"first_month,omitzero"`
	MaxReserved  *maxDebt `json:"max_reserved,omitempty"`
}

func (p CalendarWindow) text() policyText {
	return &calendarText{
		KindCalendarWindow, p.Rate, p.Resets, without(p.Zone, "UTC"), weekday(p.FirstWeekday), without(p.FirstDay, 1),
		month(without(p.FirstMonth, time.January)), owedOf(without(p.MaxReserved, p.Rate)),
	}
}

func (t *calendarText) policy() (Policy, error) {
	return CalendarWindow{
		Rate: t.Rate, Resets: t.Resets, Zone: t.Zone, FirstWeekday: time.Weekday(t.FirstWeekday), FirstDay: t.FirstDay,
		FirstMonth: time.Month(t.FirstMonth), MaxReserved: t.MaxReserved.tokens(),
	}, nil
}

func (p CalendarWindow) scaled(times float64) Policy {
	scaleRate(times, &p.Rate, &p.MaxReserved)
	return p
}
