package report_test

import (
	"bytes"
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/bench/internal/contender"
	"github.com/pgratelimit/pgratelimit/bench/internal/report"
	"github.com/pgratelimit/pgratelimit/bench/internal/scenario"
)

func TestResult(t *testing.T) {
	t.Parallel()
	nan := math.NaN()
	var text bytes.Buffer
	report.Result(&text, scenario.Result{
		Scenario: scenario.Scenario{Name: "curve-hot-4", Title: "a title", Callers: 4, Compare: scenario.Throughput},
		Rows: []scenario.Row{
			{Name: "ours", Rounds: []contender.Round{
				{Throughput: 100, P50: 0.01, Attempts: nan, Processor: 0.001},
				{Throughput: 120, P50: 0.02, Attempts: nan, Processor: 0.003},
			}},
			{Name: "theirs", Rounds: []contender.Round{
				{Throughput: 50, Attempts: nan, Processor: nan}, {Throughput: 40, Attempts: nan, Processor: nan},
			}},
			{Name: "nobody's", Missing: "not here"},
		},
	})
	require.Equal(t, `
curve-hot-4: a title
                   calls/s   p50  p99  trips  attempts  WAL B  allocs  cpu  throughput: first / this  cpu: first / this
  ours      110 (100..120)  15ms   0s  0.000         -   0.00     0.0  2ms                                             
  theirs       45 (40..50)    0s   0s  0.000         -   0.00     0.0    -         2.50 (2.00..3.00)                  -
  nobody's: not here
`, text.String())
}
