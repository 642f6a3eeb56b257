package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

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
// A window begins at local midnight. When that is, the database server's time zone data say, so that all processes agree, and
// daylight saving and the lengths of months are right. A local midnight that does not exist is the first instant after it,
// and of one that occurs twice the first counts. A [FixedWindow] of 24 hours, in contrast, begins at another local time after
// each change of the clocks.
//
// A Limiter asks the server for the begins when it first uses a calendar, in one more round trip, which in a transaction of
// yours is part of that, and again every hour: data that have changed on the server hold within an hour. When the server
// does not know the zone, calls return [ErrInvalidLimit], take nothing, and leave the transaction usable.
//
// RetryAfter, ResetAfter and [Value.At] are exact for eight windows at least. Further on they are estimated with windows of
// average length. [Request.Full] and [Simulation] ask no server: they go by the time zone data that this program finds, as
// package time does.
//
// A reservation may reach into the next window, and not further.
type CalendarWindow struct {
	// Rate is the number of tokens in each window: from 1e-9 to 1e12. It is the capacity, too.
	Rate float64
	// Resets is how long a window is. There is no default.
	Resets Calendar
	// Zone is the name of a time zone that the database server knows, such as "Europe/Berlin": one of those in
	// pg_timezone_names. Defaults to "UTC".
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
	c, err := p.calendar()
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
	t.Calendar, t.Step, t.Steps = c, Day.Microseconds(), 1 // the step is none before it is known when windows begin
	return t, nil
}

// calendar checks what says when the windows begin.
func (p CalendarWindow) calendar() (bucket.Calendar, error) {
	units := map[Calendar]bucket.Unit{
		Daily: bucket.OfDay, Weekly: bucket.OfWeek, Monthly: bucket.OfMonth, Quarterly: bucket.OfQuarter, Yearly: bucket.OfYear,
	}
	c := bucket.Calendar{Zone: p.zone(), Unit: units[p.Resets], Weekday: uint8(p.FirstWeekday)}
	invalid := func(format string, args ...any) (bucket.Calendar, error) {
		return bucket.Calendar{}, fmt.Errorf(format, args...)
	}
	switch {
	case p.Resets == "":
		return invalid("its Resets is not set; use Daily, Weekly, Monthly, Quarterly or Yearly")
	case c.Unit == 0:
		return invalid("its Resets is %.20q; use Daily, Weekly, Monthly, Quarterly or Yearly", string(p.Resets))
	case p.FirstWeekday < time.Sunday || p.FirstWeekday > time.Saturday:
		return invalid("its FirstWeekday is %d; use time.Sunday to time.Saturday", int(p.FirstWeekday))
	case p.FirstWeekday != time.Sunday && p.Resets != Weekly:
		return invalid("it has a FirstWeekday, which is for Weekly windows; leave it out of one for each %s", p.Resets)
	case p.FirstDay < 0 || p.FirstDay > 31:
		return invalid("its FirstDay is %d; it must be from 1 to 31, or 0 for 1", p.FirstDay)
	case p.FirstDay != 0 && c.Months() == 0:
		return invalid("it has a FirstDay, which is for Monthly, Quarterly and Yearly windows; leave it out of one for each %s", p.Resets)
	case p.FirstMonth < 0 || p.FirstMonth > time.December:
		return invalid("its FirstMonth is %d; use time.January to time.December, or 0 for January", int(p.FirstMonth))
	case p.FirstMonth != 0 && c.Months() < 3:
		return invalid("it has a FirstMonth, which is for Quarterly and Yearly windows; leave it out of one for each %s", p.Resets)
	}
	if c.Months() > 0 {
		c.Day = uint8(max(p.FirstDay, 1))
		c.Month = uint8((max(int(p.FirstMonth), 1)-1)%c.Months() + 1) // February, May, August and November say the same
	}
	return c, checkZone(c.Zone)
}

// maxZoneBytes bounds the name of a time zone. The longest that there is has 32 bytes.
const maxZoneBytes = 64

