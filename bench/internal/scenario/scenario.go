// Package scenario has what is measured, as data, and measures it.
package scenario

import (
	"context"

	"github.com/pgratelimit/pgratelimit/bench/internal/contender"
	"github.com/pgratelimit/pgratelimit/bench/internal/server"
	"github.com/pgratelimit/pgratelimit/bench/internal/stats"
)

// Scenario is one situation, and the contenders in it.
type Scenario struct {
	Name  string // for -run
	Title string
	Note  string // what a reader has to know to read the figures
	// Callers is how many goroutines call at once, each one call after the other.
	Callers int
	// Burst is how many calls are made for each reading of the clock. Defaults to 1.
	Burst int
	// Compare is the figure by which the first contender is compared with each of the others.
	Compare Figure
	// Contenders take turns within each round.
	Contenders []Contender
	// Calls, when set, is how many calls the one contender makes in all. Its first and last tenth are then what
	// is compared.
	Calls int
	// Facts are measured when all rounds are over.
	Facts []Fact
	Bars  []Bar
}

// Contender is a way to decide, and what it is called in the tables.
type Contender struct {
	Name string
	Way  contender.Way
}

// Fact is a number about the database.
type Fact struct {
	Name, Unit string
	Measure    func(ctx context.Context, d *server.Database) (float64, error)
}

// Row is what a contender's rounds gave.
type Row struct {
	Name    string
	Missing string // why it was not measured, when it was not
	Rounds  []contender.Round
	Ratio   stats.Spread // of the first row to this one
}

// Spread returns the median of a figure over the rounds, and the ends.
func (r Row) Spread(f Figure) stats.Spread { return stats.Of(f.series(r.Rounds)) }

// Measurement is a fact that was measured.
type Measurement struct {
	Name, Unit string
	Value      float64
}

// Result is a scenario with what was measured.
type Result struct {
	Scenario
	Rows     []Row
	Measured []Measurement
	Verdicts []Verdict
}
