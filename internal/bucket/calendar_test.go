package bucket_test

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
)

// calendarEvent is what happens to a bucket at an instant: a window begins, or a policy takes the place of another.
type calendarEvent struct {
	at       int64
	rate     int64 // what arrives, and the capacity
	change   bucket.Change
	isChange bool
	before   int64 // the capacity before a change
	length   int64 // of the window that holds then
}

// calendarModel is a bucket of calendar windows in whole tokens. It is written from the promise: with each window that begins after
// ts the rate arrives, up to the rate, and a change of the policy converts the tokens.
type calendarModel struct {
	events []calendarEvent // in order
	value  int64
	ts     int64
	row    bool
}

// rate returns what a full bucket holds at an instant.
func (m *calendarModel) rate(now int64) (rate int64) {
	for _, e := range m.events {
		if e.at <= now {
			rate = e.rate
		}
	}
	return rate
}

// tokens returns what the bucket holds at an instant.
func (m *calendarModel) tokens(now int64) int64 {
	if !m.row {
		return m.rate(now)
	}
	held := min(m.value, m.rate(min(m.ts, now)))
	for _, e := range m.events {
		if e.at > m.ts && e.at <= now {
			held = e.apply(held)
		}
	}
	return held
}

// apply returns the tokens after the change.
func (e *calendarEvent) apply(held int64) int64 {
	if !e.isChange {
		return min(e.rate, held+e.rate)
	}
	switch {
	case e.change == bucket.Reset || held >= e.before:
		return e.rate
	case e.change == bucket.Add:
		held += e.rate - e.before
	}
	return min(held, e.rate)
}

// begin returns the last event up to an instant: there the window that holds began, or the policy. It returns how long that
// window is, too.
func (m *calendarModel) begin(now int64) (begin, length int64) {
	for _, e := range m.events {
		if e.at <= now {
			begin, length = e.at, e.length
		}
	}
	return begin, length
}

// bring brings a row back that a wrong clock has left in the future.
func (m *calendarModel) bring(now int64) {
	if begin, length := m.begin(now); m.row && m.ts > begin+length+minute {
		m.ts = begin
	}
}

// take takes cost if enough is there, and reports whether it was.
func (m *calendarModel) take(now, cost, lowest int64) bool {
	held := m.tokens(now) - cost
	if held < lowest {
		return false
	}
	begin, _ := m.begin(now)
	if m.ts = max(m.ts, begin); !m.row {
		m.ts = begin
	}
	m.value, m.row = held, true
	return true
}

// wait returns how long it takes until cost can be taken, or -1 when the policy changes before.
func (m *calendarModel) wait(now, cost, lowest int64) int64 {
	for i, e := range m.events {
		switch {
		case e.at <= now:
		case e.isChange, i+1 < len(m.events) && m.events[i+1].at == e.at:
			return -1
		case m.tokens(e.at)-cost >= lowest:
			return e.at - now
		}
	}
	return -1
}

// drawnCalendar is a calendar, the beginnings of its windows by package time, and its rate.
type drawnCalendar struct {
	bucket.Calendar
	begins []int64
	rate   int64
}

// isFirst reports whether a window of the calendar begins on a day.
func isFirst(c bucket.Calendar, day time.Time) bool {
	switch c.Days {
	case 1:
		return true
	case 7:
		return day.Weekday() == (time.Thursday+time.Weekday(c.First))%7
	default:
		last := day.AddDate(0, 1, -day.Day()).Day()
		return (int(day.Month())-int(c.Month))%int(c.Months) == 0 && day.Day() == min(int(c.First), last)
	}
}

// drawCalendar draws a calendar, with its begins over some years. Midnight exists once on each day of the zones.
func drawCalendar(t *testing.T, r *rand.Rand) drawnCalendar {
	t.Helper()
	zones := []string{"UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Antarctica/Troll", "Asia/Kathmandu"}
	c := drawnCalendar{rate: 1 + r.Int64N(20)}
	zone, err := time.LoadLocation(zones[r.IntN(len(zones))])
	require.NoError(t, err)
	switch c.Zone = zone; r.IntN(5) {
	case 0:
		c.Days = 1
	case 1:
		c.Days, c.First = 7, uint8(r.IntN(7))
	default:
		c.Months = []uint8{1, 3, 12}[r.IntN(3)]
		c.First, c.Month = uint8(1+r.IntN(31)), uint8(1+r.IntN(int(c.Months)))
	}
	first := time.UnixMicro(opening).UTC()
	for i := -400; i < 1100; i++ {
		day := time.Date(first.Year(), first.Month(), first.Day()+i, 0, 0, 0, 0, zone)
		if isFirst(c.Calendar, day) {
			c.begins = append(c.begins, day.UnixMicro())
		}
	}
	return c
}

