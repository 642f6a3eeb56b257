package store

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
)

// calendarsOf returns a calendar of each unit in a zone, with several first days.
func calendarsOf(zone string) []bucket.Calendar {
	return []bucket.Calendar{
		{Zone: zone, Unit: bucket.OfDay},
		{Zone: zone, Unit: bucket.OfWeek},
		{Zone: zone, Unit: bucket.OfWeek, Weekday: 1},
		{Zone: zone, Unit: bucket.OfMonth, Day: 1, Month: 1},
		{Zone: zone, Unit: bucket.OfMonth, Day: 15, Month: 1},
		{Zone: zone, Unit: bucket.OfMonth, Day: 31, Month: 1},
		{Zone: zone, Unit: bucket.OfQuarter, Day: 1, Month: 1},
		{Zone: zone, Unit: bucket.OfQuarter, Day: 30, Month: 2},
		{Zone: zone, Unit: bucket.OfYear, Day: 1, Month: 1},
		{Zone: zone, Unit: bucket.OfYear, Day: 29, Month: 2},
	}
}

// dayNumber returns how many days after 1970-01-01 the clocks of a zone show, and a date is.
func dayNumber(t time.Time) int {
	y, m, d := t.Date()
	return int(time.Date(y, m, d, 0, 0, 0, 0, time.UTC).Unix() / 86400)
}

// walk returns for each day from one instant to another the first instant at which the clocks of the zone show it or a
// later one. It looks at the clocks each quarter of an hour.
func walk(zone *time.Location, from, until time.Time) map[int]int64 {
	begins := make(map[int]int64)
	seen := dayNumber(from.In(zone))
	for at := from; at.Before(until); at = at.Add(15 * time.Minute) {
		for now := dayNumber(at.In(zone)); seen < now; {
			seen++
			begins[seen] = at.UnixMicro()
		}
	}
	return begins
}

// isFirst reports whether a window of the calendar begins on a day.
func isFirst(c bucket.Calendar, number int) bool {
	day := time.Unix(int64(number)*86400, 0).UTC()
	switch c.Unit {
	case bucket.OfDay:
		return true
	case bucket.OfWeek:
		return int(day.Weekday()) == int(c.Weekday)
	case bucket.OfMonth, bucket.OfQuarter, bucket.OfYear:
		last := time.Date(day.Year(), day.Month()+1, 0, 0, 0, 0, 0, time.UTC).Day()
		return (int(day.Month())-int(c.Month))%c.Months() == 0 && day.Day() == min(int(c.Day), last)
	}
	return false
}

// expected returns when windows of the calendar begin on the days.
func expected(c bucket.Calendar, days map[int]int64) (begins []int64) {
	for number, at := range days {
		if isFirst(c, number) {
			begins = append(begins, at)
		}
	}
	slices.Sort(begins)
	return slices.Compact(begins)
}

// years returns the instants between which the days of some years are looked at.
func years(first, last int) (from, until time.Time) {
	return time.Date(first, time.January, 1, 0, 0, 0, 0, time.UTC).AddDate(0, 0, -3),
		time.Date(last+1, time.January, 1, 0, 0, 0, 0, time.UTC).AddDate(0, 0, 3)
}

// comparison compares what a server says of calendars with what else is known.
type comparison struct {
	session     *Session
	now         int64
	first, last int // years
	begins      int
	otherData   []string // zones of which the server has other data than this program
	walked      map[string]*walked
}

// walked is what is the same for all zones whose clocks show the same, as far as the tables reach.
type walked struct {
	days   map[int]int64
	tables []*bucket.Table // of calendarsOf, by the program's own zone data
}

// clocksOf returns what the clocks of a zone show, as a text: their offsets, and when these change.
func (c *comparison) clocksOf(zone *time.Location) string {
	var clocks strings.Builder
	at, until := time.UnixMicro(c.now).AddDate(-15, 0, 0).In(zone), time.UnixMicro(c.now).AddDate(15, 0, 0)
	for {
		_, offset := at.Zone()
		_, end := at.ZoneBounds()
		if end.IsZero() || end.After(until) {
			fmt.Fprintf(&clocks, "%d", offset)
			return clocks.String()
		}
		fmt.Fprintf(&clocks, "%d until %d, ", offset, end.Unix())
		if !end.After(at) { // as on the last day of a leap year
			end = at.Add(15 * time.Minute)
		}
		at = end
	}
}

