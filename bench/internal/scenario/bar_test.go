package scenario_test

import (
	"math"
	"regexp"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/bench/internal/contender"
	"github.com/pgratelimit/pgratelimit/bench/internal/scenario"
	"github.com/pgratelimit/pgratelimit/bench/internal/stats"
)

// throughputs returns a row whose rounds had these throughputs.
func throughputs(name string, values ...float64) scenario.Row {
	row := scenario.Row{Name: name}
	for _, v := range values {
		row.Rounds = append(row.Rounds, contender.Round{Throughput: v, P50: 1 / v, Attempts: math.NaN(), Processor: 2 / v})
	}
	return row
}

func TestBars(t *testing.T) {
	t.Parallel()
	rows := []scenario.Row{throughputs("a", 200, 300, 400), throughputs("b", 100, 200, 100), throughputs("missing")}
	facts := []scenario.Measurement{{Name: "size", Value: 64}}
	for _, test := range []struct {
		bar               scenario.Bar
		measured, reached bool
		says              string
	}{
		{scenario.Bar{Contender: "a", Figure: scenario.Throughput, Against: "b", AtLeast: 2}, true, true, "throughput of a at least 2.00 x b"},
		{scenario.Bar{Contender: "a", Figure: scenario.Throughput, Against: "b", AtLeast: 2.1}, true, false, "throughput of a at least 2.10 x b"},
		{scenario.Bar{Contender: "a", Figure: scenario.P50, Against: "b", AtMost: 0.5}, true, true, "p50 of a at most 0.50 x b"},
		{scenario.Bar{Contender: "b", Figure: scenario.P50, AtMost: 0.009}, true, false, "p50 of b at most 9ms"},
		{scenario.Bar{Fact: "size", AtMost: 64}, true, true, "size at most 64"},
		{scenario.Bar{Contender: "a", Figure: scenario.Throughput, Against: "missing", AtLeast: 1}, false, false, "throughput of a at least 1.00 x missing"},
		{scenario.Bar{Contender: "a", Figure: scenario.Attempts, AtMost: 1.1}, false, false, "attempts of a at most 1.10"},
		{scenario.Bar{Fact: "weight", AtMost: 1}, false, false, "weight at most 1"},
	} {
		result := scenario.Result{Scenario: scenario.Scenario{Bars: []scenario.Bar{test.bar}}, Rows: slices.Clone(rows), Measured: facts}
		result.Judge()
		require.Len(t, result.Verdicts, 1)
		require.Equal(t, test.measured, result.Verdicts[0].Measured, test.says)
		require.Equal(t, test.reached, result.Verdicts[0].Reached, test.says)
		require.Equal(t, test.says, result.Verdicts[0].String())
	}
}

func TestRowsAreComparedWithTheFirst(t *testing.T) {
	t.Parallel()
	result := scenario.Result{
		Scenario: scenario.Scenario{Compare: scenario.Throughput},
		Rows:     []scenario.Row{throughputs("a", 200, 300, 400), throughputs("b", 100, 200, 100)},
	}
	result.Judge()
	require.Equal(t, stats.Of([]float64{2, 1.5, 4}), result.Rows[1].Ratio)
	require.InDelta(t, 0.5, result.Rows[1].Cost.Median, 1e-9)
}

// A bar that names a contender wrongly would never be measured, without an error.
func TestBarsNameWhatIsThere(t *testing.T) {
	t.Parallel()
	plain := regexp.MustCompile(`^[a-z0-9-]+$`)
	for _, quick := range []bool{true, false} {
		names := map[string]bool{}
		for _, s := range scenario.All(quick) {
			require.Regexp(t, plain, s.Name)
			require.False(t, names[s.Name], "%s is there twice", s.Name)
			names[s.Name] = true
			there := map[string]bool{"": true, "first 10 %": s.Calls > 0, "last 10 %": s.Calls > 0}
			for _, c := range s.Contenders {
				there[c.Name] = true
			}
			facts := map[string]bool{"": true}
			for _, f := range s.Facts {
				facts[f.Name] = true
			}
			require.Equal(t, s.Curve == "", len(s.Bars) > 0, "%s: a point of a curve has no bars, and others have", s.Name)
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
		{scenario.FormatCount(1234567.8), "1,234,568"},
		{scenario.FormatSeconds(0.0001234567), "123µs"},
		{scenario.FormatSeconds(3e-7), "300ns"},
		{scenario.FormatSeconds(1.23456), "1.23s"},
		{scenario.FormatRatio(1.2345), "1.23"},
		{scenario.FormatRatio(0.0012345), "0.0012"},
		{scenario.Trips.Format(0.01234), "0.012"},
		{scenario.WAL.Format(0), "0.00"},
		{scenario.Attempts.Format(math.NaN()), "-"},
	}
	for _, test := range tests {
		require.Equal(t, test.want, test.got)
	}
}
