package plot_test

import (
	"encoding/xml"
	"errors"
	"io"
	"math"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/bench/internal/contender"
	"github.com/pgratelimit/pgratelimit/bench/internal/plot"
	"github.com/pgratelimit/pgratelimit/bench/internal/scenario"
)

// rising returns the points of a curve whose i-th contender makes times[i] calls for each caller.
func rising(name string, times ...float64) []scenario.Result {
	var points []scenario.Result
	for callers := 1; callers <= 1024; callers *= 4 {
		point := scenario.Result{Scenario: scenario.Scenario{Curve: name, Callers: callers}}
		for i, factor := range times {
			calls := factor * float64(callers)
			point.Rows = append(point.Rows, scenario.Row{Name: strconv.Itoa(i) + " < & b", Rounds: []contender.Round{
				{Throughput: calls * 0.9, Processor: 15e-6}, {Throughput: calls, Processor: 20e-6}, {Throughput: calls * 1.2, Processor: 30e-6},
			}})
		}
		points = append(points, point)
	}
	return points
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
	cost := rising("many", 1000)
	cost[0].Rows[0].Rounds[0].Processor = math.NaN()
	absent := rising("one is missing", 1000)
	for i := range absent {
		absent[i].Rows = append(absent[i].Rows, scenario.Row{Name: "theirs", Missing: "not here"})
	}
	for _, c := range []struct {
		name   string
		points []scenario.Result
		figure scenario.Figure
		dots   int // with those of the legend
		says   string
	}{
		{"two contenders", rising("two contenders", 1000, 300), scenario.Throughput, 14, ""},
		{"many", rising("many", 1, 2, 3, 4, 5, 6, 7), scenario.Throughput, 49, ""}, // more than there are colours
		{"one point", rising("one point", 1000)[:1], scenario.Throughput, 2, ""},
		{"one is missing", absent, scenario.Throughput, 7, ""},
		{`<b> & "c"`, rising(`<b> & "c"`, 1), scenario.Throughput, 7, ""},
		{"many: the processor's time for a call", cost, scenario.Processor, 6, "20µs\n"},
	} {
		attributes, texts := parse(t, plot.SVG(c.points, c.figure))
		require.Contains(t, texts, c.name)
		require.Contains(t, texts, c.says)
		require.Contains(t, texts, "0 < & b")
		require.Len(t, attributes["cx"], c.dots, c.name)
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
	attributes, _ := parse(t, plot.SVG(rising("a", 1000), scenario.Throughput))
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
