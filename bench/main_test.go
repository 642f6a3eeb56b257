package main

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/bench/internal/scenario"
	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// TestRun runs scenarios of different kinds for a moment: that they can be run, not how fast they are.
func TestRun(t *testing.T) {
	t.Parallel()
	testkit.Long(t, "starts a server for the benchmark")
	o, err := parse([]string{
		"-quick", "-rounds", "2", "-seconds", "0.01",
		"-run", "^(take-1|disk-1|verbs-16|hot-8|hot-tx|hand-1|sql-64|snapshot-64|curve-hot-(1|16))$",
	})
	require.NoError(t, err)
	var output bytes.Buffer
	if err := run(t.Context(), &output, o); err != nil {
		postgrestest.GiveUp(t, err)
	}
	require.Len(t, regexp.MustCompile(`(?m)^[a-z]+-[a-z0-9-]+: `).FindAllString(output.String(), -1), 10, "%s", output.String())
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
		require.NotContains(t, s.Name, "curve", "curves are measured only if they are named")
	}
	for _, wrong := range [][]string{{"-rounds", "-1"}, {"-seconds", "-1"}, {"-run", "("}, {"surplus"}} {
		_, err := parse(wrong)
		require.Error(t, err, wrong)
	}
}

// TestPagesQuoteTheScenarios promises that each command of this program on a page is understood, that each alternative
// of its -run names a scenario, and that each scenario is named by such a command.
func TestPagesQuoteTheScenarios(t *testing.T) {
	t.Parallel()
	commands := regexp.MustCompile("(?:cd bench && go\\s+run \\.|`make bench ARGS=)(\\s[^`]*|'[^`]*')`")
	word := regexp.MustCompile(`'[^']*'|"[^"]*"|[^\s'"]+`)
	quoted := map[string]bool{}
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
				if !o.named {
					continue
				}
				for alternative := range strings.SplitSeq(strings.Trim(strings.NewReplacer("(", "", ")", "").Replace(o.only.String()), "^$"), "|") {
					named := 0
					for _, s := range scenario.All(false) {
						if regexp.MustCompile("^" + alternative).MatchString(s.Name) {
							quoted[s.Name] = true
							named++
						}
					}
					require.Positive(t, named, "%s: no scenario matches %s", page, alternative)
				}
			}
		}
	}
	for _, s := range scenario.All(false) {
		require.True(t, quoted[s.Name], "no page has a command with %s", s.Name)
	}
}
