// Package plot draws the curves of a run.
package plot

import (
	"encoding/xml"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"

	"github.com/pgratelimit/pgratelimit/bench/internal/scenario"
	"github.com/pgratelimit/pgratelimit/bench/internal/stats"
)

// The sizes of the drawing, in units of its viewBox.
const (
	width, height = 720, 400
	left, right   = 56, 16
	top, bottom   = 78, 44
	legendColumns = 3
	legendHeight  = 20
	inset         = 20 // the distance of points from the ends of the grid
	dodge         = 3  // the distance between the spreads of two contenders at the same number of callers
)

// colours are the colours of the lines on light and on dark, in the order of the contenders.
func colours() [][2]string {
	return [][2]string{
		{"#0969da", "#58a6ff"},
		{"#57606a", "#9198a1"},
		{"#cf222e", "#ff7b72"},
		{"#1a7f37", "#3fb950"},
		{"#8250df", "#bc8cff"},
		{"#9a6700", "#d29922"},
	}
}

// SVG returns a drawing of the throughput or the processor time over the number of callers, for the points of a curve
// in ascending order. It's readable on light and on dark. Both axes are logarithmic: the same distance is the same
// ratio. An upright stroke is the middle half of the rounds.
func SVG(points []scenario.Result, figure scenario.Figure) []byte {
	var b strings.Builder
	s, title := scales(points, figure), points[0].Curve+": calls a second, all callers together"
	if figure == scenario.Processor {
		title = points[0].Curve + ": the processor's time for a call, client and server"
	}
	fmt.Fprintf(&b,
		`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" role="img" aria-labelledby="title">
<title id="title">%s</title>
<style>
  text { font: 12px sans-serif; fill: #24292f } .name { font-weight: bold }
  .grid { stroke: #d0d7de; fill: none } .line { fill: none; stroke-width: 2 } .first { stroke-width: 3 } .spread { fill: none; stroke-width: 1.2; opacity: .6 }
`, width, height, width, height, escape(title+", over the number of callers"))
	for i, colour := range colours() {
		fmt.Fprintf(&b, "  .c%d { stroke: %s } .d%d { fill: %s }\n", i, colour[0], i, colour[0])
	}
	b.WriteString("  @media (prefers-color-scheme: dark) {\n    text { fill: #e6edf3 } .grid { stroke: #30363d }\n")
	for i, colour := range colours() {
		fmt.Fprintf(&b, "    .c%d { stroke: %s } .d%d { fill: %s }\n", i, colour[1], i, colour[1])
	}
	b.WriteString("  }\n</style>\n")
	s.axes(&b)
	fmt.Fprintf(&b, `<text class="name" x="%d" y="18">%s</text>`+"\n", left, escape(title))
	names := measured(points)
	for i := len(names) - 1; i >= 0; i-- { // draw the first one on top
		s.line(&b, points, names[i], i, len(names))
	}
	for i, name := range names {
		x, y := left+i%legendColumns*(width-left-right)/legendColumns, 36+i/legendColumns*legendHeight
		fmt.Fprintf(&b,
			`<g transform="translate(%d %d)"><path class="line c%d" d="M0 0h20"/><circle class="d%d" cx="10" cy="0" r="3.5"/><text x="26" y="4">%s</text></g>`+"\n",
			x, y, i%len(colours()), i%len(colours()), escape(name))
	}
	b.WriteString("</svg>\n")
	return []byte(b.String())
}

// measured returns the names of the contenders that were measured.
func measured(points []scenario.Result) []string {
	var names []string
	for _, row := range points[0].Rows {
		if row.Missing == "" {
			names = append(names, row.Name)
		}
	}
	return names
}

// spreadOf returns the figure of the contender of that name.
func spreadOf(point scenario.Result, name string, figure scenario.Figure) stats.Spread {
	i := slices.IndexFunc(point.Rows, func(r scenario.Row) bool { return r.Name == name })
	return point.Rows[i].Spread(figure)
}

// scale maps measured values to the drawing.
type scale struct {
	figure    scenario.Figure
	callers   []int // with a mark
	marks     []float64
	low, high float64 // the first mark and the last
	most      float64 // callers
}

