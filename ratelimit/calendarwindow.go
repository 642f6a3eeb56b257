package ratelimit

import (
	"fmt"
	"regexp"
	"strings"
	"time"
	_ "time/tzdata" // for machines without time zone data

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/store"
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

// CalendarWindow gives Rate tokens in each day, week, month, quarter or year of a time zone: "1000 a month, from midnight of
// the 1st in Berlin". Unused tokens do not roll over. Owed tokens are repaid by Rate in each window.
//
// A window begins at local midnight, so daylight saving and the lengths of months are right. If that midnight does not exist,
// the window begins at the first instant after it. If it occurs twice, the first counts. A [FixedWindow] of 24 hours, in
// contrast, starts at another local time after each change of the clocks.
//
// Windows follow the time zone data that [time.LoadLocation] finds on the machine, or otherwise the data in the program
// (package time/tzdata, about 450 KB). If two programs have different data for a zone, their windows can begin hours apart
// until both have the new data.
//
// A reservation can reach into the next window, but not further.
type CalendarWindow struct {
	// Rate is the number of tokens in each window: from 1e-9 to 1e12. It is also the capacity.
	Rate float64
	// Resets is the length of a window. It is required.
	Resets Calendar
	// Zone is the name of a time zone, such as "Europe/Berlin". NewLimit returns ErrInvalidLimit for a name that is not in the
	// program's time zone data. Defaults to "UTC".
	Zone string
	// FirstWeekday is the day on which a Weekly window begins. The zero value is Sunday.
	FirstWeekday time.Weekday
	// FirstDay is the day of the month on which a Monthly, Quarterly or Yearly window begins, from 1 to 31. In a shorter month
	// it is the last day. Defaults to 1.
	FirstDay int
	// FirstMonth is the month in which a Yearly window begins. A Quarterly window begins in this month and every third month
	// after it. Defaults to January.
	FirstMonth time.Month
	// MaxReserved is the maximum number of tokens that the bucket can owe to reservations: at most Rate, because reservations
	// reach only into the next window. Defaults to Rate. None and NoReservations are as in [TokenBucket].
	MaxReserved float64
}

// String returns the policy as text, such as "1000 per month in Europe/Berlin". It adds the first day if that is not the
// default: "1000 per week in UTC from Monday on".
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
	return text + describeRest(p.MaxReserved, 1, 0)
}

// zone returns the time zone's name.
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
		return bucket.Terms{}, fmt.Errorf("its MaxReserved is %v; it must be up to its Rate of %v, as a reservation reaches into the next window only", p.MaxReserved, p.Rate)
	}
	t.Kind, t.Step, t.Steps = c, length.Microseconds(), 1 // On sets the Step of an instant
	return t, nil
}

// calendar returns the calendar of the windows, and their approximate length. It checks the fields that determine when they
// begin.
func (p CalendarWindow) calendar() (c bucket.Calendar, length time.Duration, err error) {
	switch p.Resets {
	case Daily:
		c.Days, length = 1, Day
	case Weekly:
		c.Days, length = 7, Week
	case Monthly:
		c.Months, length = 1, 30*Day
	case Quarterly:
		c.Months, length = 3, 91*Day
	case Yearly:
		c.Months, length = 12, 365*Day
	}
	invalid := func(format string, args ...any) (bucket.Calendar, time.Duration, error) {
		return bucket.Calendar{}, 0, fmt.Errorf(format, args...)
	}
	switch {
	case p.Resets == "":
		return invalid("its Resets is not set; use Daily, Weekly, Monthly, Quarterly or Yearly (in a file: day, week, month, quarter or year)")
	case length == 0:
		return invalid("its Resets is %.20q; use Daily, Weekly, Monthly, Quarterly or Yearly (in a file: day, week, month, quarter or year)", string(p.Resets))
	case p.FirstWeekday < time.Sunday || p.FirstWeekday > time.Saturday:
		return invalid("its FirstWeekday is %d; use time.Sunday to time.Saturday", int(p.FirstWeekday))
	case p.FirstWeekday != time.Sunday && p.Resets != Weekly:
		return invalid("it has a FirstWeekday, which is for Weekly windows; leave it out of one for each %s", p.Resets)
	case p.FirstDay < 0 || p.FirstDay > 31:
		return invalid("its FirstDay is %d; it must be from 1 to 31, or 0 for 1", p.FirstDay)
	case p.FirstDay != 0 && c.Months == 0:
		return invalid("it has a FirstDay, which is for Monthly, Quarterly and Yearly windows; leave it out of one for each %s", p.Resets)
	case p.FirstMonth < 0 || p.FirstMonth > time.December:
		return invalid("its FirstMonth is %d; use time.January to time.December, or 0 for January", int(p.FirstMonth))
	case p.FirstMonth != 0 && c.Months < 3:
		return invalid("it has a FirstMonth, which is for Quarterly and Yearly windows; leave it out of one for each %s", p.Resets)
	}
	if c.Months > 0 {
		c.First = uint8(max(p.FirstDay, 1))
		c.Month = uint8(max(p.FirstMonth, 1)-1)%c.Months + 1 // February, May, August and November make the same quarters
	} else {
		c.First = uint8(p.FirstWeekday+7-time.Thursday) % c.Days // 1970 began on a Thursday
	}
	c.Zone, err = zoneOf(p.zone())
	return c, length, err
}

// zoneName matches the form of a time zone's name. A file system would also accept "Europe//Berlin".
var zoneName = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9_+-]*(/[A-Za-z0-9_+-]+)*$`)

// zoneOf returns the time zone called name, or an error.
func zoneOf(name string) (zone *time.Location, err error) {
	if name == "Local" || strings.EqualFold(name, "localtime") {
		return nil, fmt.Errorf("its Zone is %q, which is another zone on each machine; name the place, such as %q", name, "Europe/Berlin")
	}
	if zoneName.MatchString(name) {
		zone = store.Zone(name)
	}
	if zone == nil {
		err = fmt.Errorf("this program knows no time zone %.80q; use the name of one, such as %q, or %q, which is three hours ahead of UTC",
			name, "Europe/Berlin", "Etc/GMT-3")
	}
	return zone, err
}

// calendarText is a CalendarWindow as text.
type calendarText struct {
	Kind         Kind     `json:"kind"`
	Rate         float64  `json:"rate"`
	Resets       Calendar `json:"resets"`
	Zone         string   `json:"zone,omitempty"`
	FirstWeekday weekday  `json:"first_weekday,omitzero"`
	FirstDay     int      `json:"first_day,omitempty"`
	FirstMonth   month    `json:"first_month,omitzero"`
	MaxReserved  *maxOwed `json:"max_reserved,omitempty"`
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
