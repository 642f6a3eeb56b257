package scenario

import (
	"fmt"

	"github.com/pgratelimit/pgratelimit/bench/internal/stats"
)

// Curve shows contenders by the number of callers.
type Curve struct {
	Name  string `json:"name"`
	Lines []Line `json:"lines"` // the first is the baseline
}

// Line is a contender's part of a curve.
type Line struct {
	Contender string  `json:"contender"`
	Points    []Point `json:"points"` // by ascending callers
}

// Point holds the figures of a contender at a number of callers.
type Point struct {
	Callers    int           `json:"callers"`
	P50        stats.Spread  `json:"p50"` // seconds
	P99        stats.Spread  `json:"p99"`
	Throughput stats.Spread  `json:"throughput"`
	Processor  *stats.Spread `json:"processor,omitempty"` // seconds a call; nil: not measured
}

// curves returns the points of all curves.
func curves() []Scenario {
	var points []Scenario
	of := func(short, name string, keys int) {
		for callers := 1; callers <= 1024; callers *= 4 {
			point := take(fmt.Sprintf("curve-%s-%d", short, callers), name, keys, callers, Throughput, onRedis(keys))
			point.Curve = name
			points = append(points, point)
		}
	}
	of("many", "100k keys", manyKeys)
	of("hot", "one hot key", hotKey)
	return points
}

// Curves returns the curves of the results.
func Curves(results []Result) []Curve {
	var curves []Curve
	for _, r := range results {
		if r.Curve == "" {
			continue
		}
		if len(curves) == 0 || curves[len(curves)-1].Name != r.Curve {
			curves = append(curves, Curve{Name: r.Curve})
		}
		curves[len(curves)-1].add(r)
	}
	return curves
}

// add adds a point to the line of each contender that was measured.
func (c *Curve) add(r Result) {
	for _, row := range r.Rows {
		if row.Missing != "" {
			continue
		}
		line := c.line(row.Name)
		line.Points = append(line.Points, Point{
			Callers: r.Callers, P50: row.Spread(P50), P99: row.Spread(P99),
			Throughput: row.Spread(Throughput), Processor: row.Spread(Processor).Known(),
		})
	}
}

// line returns the line of that contender. It adds a missing one.
func (c *Curve) line(name string) *Line {
	for i := range c.Lines {
		if c.Lines[i].Contender == name {
			return &c.Lines[i]
		}
	}
	c.Lines = append(c.Lines, Line{Contender: name})
	return &c.Lines[len(c.Lines)-1]
}
