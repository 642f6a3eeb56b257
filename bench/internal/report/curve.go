package report

import (
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/pgratelimit/pgratelimit/bench/internal/scenario"
)

// Curves writes each curve as a table: calls in a second, and how the first contender compares.
func Curves(w io.Writer, curves []scenario.Curve) {
	for _, c := range curves {
		fmt.Fprintf(w, "\ncurve, %s: calls/s\n", c.Name)
		table(w, c.Lines, func(p scenario.Point) string { return spread(p.Throughput, scenario.FormatCount) })
		fmt.Fprintf(w, "\ncurve, %s: processor's time for a call\n", c.Name)
		table(w, c.Lines, func(p scenario.Point) string {
			if p.Processor == nil {
				return "-"
			}
			return spread(*p.Processor, scenario.FormatSeconds)
		})
		if len(c.Lines) > 1 {
			fmt.Fprintf(w, "\ncurve, %s: %s / this\n", c.Name, c.Lines[0].Contender)
			table(w, c.Lines[1:], func(p scenario.Point) string { return spread(p.Ratio, scenario.FormatRatio) })
		}
	}
}

// table writes a row for each number of callers and a column for each line.
func table(w io.Writer, lines []scenario.Line, cell func(scenario.Point) string) {
	columns := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(columns, "callers\t")
	for _, line := range lines {
		fmt.Fprintf(columns, "%s\t", line.Contender)
	}
	fmt.Fprintln(columns)
	for i, point := range lines[0].Points {
		fmt.Fprintf(columns, "%d\t", point.Callers)
		for _, line := range lines {
			if i < len(line.Points) {
				fmt.Fprint(columns, cell(line.Points[i]))
			}
			fmt.Fprint(columns, "\t")
		}
		fmt.Fprintln(columns)
	}
	_ = columns.Flush()
}
