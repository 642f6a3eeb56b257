package scenario

import (
	"math"
	"regexp"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/bench/internal/contender"
	"github.com/pgratelimit/pgratelimit/bench/internal/stats"
)

// throughputs returns a row whose rounds had these throughputs.
func throughputs(name string, values ...float64) Row {
	row := Row{Name: name}
	for _, v := range values {
		row.Rounds = append(row.Rounds, contender.Round{Throughput: v, P50: 1 / v, Attempts: math.NaN(), Processor: 2 / v})
	}
	return row
}

func TestBars(t *testing.T) {
	t.Parallel()
	rows := []Row{throughputs("a", 200, 300, 400), throughputs("b", 100, 200, 100), throughputs("missing")}
	facts := []Measurement{{Name: "size", Value: 64}}
	for _, test := range []struct {
		bar               Bar
		measured, reached bool
		says              string
	}{
		{Bar{Contender: "a", Figure: Throughput, Against: "b", AtLeast: 2}, true, true, "throughput of a at least 2.00 x b"},
		{Bar{Contender: "a", Figure: Throughput, Against: "b", AtLeast: 2.1}, true, false, "throughput of a at least 2.10 x b"},
		{Bar{Contender: "a", Figure: P50, Against: "b", AtMost: 0.5}, true, true, "p50 of a at most 0.50 x b"},
		{Bar{Contender: "b", Figure: P50, AtMost: 0.009}, true, false, "p50 of b at most 9ms"},
		{Bar{Fact: "size", AtMost: 64}, true, true, "size at most 64"},
		{Bar{Contender: "a", Figure: Throughput, Against: "missing", AtLeast: 1}, false, false, "throughput of a at least 1.00 x missing"},
		{Bar{Contender: "a", Figure: Attempts, AtMost: 1.1}, false, false, "attempts of a at most 1.10"},
		{Bar{Fact: "weight", AtMost: 1}, false, false, "weight at most 1"},
	} {
		result := Result{Scenario: Scenario{Bars: []Bar{test.bar}}, Rows: slices.Clone(rows), Measured: facts}
		result.judge()
		require.Len(t, result.Verdicts, 1)
		require.Equal(t, test.measured, result.Verdicts[0].Measured, test.says)
		require.Equal(t, test.reached, result.Verdicts[0].Reached, test.says)
		require.Equal(t, test.says, result.Verdicts[0].String())
	}
}

func TestRowsAreComparedWithTheFirst(t *testing.T) {
	t.Parallel()
	result := Result{
		Scenario: Scenario{Compare: Throughput},
		Rows:     []Row{throughputs("a", 200, 300, 400), throughputs("b", 100, 200, 100)},
	}
	result.judge()
	require.Equal(t, stats.Of([]float64{2, 1.5, 4}), result.Rows[1].Ratio)
	require.InDelta(t, 0.5, result.Rows[1].Cost.Median, 1e-9)
}

// A bar that names a contender wrongly would never be measured, without an error.
func TestBarsNameExistingScenarios(t *testing.T) {
	t.Parallel()
	plain := regexp.MustCompile(`^[a-z0-9-]+$`)
	for _, quick := range []bool{true, false} {
		names := map[string]bool{}
		for _, s := range All(quick) {
			require.Regexp(t, plain, s.Name)
			require.False(t, names[s.Name], "%s is there twice", s.Name)
			names[s.Name] = true
			there := map[string]bool{"": true}
			for _, c := range s.Contenders {
				there[c.Name] = true
			}
			facts := map[string]bool{"": true}
			for _, f := range s.Facts {
				facts[f.Name] = true
			}
			require.True(t, s.Curve == "" || len(s.Bars) == 0, "%s: a point of a curve has no bars", s.Name)
			for _, b := range s.Bars {
				require.True(t, there[b.Contender] && there[b.Against] && facts[b.Fact], "%s: %s", s.Name, b)
				require.True(t, b.Contender != "" || b.Fact != "", "%s: %s", s.Name, b)
			}
		}
	}
}

func TestFormats(t *testing.T) {
	t.Parallel()
	tests := []struct{ got, want string }{
		{FormatCount(1234567.8), "1,234,568"},
		{FormatSeconds(0.0001234567), "123µs"},
		{FormatSeconds(3e-7), "300ns"},
		{FormatSeconds(1.23456), "1.23s"},
		{FormatRatio(1.2345), "1.23"},
		{FormatRatio(0.0012345), "0.0012"},
		{Trips.Format(0.01234), "0.012"},
		{WAL.Format(0), "0.00"},
		{Attempts.Format(math.NaN()), "-"},
	}
	for _, test := range tests {
		require.Equal(t, test.want, test.got)
	}
}

func TestCurves(t *testing.T) {
	t.Parallel()
	point := func(curve string, callers int, rows ...Row) Result {
		r := Result{Scenario: Scenario{Curve: curve, Callers: callers, Compare: Throughput}, Rows: rows}
		r.judge()
		return r
	}
	results := []Result{
		point("", 1, throughputs("a", 7)),
		point("many", 1, throughputs("a", 100, 110, 150), throughputs("b", 200, 200, 200)),
		point("many", 4, throughputs("a", 300), throughputs("b", 600), Row{Name: "c", Missing: "not here"}),
		point("hot", 1, throughputs("a", 5)),
	}
	curves := Curves(results)
	require.Len(t, curves, 2, "what is a point of none is in none")
	many := curves[0]
	require.Equal(t, "many", many.Name)
	require.Len(t, many.Lines, 2, "what was not measured has no line")
	require.Equal(t, "b", many.Lines[1].Contender)
	require.Equal(t, stats.Of([]float64{100, 110, 150}), many.Lines[0].Points[0].Throughput)
	require.Equal(t, 4, many.Lines[1].Points[1].Callers)
	require.Equal(t, "hot", curves[1].Name)
}
