package main

import (
	"bytes"
	"context"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
)

// short is most of the program's run at three times its speed.
func short() scale { return scale{minute: 6 * time.Second, share: 0.85, prompts: 0.75} }

func TestRun(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "runs the program for seconds by a real clock")

	t.Run("IsNeverRefused", func(t *testing.T) {
		t.Parallel()
		out, err := playOn(t, options{scale: short()})
		require.NoError(t, err, out)
		require.Contains(t, out, "249 done, 0 lost, 0 run twice\n")
		require.Contains(t, out, "Everything is as promised.")
	})

	t.Run("IsNotRefusedWhenTheWorkersComeBack", func(t *testing.T) {
		t.Parallel()
		out, err := playOn(t, options{scale: short(), killWorkers: true})
		require.NoError(t, err, out)
		require.Contains(t, out, "the workers are stopped")
		require.NotContains(t, out, "moved           0 jobs")
		require.Contains(t, out, "249 done, 0 lost, 0 run twice\n")
	})

	t.Run("LeavesTheUpstreamAloneWhileItAsks", func(t *testing.T) {
		t.Parallel()
		out, err := playOn(t, options{scale: short(), overload: true})
		require.NoError(t, err, out)
		require.Contains(t, out, "the upstream asks to be left alone for 3s")
		turned := regexp.MustCompile(`turned away (\d+) requests`).FindStringSubmatch(out)
		require.Len(t, turned, 2, out)
		n, err := strconv.Atoi(turned[1])
		require.NoError(t, err)
		require.Positive(t, n)
		require.LessOrEqual(t, n, maxWorkers, "no more than were on their way; some 80 are due in the time")
		require.Contains(t, out, "249 done, 0 lost, 0 run twice\n")
	})

	t.Run("FailsWhenSlotsNeverGoStale", func(t *testing.T) {
		t.Parallel()
		out, err := playOn(t, options{scale: short(), killWorkers: true, neverStale: true})
		require.ErrorContains(t, err, "jobs were started although their moment was long over", out)
		require.Contains(t, out, "moved           0 jobs")
		require.Contains(t, out, "249 done, 0 lost, 0 run twice\n") // they are tried again
	})

	t.Run("EndsWhenItIsInterrupted", func(t *testing.T) {
		t.Parallel()
		ctx, interrupt := context.WithCancel(t.Context())
		w := &onWrite{substring: "answered", then: interrupt}
		err := run(ctx, w, options{scale: short(), server: postgrestest.NewEmptyDatabase(t)})
		require.ErrorIs(t, err, context.Canceled)
	})
}

// play1 runs o on a server of the tests, and returns what it printed.
func playOn(t *testing.T, o options) (string, error) {
	t.Helper()
	o.server = postgrestest.NewEmptyDatabase(t)
	var out bytes.Buffer
	err := run(t.Context(), &out, o)
	return out.String(), err
}

// onWrite calls then when substring is written to it.
type onWrite struct {
	substring string
	then      func()
}

func (w *onWrite) Write(p []byte) (int, error) {
	if strings.Contains(string(p), w.substring) {
		w.then()
	}
	return len(p), nil
}

func TestReadme(t *testing.T) {
	t.Parallel()

	t.Run("ShowsWhatTheProgramPrints", func(t *testing.T) {
		t.Parallel()
		readme, err := os.ReadFile("README.md")
		require.NoError(t, err)
		var out bytes.Buffer
		p := &play{options: options{scale: demoScale()}, w: &out}
		p.prompts, p.span = script(p.scale)
		p.introduce()
		require.Contains(t, string(readme), out.String())
	})
}
