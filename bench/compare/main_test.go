package main

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pgratelimit/pgratelimit/bench/internal/server"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// TestWork measures two rounds as the process of one side does: that it can, not how fast.
func TestWork(t *testing.T) {
	t.Parallel()
	var output bytes.Buffer
	err := work(t.Context(), "hot-512", 10*time.Millisecond, strings.NewReader("\n\n"), &output)
	if server.MayBeSkipped(err) {
		t.Skip(err)
	}
	require.NoError(t, err)
	lines := strings.Split(strings.TrimSpace(output.String()), "\n")
	require.Len(t, lines, 3, "that it is ready, and two rounds")
	for _, line := range lines[1:] {
		var m measured
		require.NoError(t, json.Unmarshal([]byte(line), &m))
		require.Positive(t, m.Throughput)
		require.Positive(t, m.Trips)
	}
}

func TestWorkSaysWhichScenarioThereIsNot(t *testing.T) {
	t.Parallel()
	require.ErrorContains(t, work(t.Context(), "no-such", time.Second, strings.NewReader(""), &bytes.Buffer{}), `"no-such"`)
}

func TestRatiosAreThoseOfTheSameRound(t *testing.T) {
	t.Parallel()
	now, base := &side{rounds: []measured{{Throughput: 2}, {Throughput: 30}}}, &side{rounds: []measured{{Throughput: 1}, {Throughput: 10}}}
	require.Equal(t, "2.50 (2.00..3.00)", ratio(now, base, func(m measured) float64 { return m.Throughput }))
}

func TestOptions(t *testing.T) {
	t.Parallel()
	o, err := parse([]string{"-base", "v1", "-rounds", "3", "-seconds", "0.5", "-run", "hot"})
	require.NoError(t, err)
	require.Equal(t, "v1", o.base)
	require.Equal(t, 3, o.rounds)
	require.Equal(t, 500*time.Millisecond, o.round)
	require.True(t, o.only.MatchString("hot-512"))
	for _, wrong := range [][]string{{"-rounds", "0"}, {"-seconds", "-1"}, {"-run", "("}, {"surplus"}} {
		_, err := parse(wrong)
		require.Error(t, err, "%v", wrong)
	}
}
