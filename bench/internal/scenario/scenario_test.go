package scenario

import (
	"math"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/bench/internal/contender"
	"github.com/pgratelimit/pgratelimit/bench/internal/stats"
)

// throughputs returns a row whose rounds had these throughputs.
func throughputs(name string, values ...float64) Row {
	row := Row{Name: name}
	for _, v := range values {
		row.Rounds = append(row.Rounds, contender.Round{Throughput: v, Processor: 2 / v})
	}
	return row
}

func TestRowsAreComparedWithTheFirst(t *testing.T) {
	t.Parallel()
	result := Result{Rows: []Row{throughputs("a", 200, 300, 400), throughputs("b", 100, 200, 100)}}
	require.Equal(t, stats.Of([]float64{2, 1.5, 4}), result.Ratio(Throughput, result.Rows[1]))
	require.InDelta(t, 0.5, result.Ratio(Processor, result.Rows[1]).Median, 1e-9)
}

func TestNamesAreUnique(t *testing.T) {
	t.Parallel()
	plain := regexp.MustCompile(`^[a-z0-9-]+$`)
	for _, quick := range []bool{true, false} {
		names := map[string]bool{}
		for _, s := range All(quick) {
			require.Regexp(t, plain, s.Name)
			require.False(t, names[s.Name], "%s is there twice", s.Name)
			names[s.Name] = true
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
