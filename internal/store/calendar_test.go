package store

import (
	"maps"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
)

// calendarsIn returns a calendar of each unit in a zone, with several first days.
func calendarsIn(zone *time.Location) []bucket.Calendar {
	return []bucket.Calendar{
		{Zone: zone, Days: 1},
		{Zone: zone, Days: 7},
		{Zone: zone, Days: 7, First: 4},
		{Zone: zone, Months: 1, First: 1, Month: 1},
		{Zone: zone, Months: 1, First: 15, Month: 1},
		{Zone: zone, Months: 1, First: 31, Month: 1},
		{Zone: zone, Months: 3, First: 1, Month: 1},
		{Zone: zone, Months: 3, First: 30, Month: 2},
		{Zone: zone, Months: 12, First: 1, Month: 1},
		{Zone: zone, Months: 12, First: 29, Month: 2},
	}
}

// isFirst reports whether a window of the calendar begins on a day, given as the number of days since 1970.
func isFirst(c bucket.Calendar, number int) bool {
	day := time.Unix(int64(number)*86400, 0).UTC()
	switch c.Days {
	case 1:
		return true
	case 7:
		return day.Weekday() == (time.Thursday+time.Weekday(c.First))%7
	default:
		last := time.Date(day.Year(), day.Month()+1, 0, 0, 0, 0, 0, time.UTC).Day()
		return (int(day.Month())-int(c.Month))%int(c.Months) == 0 && day.Day() == min(int(c.First), last)
	}
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

// begins returns when windows of the calendar begin up to an instant, from the begin of one on.
func begins(c bucket.Calendar, at, until int64) (begins []int64) {
	for at <= until {
		t := c.On(bucket.Terms{Kind: c}, at)
		for _, end := t.Span(); at < min(end, until+1); at += t.Step {
			begins = append(begins, at)
		}
	}
	return begins
}

// daysOf returns the first instant of each day in a zone, by what the clocks show each quarter of an hour. A day that is left out begins
// with the next one.
func daysOf(showing func(yield func(at int64, day int) bool)) map[int]int64 {
	days, seen := make(map[int]int64), math.MinInt
	for at, day := range showing {
		for ; seen > math.MinInt && seen < day; seen++ {
			days[seen+1] = at
		}
		seen = max(seen, day)
	}
	return days
}

const quarterOfHour = 15 * time.Minute

// daysHere is daysOf by the data of this program.
func daysHere(zone *time.Location, from, until time.Time) map[int]int64 {
	return daysOf(func(yield func(at int64, day int) bool) {
		for at := from; !at.After(until); at = at.Add(quarterOfHour) {
			y, m, d := at.In(zone).Date()
			yield(at.UnixMicro(), int(time.Date(y, m, d, 0, 0, 0, 0, time.UTC).Unix()/86400))
		}
	})
}

// daysThere is daysOf by the data of the server.
func daysThere(t *testing.T, pool *pgxpool.Pool, name string, from, until time.Time) map[int]int64 {
	t.Helper()
	tx := begin(t, pool)
	defer func() { require.NoError(t, tx.Rollback(t.Context())) }()
	_, err := tx.Exec(t.Context(), `SELECT set_config('TimeZone', $1, true)`, name)
	require.NoError(t, err)
	rows, err := tx.Query(t.Context(), `SELECT min(extract(epoch FROM at)::bigint * 1000000), at::date - '1970-01-01'::date
		FROM generate_series($1::timestamptz, $2::timestamptz, $3::interval) AS at GROUP BY 2 ORDER BY 1`, from, until, quarterOfHour)
	require.NoError(t, err)
	return daysOf(func(yield func(at int64, day int) bool) {
		var at int64
		var day int
		_, err = pgx.ForEachRow(rows, []any{&at, &day}, func() error {
			yield(at, day)
			return nil
		})
		require.NoError(t, err)
	})
}

// TestCalendarsAgreeWithTheServer compares the begins of windows with the server's, in time zones for which it has the same data as
// this program.
func TestCalendarsAgreeWithTheServer(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)

	// compare reports whether the server has the same data of the zone.
	compare := func(t *testing.T, name string, first, last int) bool {
		t.Helper()
		from, until := time.Date(first, time.January, 1, 0, 0, 0, 0, time.UTC), time.Date(last+1, time.January, 1, 0, 0, 0, 0, time.UTC)
		days := daysThere(t, pool, name, from, until)
		zone := Zone(name)
		if zone == nil || !maps.Equal(days, daysHere(zone, from, until)) {
			return false
		}
		for _, c := range calendarsIn(zone) {
			want := expected(c, days)
			require.Equal(t, want, begins(c, want[0], until.UnixMicro()), "%+v", c)
		}
		return true
	}
	compareAll := func(t *testing.T, draw func(zones int) []int) {
		t.Helper()
		rows, err := pool.Query(t.Context(), `SELECT name FROM pg_timezone_names ORDER BY name`)
		require.NoError(t, err)
		zones, err := pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(t, err)
		require.Greater(t, len(zones), 300)
		drawn := draw(len(zones))
		var others []string
		for _, i := range drawn {
			if !compare(t, zones[i], 2026, 2028) {
				others = append(others, zones[i])
			}
		}
		require.LessOrEqual(t, len(others), 2+len(drawn)/20, "%v", others)
		t.Logf("%d zones; the server has other data than this program of: %s", len(drawn), strings.Join(others, ", "))
	}
	t.Run("ZonesOfTheServer", func(t *testing.T) {
		t.Parallel()
		compareAll(t, func(zones int) []int { return testsize.Rand(t).Perm(zones)[:testsize.Of(8, 120)] })
	})
	t.Run("EveryZoneOfTheServer", func(t *testing.T) {
		t.Parallel()
		testsize.Nightly(t, "each of some 1,200 zones takes a tenth of a second")
		compareAll(t, testsize.Rand(t).Perm)
	})

	t.Run("MidnightsThatAreLeftOutOrOccurTwice", func(t *testing.T) {
		t.Parallel()
		compared := 0
		for _, of := range []struct {
			zone        string
			first, last int
		}{
			{"America/Sao_Paulo", 2016, 2018}, // summer begins at midnight
			{"Africa/Cairo", 2023, 2026},
			{"Asia/Beirut", 2022, 2026},
			{"America/Havana", 2024, 2026}, // winter begins at one, which is midnight again
			{"America/Santiago", 2024, 2026},
			{"America/Asuncion", 2022, 2024},
			{"Asia/Amman", 2020, 2023},
			{"Asia/Gaza", 2022, 2024},
			{"Australia/Lord_Howe", 2025, 2027}, // half an hour
			{"Antarctica/Troll", 2025, 2027},    // two hours
			{"America/Scoresbysund", 2023, 2025},
			{"America/Nuuk", 2022, 2025},
			{"Pacific/Apia", 2010, 2012}, // a day is left out
			{"Pacific/Kiritimati", 1993, 1995},
			{"Pacific/Kwajalein", 1992, 1994},
			{"America/Toronto", 1918, 1920}, // half past eleven is followed by half past twelve
			{"Asia/Kathmandu", 1985, 1987},
		} {
			if compare(t, of.zone, of.first, of.last) {
				compared++
			} else {
				t.Logf("the server has other data of %s than this program", of.zone)
			}
		}
		require.GreaterOrEqual(t, compared, 14)
	})
}
