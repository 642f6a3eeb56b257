// Package scenario has the table of scenarios, and measures them.
package scenario

import (
	"slices"
	"time"

	"github.com/pgratelimit/pgratelimit/bench/internal/contender"
	"github.com/pgratelimit/pgratelimit/bench/internal/stats"
)

// Scenario is a situation with its contenders.
type Scenario struct {
	Name  string // for -run
	Title string
	Note  string // explains the figures
	Curve string // the curve that this is a point of; empty: none
	// Callers is the number of goroutines that call.
	Callers int
	// Burst is the number of calls between two clock readings. Defaults to 1.
	Burst int
	// Disk is the extra time of each commit's flush, as on a slower disk. Defaults to 0.
	Disk time.Duration
	// Compare is the figure of the ratios between the first contender and the others.
	Compare Figure
	// Contenders take turns within each round.
	Contenders []Contender
	// Facts are measured after all rounds.
	Facts []Fact
	Bars  []Bar
}

// With returns the scenario with its first contender, the other contenders whose names are wanted, and the bars
// of these contenders.
func (s Scenario) With(wanted func(name string) bool) Scenario {
	there := map[string]bool{"": true}
	var contenders []Contender
	for i, c := range s.Contenders {
		if i == 0 || wanted(c.Name) {
			contenders, there[c.Name] = append(contenders, c), true
		}
	}
	s.Contenders = contenders
	s.Bars = slices.DeleteFunc(slices.Clone(s.Bars), func(b Bar) bool { return !there[b.Contender] || !there[b.Against] })
	return s
}

// Contender is a way to decide, with its name in the tables.
type Contender struct {
	Name string
	Way  contender.Way
}

// Fact is a number about the database, which SQL returns.
type Fact struct {
	Name, Unit string
	SQL        string
}

// Row holds the rounds of a contender.
type Row struct {
	Name    string
	Missing string // the reason if it was not measured
	Rounds  []contender.Round
	Ratio   stats.Spread // of the first row to this one
	Cost    stats.Spread // of the first row's processor time of a call to this one's
}

// Spread returns the spread of a figure over the rounds.
func (r Row) Spread(f Figure) stats.Spread { return stats.Of(f.series(r.Rounds)) }

// Measurement is a fact that was measured.
type Measurement struct {
	Name, Unit string
	Value      float64
}

// Result is a scenario with the measured numbers.
type Result struct {
	Scenario
	Rows     []Row
	Measured []Measurement
	Verdicts []Verdict
}
