package main

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/bench/internal/report"
	"github.com/pgratelimit/pgratelimit/bench/internal/server"
	"github.com/pgratelimit/pgratelimit/internal/leaktest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// TestRun runs scenarios of different kinds for a moment: that they can be run, not how fast they are.
func TestRun(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "starts a server for the benchmark")
	directory := t.TempDir()
	o := options{
		quick: true, only: regexp.MustCompile(`^(five-1|disk-1|sliding-64|rules-64|acquire-16|pair-1|reserve-1|hot-tx|cached-1|curve-hot-(1|16))$`), named: true, contenders: regexp.MustCompile(""),
		rounds: 2, round: 10 * time.Millisecond, json: filepath.Join(directory, "figures.json"), svg: directory,
	}
	var output bytes.Buffer
	err := run(t.Context(), &output, o)
	if server.MayBeSkipped(err) {
		t.Skip(err)
	}
	require.NoError(t, err)
	written, err := os.ReadFile(o.json)
	require.NoError(t, err)
	document, err := report.ReadJSON(bytes.NewReader(written))
	require.NoError(t, err)
	require.Positive(t, document.Machine.Cores)
	require.Len(t, document.Scenarios, 9)
	for name, figures := range document.Scenarios["five-1"] {
		require.Positive(t, figures["throughput"].Median, name)
		require.InDelta(t, 1, figures["roundTrips"].Median, 0.01, name)
	}
	require.Len(t, document.Curves, 1)
	require.Len(t, document.Curves[0].Lines[0].Points, 2)

	t.Run("TheFileCanBeDrawnAgain", func(t *testing.T) {
		t.Parallel()
		again := t.TempDir()
		require.NoError(t, draw(options{draw: o.json, svg: again}))
		first, err := os.ReadFile(filepath.Join(directory, "curve-one-hot-key.svg"))
		require.NoError(t, err)
		second, err := os.ReadFile(filepath.Join(again, "curve-one-hot-key.svg"))
		require.NoError(t, err)
		require.Equal(t, string(first), string(second))
	})
}

func TestOptions(t *testing.T) {
	t.Parallel()
	t.Run("QuickRoundsAreShort", func(t *testing.T) {
		t.Parallel()
		o, err := parse([]string{"-quick"})
		require.NoError(t, err)
		require.Equal(t, quickRound, o.round)
	})
	t.Run("WhatIsAskedForWins", func(t *testing.T) {
		t.Parallel()
		o, err := parse([]string{"-quick", "-rounds", "7", "-seconds", "0.5", "-run", "hot"})
		require.NoError(t, err)
		require.Equal(t, 7, o.rounds)
		require.Equal(t, 500*time.Millisecond, o.round)
		require.Len(t, chosen(o), 4+6, "hot-512, hot-tx, hot-8 and hot-read, and the points of the curve")
	})
	t.Run("CurvesAreMeasuredWhenTheyAreNamed", func(t *testing.T) {
		t.Parallel()
		o, err := parse(nil)
		require.NoError(t, err)
		require.NotEmpty(t, chosen(o))
		for _, s := range chosen(o) {
			require.Empty(t, s.Curve)
		}
	})
	t.Run("TheFirstContenderIsAlwaysThere", func(t *testing.T) {
		t.Parallel()
		o, err := parse([]string{"-run", "take-64", "-contenders", "^redis_rate$"})
		require.NoError(t, err)
		s := chosen(o)[0]
		require.Len(t, s.Contenders, 2)
		require.Equal(t, "pgratelimit", s.Contenders[0].Name)
		require.Len(t, s.Bars, 1, "only the one about these two")
	})
	for _, wrong := range [][]string{{"-rounds", "-1"}, {"-seconds", "-1"}, {"-run", "("}, {"-contenders", "("}, {"surplus"}} {
		t.Run(wrong[0], func(t *testing.T) {
			t.Parallel()
			_, err := parse(wrong)
			require.Error(t, err)
		})
	}
}

func TestWorkSaysWhichScenarioThereIsNot(t *testing.T) {
	t.Parallel()
	require.ErrorContains(t, work(t.Context(), nil, nil, options{worker: "no-such"}), `"no-such"`)
}
