package main

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/bench/internal/report"
	"github.com/pgratelimit/pgratelimit/bench/internal/scenario"
	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// TestRun runs scenarios of different kinds for a moment: that they can be run, not how fast they are.
func TestRun(t *testing.T) {
	t.Parallel()
	testkit.Long(t, "starts a server for the benchmark")
	directory := t.TempDir()
	o := options{
		quick: true, only: regexp.MustCompile(`^(five-1|disk-1|sliding-64|rules-64|acquire-16|pair-1|reserve-1|hot-tx|cached-1|curve-hot-(1|16))$`), named: true, contenders: regexp.MustCompile(""),
		rounds: 2, round: 10 * time.Millisecond, json: filepath.Join(directory, "figures.json"), svg: directory,
	}
	var output bytes.Buffer
	err := run(t.Context(), &output, o)
	if err != nil {
		postgrestest.GiveUp(t, err)
	}
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
	parsed := func(arguments ...string) options {
		o, err := parse(arguments)
		require.NoError(t, err)
		return o
	}
	require.Equal(t, quickRound, parsed("-quick").round)
	o := parsed("-quick", "-rounds", "7", "-seconds", "0.5", "-run", "hot")
	require.Equal(t, 7, o.rounds)
	require.Equal(t, 500*time.Millisecond, o.round)
	require.Len(t, chosen(o), 5+6, "hot-512, hot-tx, hot-8, hand-hot-64 and snapshot-64, and the points of the curve")
	require.NotEmpty(t, chosen(parsed()))
	for _, s := range chosen(parsed()) {
		require.Empty(t, s.Curve, "curves are measured only if they are named")
	}
	s := chosen(parsed("-run", "take-64", "-contenders", "^redis_rate$"))[0]
	require.Len(t, s.Contenders, 2)
	require.Equal(t, "pgratelimit", s.Contenders[0].Name, "the first contender always takes part")
	require.Len(t, s.Bars, 1, "only the one about these two")
	for _, wrong := range [][]string{{"-rounds", "-1"}, {"-seconds", "-1"}, {"-run", "("}, {"-contenders", "("}, {"surplus"}} {
		_, err := parse(wrong)
		require.Error(t, err, wrong)
	}
}

// TestDocumentedCommandsRun promises that each command of this program that a page names is understood, and that each
// alternative of its -run names a scenario.
func TestDocumentedCommandsRun(t *testing.T) {
	t.Parallel()
	commands := regexp.MustCompile("`(?:cd bench && go run (?:-tags rueidis )?\\.|make bench ARGS=)( [^`]*|'[^`]*')`")
	word := regexp.MustCompile(`'[^']*'|"[^"]*"|[^\s'"]+`)
	named := 0
	for _, pattern := range []string{"../*.md", "../docs/*.md"} {
		pages, err := filepath.Glob(pattern)
		require.NoError(t, err)
		for _, page := range pages {
			text, err := os.ReadFile(page)
			require.NoError(t, err)
			for _, command := range commands.FindAllStringSubmatch(string(text), -1) {
				line, isQuoted := strings.CutPrefix(command[1], "'")
				if isQuoted {
					line = strings.TrimSuffix(line, "'")
				}
				var args []string
				for _, arg := range word.FindAllString(line, -1) {
					args = append(args, strings.Trim(arg, `'"`))
				}
				o, err := parse(args)
				require.NoError(t, err, "%s: %s", page, command[0])
				named++
				if !o.named {
					continue
				}
				for alternative := range strings.SplitSeq(strings.Trim(strings.NewReplacer("(", "", ")", "").Replace(o.only.String()), "^$"), "|") {
					require.True(t, slices.ContainsFunc(scenario.All(false), func(s scenario.Scenario) bool {
						return regexp.MustCompile(alternative).MatchString(s.Name)
					}), "%s: no scenario matches %s", page, alternative)
				}
			}
		}
	}
	require.Positive(t, named)
}
