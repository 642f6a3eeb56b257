package against

import (
	"errors"
	"io"
	"math"
	"net/rpc"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/bench/internal/contender"
	"github.com/pgratelimit/pgratelimit/bench/internal/load"
	"github.com/pgratelimit/pgratelimit/bench/internal/scenario"
	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// TestWork asks for two rounds and their check, as for the process of another commit: that it answers, not how fast it
// is.
func TestWork(t *testing.T) {
	t.Parallel()
	all := scenario.All(true)
	s := all[slices.IndexFunc(all, func(s scenario.Scenario) bool { return s.Name == "hot-512" })]
	asked, ask := io.Pipe()
	answers, answer := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		err := Work(t.Context(), s, asked, answer)
		asked.Close() // as the end of the process does: whoever asks it waits no longer
		answer.Close()
		ended <- err
	}()
	side := remote{rpc.NewClient(pipe{answers, ask}), func() error { return nil }}
	if err := side.Check(t.Context()); err != nil {
		postgrestest.GiveUp(t, errors.Join(<-ended, err))
	}
	for range 2 {
		round, err := side.Run(t.Context(), load.Amount{For: 10 * time.Millisecond})
		require.NoError(t, err)
		require.Positive(t, round.Throughput)
		require.Positive(t, round.Trips)
		require.True(t, math.IsNaN(round.Attempts), "what was not measured comes across as such")
	}
	require.NoError(t, side.Check(t.Context()))
	require.NoError(t, side.Close())
	require.NoError(t, <-ended)
}

func TestAProcessThatDoesNotExist(t *testing.T) {
	t.Parallel()
	_, err := Process{Program: "/no/such/program"}.Open(t.Context(), contender.Bench{})
	require.Error(t, err)
	_, err = Process{Program: "true"}.Open(t.Context(), contender.Bench{})
	require.ErrorContains(t, err, "the process of the other limiter")
}
