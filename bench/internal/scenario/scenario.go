// Package scenario has the scenarios as data, and measures them.
package scenario

import (
	"slices"
	"time"

	"github.com/pgratelimit/pgratelimit/bench/internal/contender"
	"github.com/pgratelimit/pgratelimit/bench/internal/stats"
)

// Scenario is one situation, and the contenders in it.
type Scenario struct {
	Name  string // for -run
	Title string
	Note  string // what a reader has to know to read the figures
	Curve string // of which this is a point; empty: it stands for itself
	// Callers is how many goroutines call at once, each one call after the other.
	Callers int
	// Burst is how many calls are made for each reading of the clock. Defaults to 1.
	Burst int
	// Disk is by how much each flush of a commit takes longer, as on a slower disk. Defaults to 0.
	Disk time.Duration
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

// With returns the scenario with its first contender and those others whose names are wanted, and with the bars that are
// about these.
func (s Scenario) With(wanted func(name string) bool) Scenario {
	there := map[string]bool{"": true, firstTenth: true, lastTenth: true}
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

// Versus returns the scenario with ways for its first contender, and for the same of another commit after it. These have
// databases of their own, so no facts about the scenario's are measured.
func (s Scenario) Versus(this, other contender.Way, commit string) Scenario {
	name := s.Contenders[0].Name
	s.Contenders = append([]Contender{{name, this}, {name + " at " + commit, other}}, s.Contenders[1:]...)
	s.Facts = nil
	s.Bars = slices.DeleteFunc(slices.Clone(s.Bars), func(b Bar) bool { return b.Fact != "" })
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

// Row is what a contender's rounds gave.
type Row struct {
	Name    string
	Missing string // why it was not measured, when it was not
	Rounds  []contender.Round
	Ratio   stats.Spread // of the first row to this one
	Cost    stats.Spread // the same of the processor time of a call
}

// Spread returns the median of a figure over the rounds, and the ends.
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
