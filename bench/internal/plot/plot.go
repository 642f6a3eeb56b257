// Package plot draws the curves of a run.
package plot

import (
	"encoding/xml"
	"fmt"
	"io"
	"math"
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

// Figure is the figure that a drawing shows.
type Figure struct {
	title string
	of    func(scenario.Point) *stats.Spread // nil if it was not measured
	mark  func(float64) string               // formats a value beside the axis
}

// Throughput is the number of calls a second.
func Throughput() Figure {
	return Figure{
		title: "calls a second, all callers together",
		of:    func(p scenario.Point) *stats.Spread { return p.Throughput.Known() },
		mark:  short,
	}
}

// Processor is the processor time of a call.
func Processor() Figure {
	return Figure{
		title: "the processor's time for a call, client and server",
		of:    func(p scenario.Point) *stats.Spread { return p.Processor },
		mark:  scenario.FormatSeconds,
	}
}

// SVG returns a drawing of a figure that is readable on light and on dark. Both axes are logarithmic: the same distance
// is the same ratio. An upright stroke is the middle half of the rounds.
func SVG(c scenario.Curve, f Figure) []byte {
	var b strings.Builder
	s := scales(c, f)
	fmt.Fprintf(&b,
		`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" role="img" aria-labelledby="title">
<title id="title">%s</title>
<style>
  text { font: 12px sans-serif; fill: #24292f } .name { font-weight: bold }
  .grid { stroke: #d0d7de; fill: none } .line { fill: none; stroke-width: 2 } .first { stroke-width: 3 } .spread { fill: none; stroke-width: 1.2; opacity: .6 }
`, width, height, width, height, escape(c.Name+": "+f.title+", over the number of callers"))
	for i, colour := range colours() {
		fmt.Fprintf(&b, "  .c%d { stroke: %s } .d%d { fill: %s }\n", i, colour[0], i, colour[0])
	}
	b.WriteString("  @media (prefers-color-scheme: dark) {\n    text { fill: #e6edf3 } .grid { stroke: #30363d }\n")
	for i, colour := range colours() {
		fmt.Fprintf(&b, "    .c%d { stroke: %s } .d%d { fill: %s }\n", i, colour[1], i, colour[1])
	}
	b.WriteString("  }\n</style>\n")
	s.axes(&b)
	fmt.Fprintf(&b, `<text class="name" x="%d" y="18">%s: %s</text>`+"\n", left, escape(c.Name), f.title)
	for i := len(c.Lines) - 1; i >= 0; i-- { // draw the first one on top
		s.line(&b, c.Lines[i], i, len(c.Lines))
	}
	for i, line := range c.Lines {
		x, y := left+i%legendColumns*(width-left-right)/legendColumns, 36+i/legendColumns*legendHeight
		fmt.Fprintf(&b,
			`<g transform="translate(%d %d)"><path class="line c%d" d="M0 0h20"/><circle class="d%d" cx="10" cy="0" r="3.5"/><text x="26" y="4">%s</text></g>`+"\n",
			x, y, i%len(colours()), i%len(colours()), escape(line.Contender))
	}
	b.WriteString("</svg>\n")
	return []byte(b.String())
}

// scale maps measured values to the drawing.
type scale struct {
	figure    Figure
	callers   []int // with a mark
	marks     []float64
	low, high float64 // the first mark and the last
	most      float64 // callers
}

// scales returns a scale that contains the whole curve.
func scales(c scenario.Curve, f Figure) scale {
	s := scale{figure: f, most: 2, low: math.Inf(1)}
	seen := map[int]bool{}
	for _, line := range c.Lines {
		for _, p := range line.Points {
			if !seen[p.Callers] {
				seen[p.Callers] = true
				s.callers = append(s.callers, p.Callers)
			}
			s.most = max(s.most, float64(p.Callers))
			if spread := f.of(p); spread != nil {
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
			left, s.y(mark), width-right, left-6, s.y(mark)+4, s.figure.mark(mark))
	}
	for _, callers := range s.callers {
		fmt.Fprintf(w, `<text x="%.1f" y="%d" text-anchor="middle">%d</text>`+"\n", s.x(callers), height-bottom+18, callers)
	}
	fmt.Fprintf(w, `<text x="%d" y="%d" text-anchor="middle">callers</text>`+"\n", (left+width-right)/2, height-8)
}

// line draws the medians of the i-th of n lines, and their spreads.
func (s scale) line(w io.Writer, line scenario.Line, i, n int) {
	class, path, spreads, dots := i%len(colours()), &strings.Builder{}, &strings.Builder{}, &strings.Builder{}
	for _, p := range line.Points {
		spread := s.figure.of(p)
		if spread == nil {
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

// short returns the text of a mark beside the axis.
func short(mark float64) string {
	switch {
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
