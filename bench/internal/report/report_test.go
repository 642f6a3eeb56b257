package report_test

import (
	"bytes"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/bench/internal/contender"
	"github.com/pgratelimit/pgratelimit/bench/internal/report"
	"github.com/pgratelimit/pgratelimit/bench/internal/scenario"
	"github.com/pgratelimit/pgratelimit/bench/internal/server"
	"github.com/pgratelimit/pgratelimit/bench/internal/stats"
)

// measured returns a run of a scenario with two rounds, and a contender that was not there. It is a point of that
// curve, if any.
func measured(curve string) report.Run {
	nan := math.NaN()
	return report.Run{
		Machine: server.Machine{CPU: "a processor", Cores: 2, Load: 0.5}, Postgres: "PostgreSQL 18", Settings: map[string]string{"fsync": "on"},
		Redis: "Redis 7", Rounds: 2, Round: time.Second,
		Results: []scenario.Result{{
			Scenario: scenario.Scenario{Name: "curve-hot-4", Title: "a title", Curve: curve, Callers: 4, Compare: scenario.Throughput},
			Rows: []scenario.Row{
				{Name: "ours", Rounds: []contender.Round{
					{Throughput: 100, P50: 0.01, Attempts: nan, Processor: 0.001}, {Throughput: 120, P50: 0.02, Attempts: nan, Processor: 0.003},
				}, Ratio: stats.Of([]float64{1, 1})},
				{Name: "theirs", Rounds: []contender.Round{{Throughput: 50, Attempts: nan, Processor: nan}, {Throughput: 40, Attempts: nan, Processor: nan}}, Ratio: stats.Of([]float64{2, 3}), Cost: stats.Of([]float64{0.4, 0.6})},
				{Name: "nobody's", Missing: "not here", Ratio: stats.Of(nil)},
			},
			Measured: []scenario.Measurement{{Name: "size", Value: 64}},
			Verdicts: []scenario.Verdict{{Bar: scenario.Bar{Fact: "size", AtMost: 64}, Value: stats.Of([]float64{64}), Measured: true, Reached: true}},
		}},
	}
}

func TestJSON(t *testing.T) {
	t.Parallel()
	run := measured("")
	written := report.Of(run)
	var text bytes.Buffer
	require.NoError(t, written.JSON(&text))
	read, err := report.ReadJSON(&text)
	require.NoError(t, err)
	written.Results = nil // Scenarios and Curves have them
	require.Equal(t, written, read)

	figures := read.Scenarios["curve-hot-4"]
	require.Equal(t, 110.0, figures["ours"][scenario.Throughput].Median)
	require.NotContains(t, figures["ours"], scenario.Attempts, "it was not measured")
	require.Empty(t, figures["nobody's"])

	written = report.Of(measured("one hot key"))
	require.NoError(t, written.JSON(&text))
	read, err = report.ReadJSON(&text)
	require.NoError(t, err)
	require.Equal(t, written.Curves, read.Curves)
	require.Len(t, read.Curves[0].Lines, 2)
	require.Empty(t, read.Scenarios, "its points are in the curve")

	_, err = report.ReadJSON(bytes.NewBufferString("{"))
	require.ErrorContains(t, err, "read the figures")
}

func TestResult(t *testing.T) {
	t.Parallel()
	var text bytes.Buffer
	report.Result(&text, measured("").Results[0])
	require.Equal(t, `
curve-hot-4: a title
                   calls/s   p50  p99  trips  attempts  WAL B  allocs  cpu  throughput: first / this  cpu: first / this
  ours      110 (100..120)  15ms   0s  0.000         -   0.00     0.0  2ms                                             
  theirs       45 (40..50)    0s   0s  0.000         -   0.00     0.0    -         2.50 (2.00..3.00)  0.50 (0.40..0.60)
  nobody's: not here
  size: 64
  reached: size at most 64; it is 64
`, text.String())
}
