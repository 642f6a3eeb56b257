package report

import (
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/pgratelimit/pgratelimit/bench/internal/scenario"
	"github.com/pgratelimit/pgratelimit/bench/internal/stats"
)

// Header writes what the run is measured on.
func Header(w io.Writer, run Run) {
	m := run.Machine
	fmt.Fprintf(w, "%s, %d cores, %.0f GiB, %s, %s, load %.2f before the start\n", m.CPU, m.Cores, m.MemoryGiB, m.OS, m.Go, m.Load)
	fmt.Fprintf(w, "%s, data on %s, which flushes a page in %s\n", run.Postgres, m.FileSystem, scenario.FormatSeconds(m.Flush.Seconds()))
	var settings []string
	for _, name := range slices.Sorted(maps.Keys(run.Settings)) {
		settings = append(settings, name+" = "+run.Settings[name])
	}
	fmt.Fprintf(w, "  %s\n", strings.Join(settings, ", "))
	fmt.Fprintf(w, "%s\n", run.Redis)
	fmt.Fprintf(w, "%d rounds of %v for each contender, in turns; figures are medians of the rounds, with the middle half of them in brackets\n", run.Rounds, run.Round)
	if run.Against != "" {
		fmt.Fprintf(w, "this checkout and %s are processes of their own, with the same harness\n", run.Against)
	}
	if run.Quick {
		fmt.Fprintln(w, "quick: the rounds are too short for figures to quote")
	}
}

// Result writes a scenario's table and its bars.
func Result(w io.Writer, r scenario.Result) {
	fmt.Fprintf(w, "\n%s: %s\n", r.Name, r.Title)
	if r.Note != "" {
		fmt.Fprintf(w, "  (%s)\n", r.Note)
	}
	width := 0
	for _, row := range r.Rows {
		width = max(width, len(row.Name))
	}
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(table, "%*s\tcalls/s\tp50\tp99\ttrips\tattempts\tWAL B\tallocs\tcpu\t%s: first / this\t\n", width, "", r.Compare)
	for i, row := range r.Rows {
		if row.Missing == "" {
			fmt.Fprintf(table, "%-*s\t%s\t\n", width, row.Name, strings.Join(cells(row, i == 0), "\t"))
		}
	}
	_ = table.Flush()
	for _, row := range r.Rows {
		if row.Missing != "" {
			fmt.Fprintf(w, "  %s: %s\n", row.Name, row.Missing)
		}
	}
	for _, m := range r.Measured {
		fmt.Fprintf(w, "  %s: %s%s\n", m.Name, scenario.FormatCount(m.Value), m.Unit)
	}
	for _, v := range r.Verdicts {
		fmt.Fprintf(w, "  %s\n", verdict(v))
	}
}

// cells returns the columns of a row after its name.
func cells(row scenario.Row, isFirst bool) []string {
	columns := []string{spread(row.Spread(scenario.Throughput), scenario.Throughput.Format)}
	for _, f := range scenario.Figures()[1:] {
		columns = append(columns, f.Format(row.Spread(f).Median))
	}
	if isFirst {
		return append(columns, "")
	}
	return append(columns, spread(row.Ratio, scenario.FormatRatio))
}

// Summary writes every ratio in one list, and every bar in another.
func Summary(w io.Writer, results []scenario.Result) {
	var ratios, bars []string
	for _, r := range results {
		for i, row := range r.Rows {
			if i > 0 && row.Missing == "" {
				ratios = append(ratios, fmt.Sprintf("%-14s %s / %s: %s %s, cpu %s", r.Name, r.Rows[0].Name, row.Name,
					r.Compare, spread(row.Ratio, scenario.FormatRatio), spread(row.Cost, scenario.FormatRatio)))
			}
		}
		for _, v := range r.Verdicts {
			bars = append(bars, fmt.Sprintf("%-14s %s", r.Name, verdict(v)))
		}
	}
	list(w, "ratios", ratios)
	list(w, "bars", bars)
}

// list writes lines under a title, and nothing when there are none.
func list(w io.Writer, title string, lines []string) {
	if len(lines) > 0 {
		fmt.Fprintf(w, "\n%s\n  %s\n", title, strings.Join(lines, "\n  "))
	}
}

func verdict(v scenario.Verdict) string {
	answer := "not reached"
	switch {
	case !v.Measured:
		return fmt.Sprintf("not measured: %s", v)
	case v.Reached:
		answer = "reached"
	}
	return fmt.Sprintf("%s: %s; it is %s", answer, v, spread(v.Value, v.Format))
}

// spread returns the median and the middle half: "1.30 (1.21..1.42)".
func spread(s stats.Spread, show func(float64) string) string {
	middle, low, high := show(s.Median), show(s.Low), show(s.High)
	switch {
	case math.IsNaN(s.Median):
		return "-"
	case low == high:
		return middle
	}
	return fmt.Sprintf("%s (%s..%s)", middle, low, high)
}

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
