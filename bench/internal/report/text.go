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

// Header writes the machine and the servers.
func Header(w io.Writer, run Run) {
	m := run.Machine
	fmt.Fprintf(w, "%s, %d cores, %.0f GiB, %s, %s, load %.2f before the start\n", m.CPU, m.Cores, m.MemoryGiB, m.OS, m.Go,
		m.Load)
	fmt.Fprintf(w, "%s, data on %s, which flushes a page in %s\n", run.Postgres, m.FileSystem,
		scenario.FormatSeconds(m.Flush.Seconds()))
	var settings []string
	for _, name := range slices.Sorted(maps.Keys(run.Settings)) {
		settings = append(settings, name+" = "+run.Settings[name])
	}
	fmt.Fprintf(w, "  %s\n", strings.Join(settings, ", "))
	fmt.Fprintf(w, "%s\n", run.Redis)
	fmt.Fprintf(w, "%d rounds of %v for each contender, in turns; figures are medians of the rounds, with the middle "+
		"half of them in brackets\n", run.Rounds, run.Round)
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
	fmt.Fprintf(table, "%*s\tcalls/s\tp50\tp99\ttrips\tattempts\tWAL B\tallocs\tcpu\t%s: first / this\tcpu: first / "+
		"this\t\n", width, "", r.Compare)
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
		return append(columns, "", "")
	}
	return append(columns, spread(row.Ratio, scenario.FormatRatio), spread(row.Cost, scenario.FormatRatio))
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
