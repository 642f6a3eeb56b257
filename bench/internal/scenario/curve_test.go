package scenario_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/bench/internal/contender"
	"github.com/pgratelimit/pgratelimit/bench/internal/scenario"
	"github.com/pgratelimit/pgratelimit/bench/internal/stats"
)

func TestCurves(t *testing.T) {
	t.Parallel()
	point := func(curve string, callers int, rows ...scenario.Row) scenario.Result {
		r := scenario.Result{Scenario: scenario.Scenario{Curve: curve, Callers: callers, Compare: scenario.Throughput}, Rows: rows}
		r.Judge()
		return r
	}
	results := []scenario.Result{
		point("", 1, throughputs("a", 7)),
		point("many", 1, throughputs("a", 100, 110, 150), throughputs("b", 200, 200, 200)),
		point("many", 4, throughputs("a", 300), throughputs("b", 600), scenario.Row{Name: "c", Missing: "not here"}),
		point("hot", 1, throughputs("a", 5)),
	}
	curves := scenario.Curves(results)
	require.Len(t, curves, 2, "what is a point of none is in none")
	many := curves[0]
	require.Equal(t, "many", many.Name)
	require.Len(t, many.Lines, 2, "what was not measured has no line")
	require.Equal(t, "b", many.Lines[1].Contender)
	require.Equal(t, stats.Of([]float64{100, 110, 150}), many.Lines[0].Points[0].Throughput)
	require.Equal(t, 4, many.Lines[1].Points[1].Callers)
	require.Equal(t, "hot", curves[1].Name)
}

func TestVersus(t *testing.T) {
	t.Parallel()
	this, other := contender.Take{Keys: 1}, contender.Take{Keys: 2}
	for _, s := range scenario.All(true) {
		both := s.Versus(this, other, "v1")
		require.Len(t, both.Contenders, len(s.Contenders)+1)
		require.Equal(t, s.Contenders[0].Name, both.Contenders[0].Name, "bars go on naming it")
		require.Equal(t, s.Contenders[0].Name+" at v1", both.Contenders[1].Name)
		require.Equal(t, contender.Way(other), both.Contenders[1].Way)
		for i, c := range s.Contenders[1:] {
			require.Equal(t, c.Name, both.Contenders[2+i].Name)
		}
		require.Empty(t, both.Facts)
	}
}
