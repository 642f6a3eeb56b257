package main

import "fmt"

// figures are what was counted in the minutes that count.
type figures struct {
	takes, updates, hot                          int64
	records, pages, prunes, leaves               int64 // bytes of records and of whole pages in the log; records of pruning, and of the index
	before, beforeIndex, after, afterIndex       int64 // bytes
	minutes, vacuums, read, vacuumed, vacuumedBy int64 // pages that vacuum read, bytes that it logged, and dead rows that it removed
	seconds                                      float64
}

const heading = "                   WAL B a Take      with     updates   prunes   index       vacuums     pages      MB of     dead rows    µs of the   MB of table, index\n" +
	"fill, vacuum        (records)     pages        HOT   a Take   writes a Take  a minute  a minute  WAL a minute  a minute  server a Take    before        after"

// line is a line under heading.
func (f *figures) line(s setting) string {
	each := func(n int64) float64 { return float64(n) / float64(f.takes) }
	minutely := func(n int64) float64 { return float64(n) / float64(f.minutes) }
	const mb = 1e6
	return fmt.Sprintf("%-16s %12.1f %9.0f %8.1f %% %8.3f %11.3f %11.1f %10.0f %12.1f %10.0f %11.1f %8.0f, %.0f %6.0f, %.0f", s,
		each(f.records), each(f.records+f.pages), 100*float64(f.hot)/float64(max(f.updates, 1)), each(f.prunes), each(f.leaves),
		minutely(f.vacuums), minutely(f.read), minutely(f.vacuumed)/mb, minutely(f.vacuumedBy), 1e6*f.seconds/float64(f.takes),
		float64(f.before)/mb, float64(f.beforeIndex)/mb, float64(f.after)/mb, float64(f.afterIndex)/mb)
}