// scales returns a scale that contains the whole curve.
func scales(points []scenario.Result, figure scenario.Figure) scale {
	s := scale{figure: figure, most: 2, low: math.Inf(1)}
	for _, p := range points {
		s.callers = append(s.callers, p.Callers)
		s.most = max(s.most, float64(p.Callers))
		for _, name := range measured(points) {
			if spread := spreadOf(p, name, figure); !math.IsNaN(spread.Median) {
				s.low, s.high = min(s.low, spread.Low), max(s.high, spread.High)
			}
		}
	}
	s.marks = marks(s.low, s.high)
	s.low, s.high = s.marks[0], s.marks[len(s.marks)-1]
	return s
}

// marks returns 1, 2 and 5 times powers of ten, from the last one up to low to the first one from high.
func marks(low, high float64) []float64 {
	if !(low > 0) || math.IsInf(low, 0) || high < low {
		return []float64{1, 10}
	}
	var all []float64
	for exponent := math.Floor(math.Log10(low)); ; exponent++ {
		for _, digit := range []float64{1, 2, 5} {
			mark := digit * math.Pow(10, exponent)
			if len(all) > 0 && mark <= low {
				all = all[:0]
			}
			all = append(all, mark)
			if mark >= high && len(all) > 1 {
				return all
			}
		}
	}
}

func (s scale) x(callers int) float64 {
	const begin, end = left + inset, width - right - inset
	return begin + (end-begin)*math.Log(float64(callers))/math.Log(s.most)
}

func (s scale) y(value float64) float64 {
	return height - bottom - (height-top-bottom)*math.Log(value/s.low)/math.Log(s.high/s.low)
}

func (s scale) axes(w io.Writer) {
	for _, mark := range s.marks {
		fmt.Fprintf(w, `<path class="grid" d="M%d %.1fH%d"/><text x="%d" y="%.1f" text-anchor="end">%s</text>`+"\n",
			left, s.y(mark), width-right, left-6, s.y(mark)+4, s.mark(mark))
	}
	for _, callers := range s.callers {
		fmt.Fprintf(w, `<text x="%.1f" y="%d" text-anchor="middle">%d</text>`+"\n", s.x(callers), height-bottom+18, callers)
	}
	fmt.Fprintf(w, `<text x="%d" y="%d" text-anchor="middle">callers</text>`+"\n", (left+width-right)/2, height-8)
}

// line draws the medians of a contender, the i-th of n, and their spreads.
func (s scale) line(w io.Writer, points []scenario.Result, name string, i, n int) {
	class, path, spreads, dots := i%len(colours()), &strings.Builder{}, &strings.Builder{}, &strings.Builder{}
	for _, p := range points {
		spread := spreadOf(p, name, s.figure)
		if math.IsNaN(spread.Median) {
			continue
		}
		x, y := s.x(p.Callers)+dodge*(float64(i)-float64(n-1)/2), s.y(spread.Median)
		fmt.Fprintf(path, "%c%.1f %.1f", "ML"[min(path.Len(), 1)], x, y)
		fmt.Fprintf(spreads, "M%.1f %.1fV%.1f", x, s.y(spread.Low), s.y(spread.High))
		fmt.Fprintf(dots, `<circle class="d%d" cx="%.1f" cy="%.1f" r="3.5"/>`, class, x, y)
	}
	thick := ""
	if i == 0 {
		thick = " first"
	}
	fmt.Fprintf(w, `<path class="spread c%d" d="%s"/><path class="line c%d%s" d="%s"/>%s`+"\n", class, spreads, class,
		thick, path, dots)
}

// mark returns the text of a mark beside the axis.
func (s scale) mark(mark float64) string {
	switch {
	case s.figure == scenario.Processor:
		return scenario.FormatSeconds(mark)
	case mark >= 1e6:
		return fmt.Sprintf("%gM", mark/1e6)
	case mark >= 1e3:
		return fmt.Sprintf("%gk", mark/1e3)
	}
	return fmt.Sprintf("%g", mark)
}

func escape(text string) string {
	var b strings.Builder
	_ = xml.EscapeText(&b, []byte(text))
	return b.String()
}