var (
	zoneName = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9_+-]*(/[A-Za-z0-9_+-]+)*$`)
	// offsetZone are the names with digits that are of zones. All others are what POSIX makes of a misspelt name: "Berlin+3"
	// is three hours behind UTC to a server, whatever the letters say.
	offsetZone = regexp.MustCompile(`^(GMT[+-]?0|Etc/GMT([+-]?0|\+([1-9]|1[0-2])|-([1-9]|1[0-4]))|EST5EDT|CST6CDT|MST7MDT|PST8PDT)$`)
)

// checkZone returns an error when no zone has such a name, as far as that can be told without the server.
func checkZone(name string) error {
	switch {
	case name == "Local", strings.EqualFold(name, "localtime"):
		return fmt.Errorf("its Zone is %q, which is another zone on each machine; name the place, such as %q", name, "Europe/Berlin")
	case len(name) > maxZoneBytes || !zoneName.MatchString(name):
		return fmt.Errorf("its Zone is %.80q; use the name of a time zone, such as %q", name, "Europe/Berlin")
	case strings.ContainsAny(name, "0123456789") && !offsetZone.MatchString(name):
		return fmt.Errorf("its Zone is %q, which is an offset and no time zone; use a name such as %q, or %q, which is three hours ahead of UTC", name, "Europe/Berlin", "Etc/GMT-3")
	}
	return nil
}

// errNoSuchZone is what the server, or this program, says of a zone that it does not know.
func errNoSuchZone(who, zone string) error {
	return fmt.Errorf("%w: %s knows no time zone %q; use one of the names in pg_timezone_names, such as %q", ErrInvalidLimit, who, zone, "Europe/Berlin")
}

// maxBeyond bounds how often a call is made again because the database's clock was beyond what was known of a calendar.
const maxBeyond = 3

// onCalendar has the asks of the call that follow a calendar know when windows begin. beyond are the asks as they were
// answered with ErrUnknownWindows.
func (c *call) onCalendar(ctx context.Context, l *Limiter, beyond []bucket.Ask) error {
	if l.pool != nil && c.change == nil && l.batcher.IsClosed() {
		return nil // the call says so
	}
	for i := range c.Asks {
		a, of := &c.Asks[i], c.plan.of[i].limit
		if !of.terms().FollowsCalendar() {
			continue
		}
		terms := of.termsFor(a.Key.Key)
		if beyond == nil {
			if known, ok := l.store.KnownOnCalendar(terms); ok {
				a.Terms = known
				continue
			}
		}
		var not bucket.Terms
		if beyond != nil {
			not = beyond[i].Terms
		}
		var err error
		if a.Terms, err = askCalendar(ctx, l, terms, not); err != nil {
			return err
		}
	}
	return nil
}

// askCalendar asks the server when the windows of terms begin.
func askCalendar(ctx context.Context, l *Limiter, terms, not bucket.Terms) (bucket.Terms, error) {
	ctx, cancel := l.bounded(ctx)
	defer cancel()
	if err := l.pass(ctx, "", false, true); err != nil {
		return terms, err
	}
	known, err := l.session.OnCalendar(ctx, terms, nil, not)
	if err != nil {
		return terms, explainZone(err)
	}
	return known, nil
}

// explainZone returns ErrInvalidLimit for a zone that the server does not know, and every other err as it is.
func explainZone(err error) error {
	var unknown *store.ZoneError
	if errors.As(err, &unknown) {
		return errNoSuchZone("the database server", unknown.Zone)
	}
	return err
}

// runBeyond runs the call again after it was answered with ErrUnknownWindows: nothing was taken.
func (c *call) runBeyond(ctx context.Context, l *Limiter, err error) error {
	for range maxBeyond {
		if slices.ContainsFunc(c.Asks, func(a bucket.Ask) bool { return a.IsInOtherMode() }) {
			err = c.arrangeAgain(ctx, l)
		} else {
			err = c.askCalendars(ctx, l)
		}
		if err != nil {
			return err
		}
		again := &call{plan: c.plan, change: c.change, began: c.began}
		again.Verb, again.Asks, again.Reserve, again.Look, again.UpTo = c.Verb, c.Asks, c.Reserve, c.Look, c.UpTo
		err = again.run(ctx, l)
		c.Answers, c.Reservation, c.Taken = again.Answers, again.Reservation, again.Taken
		if !errors.Is(err, store.ErrUnknownWindows) {
			break
		}
	}
	return err
}

// askCalendars asks for the calendars of the call again.
func (c *call) askCalendars(ctx context.Context, l *Limiter) error {
	return c.onCalendar(ctx, l, slices.Clone(c.Asks))
}

// setCalendars has the terms that the limits of a reservation have now know when windows begin.
func setCalendars(ctx context.Context, tx *Limiter, r *store.Reservation) error {
	for i, t := range r.TermsNow {
		if !t.FollowsCalendar() {
			continue
		}
		known, err := tx.session.OnCalendar(ctx, t, &r.NowUs, bucket.Terms{})
		if err != nil {
			return explainZone(err)
		}
		r.TermsNow[i] = known
	}
	return nil
}

// localCalendars knows when windows begin by the time zone data of this program.
type localCalendars struct {
	tables map[bucket.Calendar]*bucket.Table
	eras   map[bucket.Terms]*bucket.Eras
}

// at returns terms that follow a calendar as those that hold at an instant.
func (l *localCalendars) at(t bucket.Terms, now int64) (bucket.Terms, error) {
	key := t
	if t.Eras != nil {
		key = bucket.Terms{Eras: t.Eras}
	}
	for _, c := range t.Calendars() {
		if table := l.tables[c]; table != nil && table.Covers(c, now) {
			continue
		}
		zone, err := time.LoadLocation(c.Zone)
		if err != nil {
			return t, errNoSuchZone("this program", c.Zone)
		}
		if l.tables == nil || len(l.tables) >= maxNames {
			l.tables = make(map[bucket.Calendar]*bucket.Table)
		}
		l.tables[c] = c.LocalTable(zone, now)
		l.eras = nil
	}
	if l.eras == nil || len(l.eras) >= maxNames {
		l.eras = make(map[bucket.Terms]*bucket.Eras)
	}
	eras := l.eras[key]
	if eras == nil {
		eras = key.OnCalendar(func(c bucket.Calendar) *bucket.Table { return l.tables[c] })
		l.eras[key] = eras
	}
	return t.Within(eras.Holding(now)), nil
}

// set has the asks of a plan that follow a calendar know when windows begin.
func (l *localCalendars) set(p *plan, now int64) error {
	for i := range p.asks {
		if a := &p.asks[i]; a.Terms.FollowsCalendar() {
			known, err := l.at(a.Terms, now)
			if err != nil {
				return err
			}
			a.Terms = known
		}
	}
	return nil
}
