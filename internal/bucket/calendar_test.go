package bucket_test

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/bucket/buckettest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
)

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

// drawCalendar draws an era of windows of a calendar, with their begins over some years by package time. Midnight exists once on each day of
// the zones.
func drawCalendar(t *testing.T, r *rand.Rand, from int64, change bucket.Change) (bucket.Era, []int64) {
	t.Helper()
	zones := []string{"UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Antarctica/Troll", "Asia/Kathmandu"}
	zone, err := time.LoadLocation(zones[r.IntN(len(zones))])
	require.NoError(t, err)
	c := bucket.Calendar{Zone: zone}
	switch r.IntN(5) {
	case 0:
		c.Days = 1
	case 1:
		c.Days, c.First = 7, uint8(r.IntN(7))
	default:
		c.Months = []uint8{1, 3, 12}[r.IntN(3)]
		c.First, c.Month = uint8(1+r.IntN(31)), uint8(1+r.IntN(int(c.Months)))
	}
	var begins []int64
	first := time.UnixMicro(opening).UTC()
	for i := -400; i < 1100; i++ {
		day := time.Date(first.Year(), first.Month(), first.Day()+i, 0, 0, 0, 0, zone)
		if isFirst(c, day) {
			begins = append(begins, day.UnixMicro())
		}
	}
	rate := float64(1 + r.Int64N(20))
	return bucket.Era{From: from, Change: change, Terms: bucket.Terms{
		Capacity: rate, Rate: rate, Step: day, Steps: 1, MaxOwed: rate, Reserves: true, Shards: 1, Kind: c,
	}}, begins
}

// calendarEras are the policies of a limit, each of which takes the place of another at an instant, or at the begin of a window.
type calendarEras struct {
	list   []bucket.Era
	begins [][]int64
}

func drawCalendars(t *testing.T, r *rand.Rand) (eras calendarEras) {
	t.Helper()
	for from, change := int64(0), bucket.Keep; len(eras.list) == 0 || r.IntN(3) > 0 && len(eras.list) < 4; {
		era, begins := drawCalendar(t, r, from, change)
		if r.IntN(3) == 0 && from > 0 {
			era.From = begins[slices.IndexFunc(begins, func(at int64) bool { return at > from })]
		}
		eras.list, eras.begins = append(eras.list, era), append(eras.begins, begins)
		from, change = max(era.From, opening)+day+int64(r.Uint64N(uint64(120*day))), []bucket.Change{bucket.Keep, bucket.Carry, bucket.Add, bucket.Reset}[r.IntN(4)]
	}
	return eras
}

func (e calendarEras) exactly() buckettest.ExactEras {
	return buckettest.ExactlyEras(e.list, e.begins...)
}

// next moves the clock: a little, to the next change or beside it, over several, or back. A clock that is wrong by days is drawn where no era
// begins.
func (e calendarEras) next(r *rand.Rand, era int, now int64) int64 {
	next := now
	switch r.IntN(8) {
	case 0, 1:
		next += int64(r.Uint64N(uint64(day)))
	case 2, 3:
		begins := e.begins[era]
		next = begins[slices.IndexFunc(begins, func(at int64) bool { return at > now+1 })] + int64(r.IntN(3)-1)
	case 4:
		if era+1 < len(e.list) {
			next = max(now, e.list[era+1].From+int64(r.IntN(3)-1))
		}
	case 5:
		next += int64(r.Uint64N(uint64(40 * day)))
	case 6:
		next -= int64(r.Uint64N(uint64(minute)))
	default:
		if len(e.list) == 1 {
			next -= int64(r.Uint64N(uint64(60 * day)))
		}
	}
	return min(max(next, opening), opening+600*day)
}

// TestCalendarWindowsAgreeWithTheExactModel takes random steps, two hundred in each history.
func TestCalendarWindowsAgreeWithTheExactModel(t *testing.T) {
	t.Parallel()
	testsize.EachSeed(t, func(t *testing.T, seed uint64) {
		t.Helper()
		waits, owed := 0, 0
		for history := range testsize.Of[uint64](10, 15) {
			r := rand.New(rand.NewPCG(seed, history))
			eras := drawCalendars(t, r)
			memory, model, now := bucket.NewMemory(), buckettest.NewExactBucket(eras.exactly()), opening+int64(r.Uint64N(uint64(day)))
			for step := range 200 {
				if step == 100 && r.IntN(2) == 0 && model.IsThere() { // another definition in the code
					eras = drawCalendars(t, r)
					model.Redefine(eras.exactly())
				}
				now = eras.next(r, model.Eras.At(now), now)
				ask := bucket.Ask{Key: bucket.Key{Name: "limit"}, Terms: bucket.NewEras(eras.list).Holding(opening).At(now)}
				ask.Cost, ask.Lowest = float64(r.Int64N(12)), float64(-r.Int64N(3)*r.Int64N(30))
				answer := memory.Take([]bucket.Ask{ask}, now)[0]
				before := model.Clone()
				at, _ := model.Bring(answer.Now)
				require.Equal(t, at, answer.Now, "history %d, step %d", history, step)
				require.True(t, at >= now && at <= now+minute)
				spare := buckettest.Spare(model.Tokens(at), ask.Cost, ask.Lowest)
				require.Equal(t, spare >= 0, answer.Allowed, "history %d, step %d", history, step)
				if answer.Allowed {
					model.Spend(ask.Cost, at)
				}
				ask.Terms = ask.Terms.At(at)
				outlook := ask.Tell(&answer, ask.Lowest, &bucket.Content{})
				require.Zero(t, buckettest.Off(outlook.Tokens, model.Tokens(at)), "history %d, step %d", history, step)
				if wait := outlook.RetryAfter.Microseconds(); !answer.Allowed && at+wait < opening+600*day {
					require.GreaterOrEqual(t, buckettest.Spare(model.Tokens(at+wait), ask.Cost, ask.Lowest), 0.0)
					require.Less(t, buckettest.Spare(model.Tokens(at+wait-1), ask.Cost, ask.Lowest), 0.0)
					waits++
				}
				if outlook.Tokens < 0 {
					owed++
				}
				if ask.Cost == 0 || !answer.Allowed && len(eras.list) > 1 && !before.IsWrong(at) { // which writes nothing, but a right clock in place of a wrong one
					model = before
				}
			}
		}
		require.Positive(t, min(waits, owed))
	})
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
