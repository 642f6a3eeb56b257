package bucket

import "time"

// LocalTable returns the table of a calendar by the zone data of this program, for where there is no server to ask. The
// Zone of the calendar is not looked at.
func (c Calendar) LocalTable(zone *time.Location, now int64) *Table {
	before, after := c.Reach()
	year := time.UnixMicro(now).In(zone).Year()
	var begins []int64
	for k := -before; k <= after; k++ {
		at := firstInstant(c.date(year, k), zone)
		if n := len(begins); n == 0 || begins[n-1] < at { // a day may be left out
			begins = append(begins, at)
		}
	}
	return TableOf(begins)
}

// date returns the midnight, as if in UTC, of the day on which the k-th window begins, counted from about the begin of a
// year.
func (c Calendar) date(year, k int) time.Time {
	first := time.Date(year, time.January, 1, 0, 0, 0, 0, time.UTC)
	switch c.Unit {
	case OfDay:
		return first.AddDate(0, 0, k)
	case OfWeek:
		return first.AddDate(0, 0, 7*k-(int(first.Weekday())-int(c.Weekday)+7)%7)
	default:
		month := first.AddDate(0, int(c.Month)-1+k*c.Months(), 0)
		return month.AddDate(0, 0, min(int(c.Day), month.AddDate(0, 1, -1).Day())-1)
	}
}

// firstInstant returns the first instant at which the clocks of a zone show a time, given as if in UTC, or a later one, in
// microseconds since 1970. It goes by the offsets of the day before and the day after; where neither leads to an instant at
// which the time is shown for the first time, because it is left out, the clocks are put forward between the two.
func firstInstant(local time.Time, zone *time.Location) int64 {
	_, before := local.Add(-30 * time.Hour).In(zone).Zone()
	_, after := local.Add(30 * time.Hour).In(zone).Zone()
	low, high := local.Unix()-int64(max(before, after)), local.Unix()-int64(min(before, after))
	shows := func(at int64) bool {
		_, offset := time.Unix(at, 0).In(zone).Zone()
		return at+int64(offset) >= local.Unix()
	}
	if shows(low) {
		return low * time.Second.Microseconds()
	}
	for shows(high-1) && low+1 < high {
		if middle := low + (high-low)/2; shows(middle) {
			high = middle
		} else {
			low = middle
		}
	}
	return high * time.Second.Microseconds()
}