// length returns how long the window is in which an instant lies.
func (c drawnCalendar) length(at int64) int64 {
	next := slices.IndexFunc(c.begins, func(begin int64) bool { return begin > at })
	if next < 1 {
		return 0
	}
	return c.begins[next] - c.begins[next-1]
}

// eraOf returns the calendar as an era.
func (c drawnCalendar) eraOf(from int64, change bucket.Change) bucket.Era {
	return bucket.Era{From: from, Change: change, Terms: bucket.Terms{
		Capacity: float64(c.rate), Rate: float64(c.rate), Step: day, Steps: 1, MaxOwed: float64(c.rate), Reserves: true, Shards: 1,
		Kind: c.Calendar,
	}}
}

// drawPolicies draws a policy that perhaps takes the place of another at an instant, or at the begin of a window.
func drawPolicies(t *testing.T, r *rand.Rand) (bucket.Terms, []calendarEvent) {
	t.Helper()
	of := []drawnCalendar{drawCalendar(t, r)}
	eras := []bucket.Era{of[0].eraOf(0, bucket.Keep)}
	for from := opening; r.IntN(3) > 0 && len(of) < 4; {
		from += day + int64(r.Uint64N(uint64(120*day)))
		next := drawCalendar(t, r)
		if r.IntN(3) == 0 {
			from = next.begins[slices.IndexFunc(next.begins, func(at int64) bool { return at > from })]
		}
		change := []bucket.Change{bucket.Keep, bucket.Add, bucket.Reset}[r.IntN(3)]
		eras = append(eras, next.eraOf(from, change))
		of = append(of, next)
	}
	terms := eras[0].Terms
	if len(eras) > 1 {
		terms = bucket.NewEras(eras).Holding(opening)
	}
	var events []calendarEvent
	for i, c := range of {
		since, until := int64(0), opening*2
		if i > 0 {
			since = eras[i].From
			events = append(events, calendarEvent{at: since, rate: c.rate, before: of[i-1].rate, isChange: true, change: eras[i].Change, length: c.length(since)})
		}
		if i+1 < len(of) {
			until = eras[i+1].From
		}
		for _, at := range c.begins { // what begins with a change arrives before it, under the policy before
			if at > since && at < until || at == until {
				events = append(events, calendarEvent{at: at, rate: c.rate, length: c.length(at)})
			}
		}
	}
	return terms, events
}

// TestCalendarWindowsAgreeWithTheExactModel takes random steps, two hundred in each history.
func TestCalendarWindowsAgreeWithTheExactModel(t *testing.T) {
	t.Parallel()
	testsize.EachSeed(t, calendarHistories)
}

func calendarHistories(t *testing.T, seed uint64) {
	t.Helper()
	waits, owed := 0, 0
	histories := testsize.Of[uint64](10, 15)
	for history := range histories {
		r := rand.New(rand.NewPCG(seed, history))
		terms, events := drawPolicies(t, r)
		memory, model, key := bucket.NewMemory(), &calendarModel{events: events}, bucket.Key{Name: "limit", Key: "key"}
		now := opening + int64(r.Uint64N(uint64(day)))
		for step := range 200 {
			if step == 100 && r.IntN(2) == 0 { // another definition in the code
				terms, model.events = drawPolicies(t, r)
			}
			now = nextInstant(r, model, now)
			cost, lowest := r.Int64N(12), -r.Int64N(3)*r.Int64N(30)
			at := model.decides(terms, now)
			before := *model
			model.bring(at)
			var want bool
			held := model.tokens(at)
			if cost > 0 {
				want = model.take(at, cost, lowest)
			} else { // which writes nothing
				want = held >= lowest
			}
			asks := []bucket.Ask{{Key: key, Terms: terms.At(now), Cost: float64(cost), Lowest: float64(lowest)}}
			answer := memory.Take(asks, now)[0]
			require.Equal(t, at, answer.Now, "history %d, step %d", history, step)
			require.Equal(t, want, answer.Allowed, "history %d, step %d", history, step)
			outlook := (&bucket.Ask{Terms: asks[0].Terms, Cost: float64(cost)}).Tell(&answer, float64(lowest), &bucket.Content{})
			left := held
			if want {
				left -= cost
			}
			require.InDelta(t, float64(left), outlook.Tokens, 0, "history %d, step %d", history, step)
			if wait := model.wait(at, cost, lowest); !want && wait >= 0 {
				require.Equal(t, time.Duration(wait)*time.Microsecond, outlook.RetryAfter, "history %d, step %d", history, step)
				waits++
			}
			if cost == 0 {
				*model = before
			}
			if left < 0 {
				owed++
			}
		}
	}
	require.Positive(t, min(waits, owed))
}

