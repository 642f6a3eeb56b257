package store

import (
	"sync"
	"time"
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
