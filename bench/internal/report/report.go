// Package report writes the results of a run as text.
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
	"github.com/pgratelimit/pgratelimit/bench/internal/server"
	"github.com/pgratelimit/pgratelimit/bench/internal/stats"
)

// Header writes the machine and the servers. An empty redis says that there is none.
func Header(w io.Writer, machine, postgres, redis string) {
	fmt.Fprintf(w, "%s\n%s\n", machine, postgres)
	var settings []string
	for _, name := range slices.Sorted(maps.Keys(server.Settings())) {
		settings = append(settings, name+" = "+server.Settings()[name])
	}
	fmt.Fprintf(w, "  %s\n", strings.Join(settings, ", "))
	if redis == "" {
		redis = server.ErrNoRedis.Error()
	}
	fmt.Fprintln(w, redis)
}

// Result writes a scenario's table.
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
		if row.Missing != "" {
			continue
		}
		columns := []string{spread(row.Spread(scenario.Throughput), scenario.Throughput.Format)}
		for _, f := range scenario.Figures()[1:] {
			columns = append(columns, f.Format(row.Spread(f).Median))
		}
		for _, f := range []scenario.Figure{r.Compare, scenario.Processor} {
			ratio := ""
			if i > 0 {
				ratio = spread(r.Ratio(f, row), scenario.FormatRatio)
			}
			columns = append(columns, ratio)
		}
		fmt.Fprintf(table, "%-*s\t%s\t\n", width, row.Name, strings.Join(columns, "\t"))
	}
	_ = table.Flush()
	for _, row := range r.Rows {
		if row.Missing != "" {
			fmt.Fprintf(w, "  %s: %s\n", row.Name, row.Missing)
		}
	}
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
