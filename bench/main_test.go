package main

import (
	"bytes"
	"encoding/json"
	"io"
	"regexp"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pgratelimit/pgratelimit/bench/internal/server"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// TestRun runs three scenarios of different kinds for a moment: that they can be run, not how fast they are.
func TestRun(t *testing.T) {
	t.Parallel()
	var output bytes.Buffer
	o := options{quick: true, json: true, only: regexp.MustCompile(`^(five-1|hot-tx|cached-1)$`), rounds: 2, round: 10 * time.Millisecond}
	err := run(t.Context(), &output, io.Discard, o)
	if server.MayBeSkipped(err) {
		t.Skip(err)
	}
	require.NoError(t, err)
	var document struct {
		Machine   struct{ Cores int }
		Scenarios []struct {
			Name       string
			Contenders []struct {
				Name    string
				Figures map[string]struct{ Median, Min, Max float64 }
			}
			Bars []struct{ Measured bool }
		}
	}
	require.NoError(t, json.Unmarshal(output.Bytes(), &document))
	require.Positive(t, document.Machine.Cores)
	require.Len(t, document.Scenarios, 3)
	five := document.Scenarios[1]
	require.Equal(t, "five-1", five.Name)
	for _, c := range five.Contenders {
		require.Positive(t, c.Figures["throughput"].Median, c.Name)
		require.InDelta(t, 1, c.Figures["roundTrips"].Median, 0.01, c.Name)
	}
	for _, bar := range five.Bars {
		require.True(t, bar.Measured)
	}
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
		require.Len(t, chosen(o), 2)
	})
	for _, wrong := range [][]string{{"-rounds", "-1"}, {"-seconds", "-1"}, {"-run", "("}, {"surplus"}} {
		t.Run(wrong[0], func(t *testing.T) {
			t.Parallel()
			_, err := parse(wrong)
			require.Error(t, err)
		})
	}
}
