package store

import (
	"fmt"
	"sync"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// zones are the time zones that were loaded, by name. They are never forgotten: some 600 exist.
var zones sync.Map //nolint:gochecknoglobals // a memo of time.LoadLocation, so that equal calendars have the same zone

// Zone returns the data that this program has of a time zone, or nil if it has none.
func Zone(name string) *time.Location {
	known, found := zones.Load(name)
	if !found {
		zone, err := time.LoadLocation(name)
		if err != nil {
			return nil
		}
		known, _ = zones.LoadOrStore(name, zone)
	}
	zone, _ := known.(*time.Location)
	return zone
}

// calendarText returns a calendar in the form in which a reservation stores it, or "" for steps.
func calendarText(k bucket.Kind) string {
	c, is := k.(bucket.Calendar)
	if !is {
		return ""
	}
	return fmt.Sprintf("%d %d %d %d %s", c.Days, c.Months, c.Month, c.First, c.Zone)
}

// kindOf returns the i-th of the calendars that calendarsOf returned. It returns steps if this program does not know the time zone. Then
// windows of the stored length count.
func kindOf(calendars []string, i int) bucket.Kind {
	if i >= len(calendars) {
		return bucket.Steps{}
	}
	var c bucket.Calendar
	var zone string
	if _, err := fmt.Sscanf(calendars[i], "%d %d %d %d %s", &c.Days, &c.Months, &c.Month, &c.First, &zone); err != nil || c.Days+c.Months == 0 {
		return bucket.Steps{}
	}
	if c.Zone = Zone(zone); c.Zone == nil {
		return bucket.Steps{}
	}
	return c
}

// calendarsOf returns the calendars of the asks in the form in which a reservation stores them. It is empty if no limit has one.
func calendarsOf(asks []bucket.Ask) []string {
	calendars, found := make([]string, len(asks)), false
	for i := range asks {
		calendars[i] = calendarText(asks[i].Terms.Kind)
		found = found || calendars[i] != ""
	}
	if !found {
		return []string{}
	}
	return calendars
}
