package ratelimit

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestCalendarWindow(t *testing.T) {
	t.Parallel()

	t.Run("SaysInWordsWhenItBegins", func(t *testing.T) {
		t.Parallel()
		for want, p := range map[string]CalendarWindow{
			"1000 per month in Europe/Berlin":                    {Rate: 1000, Resets: Monthly, Zone: "Europe/Berlin"},
			"10 per day in UTC":                                  {Rate: 10, Resets: Daily},
			"5 per week in UTC":                                  {Rate: 5, Resets: Weekly},
			"5 per week in UTC from Monday on":                   {Rate: 5, Resets: Weekly, FirstWeekday: time.Monday},
			"7 per month in Asia/Tokyo from day 31 on":           {Rate: 7, Resets: Monthly, Zone: "Asia/Tokyo", FirstDay: 31},
			"2 per quarter in UTC":                               {Rate: 2, Resets: Quarterly, FirstMonth: time.January, FirstDay: 1},
			"0.5 per year in Europe/London from April 6 on":      {Rate: 0.5, Resets: Yearly, Zone: "Europe/London", FirstMonth: time.April, FirstDay: 6},
			"3 per quarter in Etc/GMT-14 from February 1 on":     {Rate: 3, Resets: Quarterly, Zone: "Etc/GMT-14", FirstMonth: time.February},
			"4 per year in America/Port-au-Prince from day 2 on": {Rate: 4, Resets: Yearly, Zone: "America/Port-au-Prince", FirstDay: 2},
		} {
			limit, err := NewLimit("limit", p)
			require.NoError(t, err, want)
			require.Equal(t, want, limit.Policy().String())
			require.InDelta(t, p.Rate, limit.Capacity(), 0)
		}
	})

	t.Run("SaysWhatIsWrong", func(t *testing.T) {
		t.Parallel()
		monthly := func(change func(p *CalendarWindow)) CalendarWindow {
			p := CalendarWindow{Rate: 10, Resets: Monthly}
			change(&p)
			return p
		}
		zone := func(name string) CalendarWindow { return monthly(func(p *CalendarWindow) { p.Zone = name }) }
		for _, c := range []struct {
			policy CalendarWindow
			want   string
		}{
			{CalendarWindow{Rate: 1}, "Resets is not set"},
			{CalendarWindow{Rate: 1, Resets: "fortnight"}, `Resets is "fortnight"`},
			{CalendarWindow{Rate: 0, Resets: Daily}, "Rate is 0"},
			{CalendarWindow{Rate: -1, Resets: Daily}, "Rate is -1"},
			{CalendarWindow{Rate: 1, Resets: Daily, FirstDay: 2}, "FirstDay, which is for Monthly, Quarterly and Yearly windows; leave it out of one for each day"},
			{CalendarWindow{Rate: 1, Resets: Weekly, FirstMonth: 2}, "FirstMonth, which is for Quarterly"},
			{CalendarWindow{Rate: 1, Resets: Weekly, FirstWeekday: 7}, "FirstWeekday is 7"},
			{monthly(func(p *CalendarWindow) { p.FirstWeekday = time.Monday }), "FirstWeekday, which is for Weekly"},
			{monthly(func(p *CalendarWindow) { p.FirstMonth = time.March }), "FirstMonth, which is for Quarterly"},
			{monthly(func(p *CalendarWindow) { p.FirstDay = 32 }), "FirstDay is 32"},
			{monthly(func(p *CalendarWindow) { p.FirstDay = -1 }), "FirstDay is -1"},
			{CalendarWindow{Rate: 1, Resets: Yearly, FirstMonth: 13}, "FirstMonth is 13"},
			{monthly(func(p *CalendarWindow) { p.MaxReserved = 11 }), "up to its Rate of 10"},
			{zone("Local"), "another zone on each machine"},
			{zone("LOCALTIME"), "another zone on each machine"},
			{zone("europe/berlin"), "knows no time zone"},
			{zone("Europe"), "knows no time zone"},
			{zone("Foo+3"), `knows no time zone "Foo+3"`},
			{zone("Europe/Berlni+1"), "knows no time zone"},
			{zone("UTC-5"), "three hours ahead of UTC"},
			{zone("+03:00"), "knows no time zone"},
			{zone("5"), "knows no time zone"},
			{zone("Europe/Berlin\x00"), "knows no time zone"},
			{zone("Europe//Berlin"), "knows no time zone"},
			{zone("../etc/passwd"), "knows no time zone"},
			{zone("<+03>-3"), "knows no time zone"},
			{zone("Straße"), "knows no time zone"},
			{zone("A" + string(make([]byte, 100))), "knows no time zone"},
		} {
			_, err := NewLimit("limit", c.policy)
			require.ErrorIs(t, err, ErrInvalidLimit)
			require.ErrorContains(t, err, c.want)
		}
		for _, name := range []string{"EST5EDT", "Etc/GMT+12", "Etc/GMT-14", "GMT0", "GMT+0", "America/Argentina/ComodRivadavia"} {
			_, err := NewLimit("limit", zone(name))
			require.NoError(t, err, name)
		}
	})
}

// A Simulation and a full Value have the windows of every instant.
func TestCalendarWindowWithoutAServer(t *testing.T) {
	t.Parallel()
	berlin, err := time.LoadLocation("Europe/Berlin")
	require.NoError(t, err)
	limit := Define("month", CalendarWindow{Rate: 10, Resets: Monthly, Zone: "Europe/Berlin"})
	march, april, may := time.Date(2026, 3, 1, 0, 0, 0, 0, berlin), time.Date(2026, 4, 1, 0, 0, 0, 0, berlin), time.Date(2026, 5, 1, 0, 0, 0, 0, berlin)

	t.Run("Simulation", func(t *testing.T) {
		t.Parallel()
		s, err := NewSimulation(Config{})
		require.NoError(t, err)
		for i, at := range []time.Time{march, april.Add(-time.Microsecond), april, may, may.AddDate(20, 0, 0), march.AddDate(40, 0, 0)} {
			d, err := s.Take(t.Context(), at, limit.For("key").Cost(7))
			require.NoError(t, err)
			require.Equal(t, i != 1, d.Allowed, at)
			if i == 1 {
				require.Equal(t, time.Microsecond, d.RetryAfter)
			}
		}
	})

	t.Run("Value", func(t *testing.T) {
		t.Parallel()
		v := limit.For("key").Full(march)
		require.InDelta(t, 10, v.Tokens, 0)
		v, d := v.Take(march.AddDate(0, 0, 20), 10)
		require.True(t, d.Allowed)
		require.InDelta(t, 0, v.At(april.Add(-time.Microsecond)), 0)
		require.InDelta(t, 10, v.At(april), 0)
		_, d = v.Take(april.Add(-time.Hour), 1)
		require.False(t, d.Allowed)
		require.Equal(t, time.Hour, d.RetryAfter)
		reserved, r := v.Reserve(march.AddDate(0, 0, 21), 10)
		require.True(t, r.Allowed)
		require.Equal(t, april.UnixMicro(), r.ReadyAt.UnixMicro())
		wait, err := reserved.RetryAfter(april.Add(-time.Hour), 3)
		require.NoError(t, err)
		require.Equal(t, may.Sub(april)+time.Hour, wait, "April is owed")
		back, d := reserved.Take(may.Add(time.Hour), 4)
		require.True(t, d.Allowed)
		require.InDelta(t, 6, back.Tokens, 0)
		require.Equal(t, may.AddDate(0, 1, 0).Sub(may.Add(time.Hour)), d.ResetAfter)
	})
}
