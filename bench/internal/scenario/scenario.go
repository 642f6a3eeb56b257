// Package scenario has the table of scenarios, and measures them.
package scenario

import (
	"time"

	"github.com/pgratelimit/pgratelimit/bench/internal/contender"
	"github.com/pgratelimit/pgratelimit/bench/internal/stats"
)

// Scenario is a situation with its contenders.
type Scenario struct {
	Name  string // for -run
	Title string
	Note  string // explains the figures
	// Callers is the number of goroutines that call.
	Callers int
	// Disk is the extra time of each commit's flush, as on a slower disk. Defaults to 0.
	Disk time.Duration
	// Compare is the figure of the ratios between the first contender and the others.
	Compare Figure
	// Contenders take turns within each round.
	Contenders []Contender
}

// Contender is a way to decide, with its name in the tables.
type Contender struct {
	Name string
	Way  contender.Way
}

// Row holds the rounds of a contender.
type Row struct {
	Name    string
	Missing string // the reason if it was not measured
	Rounds  []contender.Round
}

// Spread returns the spread of a figure over the rounds.
func (r Row) Spread(f Figure) stats.Spread { return stats.Of(f.series(r.Rounds)) }

// Result is a scenario with the measured numbers.
type Result struct {
	Scenario
	Rows []Row
}

// Ratio returns the spread of a figure of the first row divided by that of a row.
func (r Result) Ratio(f Figure, row Row) stats.Spread {
	return stats.Ratios(f.series(r.Rows[0].Rounds), f.series(row.Rounds))
}