// walk returns what the program knows of a zone. It walks once for all zones whose clocks show the same.
func (c *comparison) walk(name string, zone *time.Location) *walked {
	clocks := c.clocksOf(zone)
	known := c.walked[clocks]
	if known == nil {
		from, until := years(c.first, c.last)
		known = &walked{days: walk(zone, from, until)}
		for _, of := range calendarsOf(name) {
			known.tables = append(known.tables, of.LocalTable(zone, c.now))
		}
		c.walked[clocks] = known
	}
	return known
}

// compare compares the calendars of a zone with a walk over its days by this program's zone data, or by those of the server where
// these differ.
func (c *comparison) compare(t *testing.T, name string) {
	t.Helper()
	zone, err := time.LoadLocation(name)
	if err == nil && c.agrees(t, name, c.walk(name, zone)) {
		return
	}
	c.otherData = append(c.otherData, name)
	require.True(t, c.agrees(t, name, &walked{days: c.walkServer(t, name)}), name)
}

// agrees reports whether the begins of all calendars in a zone are those of the days, and the tables those of the program, where
// there are any.
func (c *comparison) agrees(t *testing.T, name string, known *walked) bool {
	t.Helper()
	from, until := years(c.first, c.last)
	count := 0
	for i, of := range calendarsOf(name) {
		said, err := c.session.askCalendar(t.Context(), of)
		require.NoError(t, err, "%+v", of)
		if known.tables != nil && !known.tables[i].Equal(said.table) {
			return false
		}
		got := make(map[int64]bool)
		for _, begin := range said.table.Begins() {
			got[begin] = true
		}
		within := func(at int64) bool { // the days before and after are not all walked
			return at > from.UnixMicro()+2*86_400_000_000 && at < until.UnixMicro()-2*86_400_000_000
		}
		want := slices.DeleteFunc(expected(of, known.days), func(at int64) bool { return !within(at) })
		for _, at := range want {
			if !got[at] {
				return false
			}
			delete(got, at)
		}
		for at := range got {
			if within(at) {
				return false
			}
		}
		count += len(want)
	}
	c.begins += count
	return true
}

// walkServer is walk by the clocks of the server.
func (c *comparison) walkServer(t *testing.T, name string) map[int]int64 {
	t.Helper()
	from, until := years(c.first, c.last)
	tx := begin(t, c.session.owner.(owner).db)
	_, err := tx.Exec(t.Context(), `SELECT set_config('TimeZone', $1, true)`, name)
	require.NoError(t, err)
	rows, err := tx.Query(t.Context(), `SELECT extract(epoch FROM at)::bigint * 1000000, at::date - '1970-01-01'::date
		FROM generate_series($1::timestamptz, $2::timestamptz, interval '15 minutes') AS at ORDER BY at`, from, until)
	require.NoError(t, err)
	begins, seen := make(map[int]int64), 0
	var at int64
	var day int
	_, err = pgx.ForEachRow(rows, []any{&at, &day}, func() error {
		for ; seen != 0 && seen < day; seen++ {
			begins[seen+1] = at
		}
		seen = max(seen, day)
		return nil
	})
	require.NoError(t, err)
	require.NoError(t, tx.Rollback(t.Context()))
	return begins
}

// newComparison returns a comparison over some years.
func newComparison(db database, first, last int) *comparison {
	now := time.Date(last, time.July, 15, 12, 0, 0, 0, time.UTC).UnixMicro() // the table reaches back over the years
	c := &comparison{first: first, last: last, now: now, walked: make(map[string]*walked)}
	c.session = newSession(db, func() *int64 { return &c.now })
	return c
}

