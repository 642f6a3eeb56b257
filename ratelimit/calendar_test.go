package ratelimit

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
)

// isFirst reports whether a window of the calendar begins on a day.
func isFirst(c calendar, day time.Time) bool {
	switch c.days {
	case 1:
		return true
	case 7:
		return day.Weekday() == (time.Thursday+time.Weekday(c.first))%7
	default:
		last := day.AddDate(0, 1, -day.Day()).Day()
		return (int(day.Month())-int(c.month))%int(c.months) == 0 && day.Day() == min(int(c.first), last)
	}
}

// calendarsIn returns a calendar of each unit, with several first days.
func calendarsIn(zone *time.Location) []calendar {
	return []calendar{
		{days: 1, zone: zone},
		{days: 7, zone: zone},
		{days: 7, first: 4, zone: zone},
		{months: 1, first: 1, month: 1, zone: zone},
		{months: 1, first: 15, month: 1, zone: zone},
		{months: 1, first: 31, month: 1, zone: zone},
		{months: 3, first: 1, month: 1, zone: zone},
		{months: 3, first: 30, month: 2, zone: zone},
		{months: 12, first: 1, month: 1, zone: zone},
		{months: 12, first: 29, month: 2, zone: zone},
	}
}

// daysIn returns the first instant of each day in a zone, by what the clocks show each quarter of an hour. A day that
// is left out begins with the next one.
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

// TestCalendarWindowsBeginWithTheirDay compares windows with the clocks of time zones in which midnights are left out
// or occur twice.
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
			for _, c := range calendarsIn(zone) {
				var want, got []int64
				for day, at := range days {
					if isFirst(c, day) {
						want = append(want, at)
					}
				}
				slices.Sort(want)
				for i := c.Index(want[0]); c.Begin(i) <= until.UnixMicro(); i++ {
					got = append(got, c.Begin(i))
					require.Equal(t, c.Begin(i+1) > c.Begin(i), c.Index(c.Begin(i)) == i, "%+v", c)
				}
				require.Equal(t, slices.Compact(want), slices.Compact(got), "%+v", c)
				require.Equal(t, c, windowsOf(c.String()))
			}
		})
	}
}

// TestACalendarInAnUnknownZone promises that a reservation of another program has windows of the length that is stored.
func TestACalendarInAnUnknownZone(t *testing.T) {
	t.Parallel()
	require.Nil(t, windowsOf("1 0 0 0 Europe/Atlantis"))
	require.Nil(t, windowsOf(""))
}

// TestStepsAgreeWithCalendars promises that what a statement computes from the Step and the Phase of an instant, for a
// row and a time of their span, is what the calendar says.
func TestStepsAgreeWithCalendars(t *testing.T) {
	t.Parallel()
	testkit.EachSeed(t, func(t *testing.T, seed uint64) {
		t.Helper()
		r := rand.New(rand.NewPCG(seed, 0))
		for _, name := range []string{"UTC", "Europe/Berlin", "America/New_York", "America/Sao_Paulo", "America/Havana", "Pacific/Apia", "Africa/Casablanca"} {
			zone, err := zoneOf(name)
			require.NoError(t, err)
			for _, c := range calendarsIn(zone) {
				bare := bucket.Terms{Kind: bucket.Steps{}, Windows: c, Capacity: 10, Rate: 10, Steps: 1, Step: c.mean()}
				for range testkit.Sized(20, 200) {
					at := time.Date(2010+r.IntN(20), time.January, 1+r.IntN(366), r.IntN(24), r.IntN(60), 0, 0, time.UTC).UnixMicro()
					if r.IntN(2) == 0 {
						at = c.Begin(c.Index(at)) - int64(r.IntN(2))
					}
					terms := bare.On(at)
					since, until := terms.Span()
					require.True(t, since <= at && at < until, "%s, %+v, %d", zone, c, at)
					require.Contains(t, []int64{c.Begin(c.Index(at)), c.Begin(c.Index(since))}, since)
					steps := terms
					steps.Windows = nil
					ts, now := since+r.Int64N(until-since), at
					if ts == at || r.IntN(2) == 0 {
						now = since + r.Int64N(until-since)
					}
					require.Equal(t, bare.Begin(now), steps.Begin(now))
					s := bucket.State{Value: float64(r.IntN(60) - 50), TS: ts, Capacity: 10}
					require.Equal(t, bare.Kind.Tokens(bare, s, now), steps.Kind.Tokens(steps, s, now))
					require.Equal(t, bare.Kind.Wait(bare, s, now, 10, 0), terms.Kind.Wait(terms, s, now, 10, 0))
				}
			}
		}
	})
}
