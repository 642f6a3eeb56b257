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

// Calendar is a part of the calendar that a [CalendarWindow] is as long as.
type Calendar string

const (
	Daily     Calendar = "day"
	Weekly    Calendar = "week"
	Monthly   Calendar = "month"
	Quarterly Calendar = "quarter"
	Yearly    Calendar = "year"
)

// CalendarWindow gives Rate tokens in each day, week, month, quarter or year of a time zone: "1000 a month, which begin on
// the 1st at midnight in Berlin". What is left of a window is gone with it. What is owed is repaid by Rate for each window.
//
// A window begins at local midnight, so daylight saving and the lengths of months are right. A local midnight that does not exist
// is the first instant after it, and of one that occurs twice the first counts. A [FixedWindow] of 24 hours, in contrast, begins
// at another local time after each change of the clocks.
//
// The begins follow the time zone data of this program, as [time.LoadLocation] finds them: those of the machine, and otherwise
// those in the program, which package time/tzdata adds (about 450 KB). Two programs with different data can disagree about a
// zone whose law has changed. Then their windows begin up to some hours apart, until both have the new data.
//
// A reservation may reach into the next window, and not further.
type CalendarWindow struct {
	// Rate is the number of tokens in each window: from 1e-9 to 1e12. It is the capacity, too.
	Rate float64
	// Resets is how long a window is. There is no default.
	Resets Calendar
	// Zone is the name of a time zone, such as "Europe/Berlin", as the time zone data of this program have it. NewLimit returns
	// ErrInvalidLimit for a name that they do not have. Defaults to "UTC".
	Zone string
	// FirstWeekday is the day on which a Weekly window begins. Its zero value is Sunday.
	FirstWeekday time.Weekday
	// FirstDay is the day of the month on which a Monthly, Quarterly or Yearly window begins, from 1 to 31: in a month
	// that has fewer days, its last. Defaults to 1.
	FirstDay int
	// FirstMonth is the month in which a Yearly window begins, and a Quarterly one: with it every third. Defaults to January.
	FirstMonth time.Month
	// MaxReserved is how many tokens Reserve may owe: up to Rate, as it reaches into the next window only. Defaults to
	// Rate. NoDebt and NoReservations are as in [TokenBucket].
	MaxReserved float64
}

// String returns the policy in words, as in "1000 per month in Europe/Berlin", and from which day on where that is not the
// first: "1000 per week in UTC from Monday on".
func (p CalendarWindow) String() string {
	text := fmt.Sprintf("%s per %s in %s", words.Number(p.Rate), p.Resets, p.zone())
	day, month := max(p.FirstDay, 1), max(p.FirstMonth, time.January)
	switch {
	case p.Resets == Weekly && p.FirstWeekday != time.Sunday:
		return fmt.Sprintf("%s from %v on", text, p.FirstWeekday)
	case month != time.January:
		return fmt.Sprintf("%s from %v %d on", text, month, day)
	case day != 1:
		return fmt.Sprintf("%s from day %d on", text, day)
	}
	return text
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
	debt := p.MaxReserved
	if debt == 0 {
		debt = p.Rate
	}
	t, err := compile(p.Rate, Day, p.Rate, debt, 1) // a Day or a year: the numbers have the same bounds
	if err != nil {
		return bucket.Terms{}, err
	}
	if p.MaxReserved > p.Rate {
		return bucket.Terms{}, fmt.Errorf("its MaxReserved is %v; it must be up to its Rate of %v, as a reservation reaches into the next window only", p.MaxReserved, p.Rate)
	}
	t.Kind, t.Step, t.Steps = c, length.Microseconds(), 1 // On sets the Step of an instant
	return t, nil
}

// calendar returns the calendar of the windows, and about how long they are. It checks the fields that say when they begin.
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
		return invalid("its Resets is not set; use Daily, Weekly, Monthly, Quarterly or Yearly")
	case length == 0:
		return invalid("its Resets is %.20q; use Daily, Weekly, Monthly, Quarterly or Yearly", string(p.Resets))
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
		c.Month = uint8(max(p.FirstMonth, 1)-1)%c.Months + 1 // February, May, August and November say the same
	} else {
		c.First = uint8(p.FirstWeekday+7-time.Thursday) % c.Days // 1970 began on a Thursday
	}
	c.Zone, err = zoneOf(p.zone())
	return c, length, err
}

// zoneName is the form of the names of time zones. A file system takes "Europe//Berlin", too.
var zoneName = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9_+-]*(/[A-Za-z0-9_+-]+)*$`)

// zoneOf returns the time zone of a name.
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