func TestCalendarTable(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)

	compare := func(t *testing.T, draw func(zones int) []int) {
		t.Helper()
		rows, err := pool.Query(t.Context(), `SELECT name FROM pg_timezone_names ORDER BY name`)
		require.NoError(t, err)
		zones, err := pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(t, err)
		require.Greater(t, len(zones), 300)
		c := newComparison(pool, 2026, 2028)
		drawn := draw(len(zones))
		for _, i := range drawn {
			c.compare(t, zones[i])
		}
		t.Logf("%d zones, %d begins; of %d zones the server has other data than this program, which were compared with the server's clocks: %s",
			len(drawn), c.begins, len(c.otherData), strings.Join(c.otherData, ", "))
	}
	t.Run("ZonesOfTheServer", func(t *testing.T) {
		t.Parallel()
		compare(t, func(zones int) []int { return testsize.Rand(t).Perm(zones)[:testsize.Of(8, 120)] })
	})
	t.Run("EveryZoneOfTheServer", func(t *testing.T) {
		t.Parallel()
		testsize.Nightly(t, "each of some 1,200 zones takes a tenth of a second")
		compare(t, testsize.Rand(t).Perm)
	})

	t.Run("MidnightsThatAreLeftOutOrOccurTwice", func(t *testing.T) {
		t.Parallel()
		for _, of := range []struct {
			zone        string
			first, last int
		}{
			{"America/Sao_Paulo", 2016, 2018}, // summer begins at midnight
			{"Africa/Cairo", 2023, 2026},
			{"Asia/Beirut", 2022, 2026},
			{"America/Havana", 2024, 2026}, // winter begins at one, which is midnight again
			{"America/Santiago", 2024, 2026},
			{"America/Asuncion", 2022, 2025},
			{"Asia/Amman", 2020, 2023},
			{"Asia/Gaza", 2022, 2024},
			{"Australia/Lord_Howe", 2025, 2027}, // half an hour
			{"Antarctica/Troll", 2025, 2027},    // two hours
			{"America/Scoresbysund", 2023, 2025},
			{"America/Nuuk", 2022, 2025},
			{"Pacific/Apia", 2010, 2012}, // a day is left out
			{"Pacific/Kiritimati", 1994, 1996},
			{"Pacific/Kwajalein", 1992, 1994},
			{"America/Toronto", 1918, 1920}, // half past eleven is followed by half past twelve
			{"Asia/Kathmandu", 1985, 1987},
		} {
			c := newComparison(pool, of.first, of.last)
			c.compare(t, of.zone)
			t.Logf("%s: %d begins, other data: %v", of.zone, c.begins, c.otherData)
		}
	})
}

// TestCalendarRefresh asks the server again while it is known when windows begin.
func TestCalendarRefresh(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	terms := bucket.Terms{Capacity: 10, Rate: 10, Steps: 1, Step: 86_400_000_000, Shards: 1, Calendar: bucket.Calendar{Zone: "UTC", Unit: bucket.OfDay}}
	// due returns a session that knows the calendar, and has to ask again.
	due := func(t *testing.T) (*Session, *calendar) {
		t.Helper()
		s := newSession(pool, standing)
		_, err := s.OnCalendar(t.Context(), terms, nil, bucket.Terms{})
		require.NoError(t, err)
		c := s.calendars.entry(terms.Calendar)
		old := *c.known.Load()
		old.again = time.Time{}
		c.known.Store(&old)
		_, known := s.KnownOnCalendar(terms)
		require.False(t, known)
		return s, c
	}

	t.Run("NobodyWaitsForWhoAsks", func(t *testing.T) {
		t.Parallel()
		s, c := due(t)
		c.busy <- struct{}{} // as somebody who asks, and has no answer
		known, err := s.OnCalendar(t.Context(), terms, nil, bucket.Terms{})
		require.NoError(t, err)
		require.False(t, known.IsUnknown())
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, err = s.OnCalendar(ctx, terms, nil, known) // that table does not do any more
		require.ErrorIs(t, err, context.Canceled)
	})

	t.Run("WhatFailsIsTriedAgainLater", func(t *testing.T) {
		t.Parallel()
		s, _ := due(t)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, err := s.OnCalendar(ctx, terms, nil, bucket.Terms{})
		require.ErrorIs(t, err, context.Canceled)
		_, known := s.KnownOnCalendar(terms)
		require.True(t, known, "the next call does not ask")
	})
}
