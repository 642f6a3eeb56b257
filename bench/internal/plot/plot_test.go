package plot_test

import (
	"encoding/xml"
	"errors"
	"io"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/bench/internal/plot"
	"github.com/pgratelimit/pgratelimit/bench/internal/scenario"
	"github.com/pgratelimit/pgratelimit/bench/internal/stats"
)

// rising returns a line with so many times the calls of the callers.
func rising(name string, times float64) scenario.Line {
	line := scenario.Line{Contender: name}
	for callers := 1; callers <= 1024; callers *= 4 {
		calls := times * float64(callers)
		line.Points = append(line.Points, scenario.Point{Callers: callers, Throughput: stats.Spread{Median: calls, Low: calls * 0.9, High: calls * 1.2}})
	}
	return line
}

// parse fails when the drawing is not well-formed, and returns the attributes d, cx and cy and the texts.
func parse(t *testing.T, svg []byte) (attributes map[string][]string, texts string) {
	t.Helper()
	attributes = map[string][]string{}
	decoder := xml.NewDecoder(strings.NewReader(string(svg)))
	for {
		token, err := decoder.Token()
		if errors.Is(err, io.EOF) {
			return attributes, texts
		}
		require.NoError(t, err)
		switch token := token.(type) {
		case xml.StartElement:
			for _, a := range token.Attr {
				attributes[a.Name.Local] = append(attributes[a.Name.Local], a.Value)
			}
		case xml.CharData:
			texts += string(token) + "\n"
		}
	}
}

func TestSVG(t *testing.T) {
	t.Parallel()
	point := scenario.Point{Callers: 1, Throughput: stats.Spread{Median: 1000, Low: 1000, High: 1000}}
	var many []scenario.Line // more than there are colours
	for i := range 7 {
		many = append(many, rising(strconv.Itoa(i), float64(i+1)))
	}
	cost := rising("a", 1000)
	for i := range cost.Points[1:] { // of the first it is not known
		cost.Points[i+1].Processor = &stats.Spread{Median: 2e-5, Low: 1.5e-5, High: 3e-5}
	}
	for _, c := range []struct {
		name   string
		lines  []scenario.Line
		figure plot.Figure
		dots   int // with those of the legend
		says   string
	}{
		{"two contenders", []scenario.Line{rising("a", 1000), rising("b", 300)}, plot.Throughput(), 14, ""},
		{"many", many, plot.Throughput(), 49, ""},
		{"one", []scenario.Line{{Contender: "a", Points: []scenario.Point{point}}}, plot.Throughput(), 2, ""},
		{`<b> & "c"`, []scenario.Line{rising("a < b & c", 1)}, plot.Throughput(), 7, ""},
		{"nothing", nil, plot.Throughput(), 0, ""},
		{"many: the processor's time for a call", []scenario.Line{cost}, plot.Processor(), 6, "20µs\n"},
	} {
		name, _, _ := strings.Cut(c.name, ":")
		attributes, texts := parse(t, plot.SVG(scenario.Curve{Name: name, Lines: c.lines}, c.figure))
		require.Contains(t, texts, c.name)
		require.Contains(t, texts, c.says)
		require.Len(t, attributes["cx"], c.dots)
		for _, line := range c.lines {
			require.Contains(t, texts, line.Contender)
		}
		for _, number := range append(attributes["cx"], attributes["cy"]...) {
			value, err := strconv.ParseFloat(number, 64)
			require.NoError(t, err)
			require.True(t, value >= 0 && value <= 720, "%v is outside of the drawing", value)
		}
		require.NotRegexp(t, `NaN|Inf`, strings.Join(attributes["d"], " "))
	}
}

// Twice as much is the same distance everywhere.
func TestSVGIsLogarithmic(t *testing.T) {
	t.Parallel()
	attributes, _ := parse(t, plot.SVG(scenario.Curve{Lines: []scenario.Line{rising("a", 1000)}}, plot.Throughput()))
	var x, y []float64
	for i := range 6 { // the last one is the legend's
		cx, err := strconv.ParseFloat(attributes["cx"][i], 64)
		require.NoError(t, err)
		cy, err := strconv.ParseFloat(attributes["cy"][i], 64)
		require.NoError(t, err)
		x, y = append(x, cx), append(y, cy)
	}
	for i := 2; i < 6; i++ {
		require.InDelta(t, x[1]-x[0], x[i]-x[i-1], 0.2)
		require.InDelta(t, y[1]-y[0], y[i]-y[i-1], 0.2)
	}
	require.Greater(t, x[1], x[0])
	require.Less(t, y[1], y[0])
}
