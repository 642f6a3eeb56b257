package scenario

import (
	"fmt"
	"math"

	"github.com/pgratelimit/pgratelimit/bench/internal/stats"
)

// Bar is a bound that a scenario must reach: on a contender's figure, on its ratio to another contender's
// figure, or on a fact.
type Bar struct {
	Contender string
	Figure    Figure
	Against   string // the contender of the ratio's denominator; empty: bound the figure itself
	Fact      string // bound this fact, not a contender's figure
	AtLeast   float64
	AtMost    float64 // used if AtLeast is 0
}

// String returns the bar as text.
func (b Bar) String() string {
	bound := "at most " + b.Format(b.AtMost)
	if b.AtLeast > 0 {
		bound = "at least " + b.Format(b.AtLeast)
	}
	switch {
	case b.Fact != "":
		return fmt.Sprintf("%s %s", b.Fact, bound)
	case b.Against == "":
		return fmt.Sprintf("%s of %s %s", b.Figure, b.Contender, bound)
	}
	return fmt.Sprintf("%s of %s %s x %s", b.Figure, b.Contender, bound, b.Against)
}

// Format returns a value of the bounded number as text.
func (b Bar) Format(value float64) string {
	switch {
	case b.Fact != "":
		return FormatCount(value)
	case b.Against != "":
		return FormatRatio(value)
	}
	return b.Figure.Format(value)
}

// Verdict is a bar with the measured value.
type Verdict struct {
	Bar
	Value    stats.Spread
	Measured bool
	Reached  bool
}

// row returns the row of that name, or nil.
func (r *Result) row(name string) *Row {
	for i := range r.Rows {
		if r.Rows[i].Name == name {
			return &r.Rows[i]
		}
	}
	return nil
}

// judge fills in the ratios and the verdicts.
func (r *Result) judge() {
	for i := range r.Rows {
		first, this := r.Rows[0].Rounds, r.Rows[i].Rounds
		r.Rows[i].Ratio = stats.Ratios(r.Compare.series(first), r.Compare.series(this))
		r.Rows[i].Cost = stats.Ratios(Processor.series(first), Processor.series(this))
	}
	for _, bar := range r.Bars {
		value := r.value(bar)
		v := Verdict{Bar: bar, Value: value, Measured: !math.IsNaN(value.Median)}
		v.Reached = v.Measured && (bar.AtLeast > 0 && value.Median >= bar.AtLeast || bar.AtLeast == 0 &&
			value.Median <= bar.AtMost)
		r.Verdicts = append(r.Verdicts, v)
	}
}

// value returns the bounded number.
func (r *Result) value(bar Bar) stats.Spread {
	for _, m := range r.Measured {
		if m.Name == bar.Fact {
			return stats.Of([]float64{m.Value})
		}
	}
	of := r.row(bar.Contender)
	if of == nil {
		return stats.Of(nil)
	}
	if bar.Against == "" {
		return of.Spread(bar.Figure)
	}
	against := r.row(bar.Against)
	if against == nil {
		return stats.Of(nil)
	}
	return stats.Ratios(bar.Figure.series(of.Rounds), bar.Figure.series(against.Rounds))
}