// decides returns the instant of a decision: if the row is of terms that begin within a minute, it is their first one.
func (m *calendarModel) decides(terms bucket.Terms, now int64) int64 {
	begin, length := m.begin(now)
	if !m.row || m.ts <= now || m.ts > begin+length+minute {
		return now
	}
	if since, _ := terms.At(now).At(m.ts).Span(); since-now <= minute {
		return max(now, since)
	}
	return now
}

// nextInstant moves the clock: a little, to the next event or beside it, over several, or back.
func nextInstant(r *rand.Rand, m *calendarModel, now int64) int64 {
	next := now
	switch r.IntN(8) {
	case 0, 1:
		next += int64(r.Uint64N(uint64(day)))
	case 2, 3, 4:
		for _, e := range m.events {
			if e.at > now+1 {
				next = e.at + int64(r.IntN(3)-1)
				break
			}
		}
	case 5:
		next += int64(r.Uint64N(uint64(40 * day)))
	case 6:
		next -= int64(r.Uint64N(uint64(2 * minute)))
	default:
		next -= int64(r.Uint64N(uint64(60 * day)))
	}
	return min(max(next, opening), opening+600*day)
}

// calendars are a calendar of each unit, with several first days.
var calendars = []bucket.Calendar{
	{Days: 1},
	{Days: 7},
	{Days: 7, First: 4},
	{Months: 1, First: 1, Month: 1},
	{Months: 1, First: 15, Month: 1},
	{Months: 1, First: 31, Month: 1},
	{Months: 3, First: 1, Month: 1},
	{Months: 3, First: 30, Month: 2},
	{Months: 12, First: 1, Month: 1},
	{Months: 12, First: 29, Month: 2},
}

// daysIn returns the first instant of each day in a zone, by what the clocks show each quarter of an hour. A day that is left out begins
// with the next one.
func daysIn(zone *time.Location, from, until time.Time) map[time.Time]int64 {
	days := make(map[time.Time]int64)
	y, m, d := from.In(zone).Date()
	next := time.Date(y, m, d+1, 0, 0, 0, 0, time.UTC)
	for at := from; !at.After(until); at = at.Add(15 * time.Minute) {
		y, m, d := at.In(zone).Date()
		for shown := time.Date(y, m, d, 0, 0, 0, 0, time.UTC); !next.After(shown); next = next.AddDate(0, 0, 1) {
			days[next] = at.UnixMicro()
		}
	}
	return days
}

// TestCalendarWindowsBeginWithTheirDay compares windows with the clocks of time zones in which midnights are left out or occur twice.
func TestCalendarWindowsBeginWithTheirDay(t *testing.T) {
	t.Parallel()
	for name, years := range map[string][2]int{
		"America/Sao_Paulo":    {2016, 2018}, // summer begins at midnight
		"America/Havana":       {2024, 2026}, // winter begins at one, which is midnight again
		"Asia/Beirut":          {2022, 2026},
		"Asia/Gaza":            {2022, 2024},
		"Australia/Lord_Howe":  {2025, 2027}, // half an hour
		"Antarctica/Troll":     {2025, 2027}, // two hours
		"America/Scoresbysund": {2023, 2025},
		"Pacific/Apia":         {2010, 2012}, // a day is left out
		"Pacific/Kiritimati":   {1993, 1995},
		"Pacific/Kwajalein":    {1992, 1994},
		"America/Toronto":      {1918, 1920}, // half past eleven is followed by half past twelve
		"Asia/Kathmandu":       {1985, 1987},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			zone, err := time.LoadLocation(name)
			require.NoError(t, err)
			until := time.Date(years[1]+1, time.January, 1, 0, 0, 0, 0, time.UTC)
			days := daysIn(zone, time.Date(years[0], time.January, 1, 0, 0, 0, 0, time.UTC), until)
			for _, c := range calendars {
				var want, got []int64
				for day, at := range days {
					if isFirst(c, day) {
						want = append(want, at)
					}
				}
				slices.Sort(want)
				c.Zone = zone
				for at := want[0]; at <= until.UnixMicro(); {
					terms := c.On(bucket.Terms{Kind: c}, at)
					for _, end := terms.Span(); at < min(end, until.UnixMicro()+1); at += terms.Step {
						got = append(got, at)
					}
				}
				require.Equal(t, slices.Compact(want), got, "%+v", c)
			}
		})
	}
}
