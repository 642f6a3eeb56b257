package simulate_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/cmd/ratelimit/internal/simulate"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/rules"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// document returns what a rules file says.
func document(t testing.TB, yaml string) rules.Document {
	t.Helper()
	d, err := rules.Read(strings.NewReader(yaml))
	require.NoError(t, err)
	return *d
}

// lines returns a source of the lines.
func lines(lines ...string) simulate.Source {
	return simulate.Reader("access.log", strings.NewReader(strings.Join(lines, "\n")))
}

// run replays lines that are fit to be replayed.
func run(t testing.TB, config simulate.Config, sources ...simulate.Source) *simulate.Report {
	t.Helper()
	report, err := simulate.Run(t.Context(), config, sources...)
	require.NoError(t, err)
	require.Equal(t, report.Lines, report.Unparsed.Count+report.Failed.Count+report.Unlimited+report.Decided)
	require.Equal(t, report.Decided, report.Admitted+report.Refused)
	return report
}
