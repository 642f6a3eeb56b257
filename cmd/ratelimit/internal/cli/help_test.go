package cli_test

import (
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/cmd/ratelimit/internal/cli"
	"github.com/pgratelimit/pgratelimit/internal/golden"
)

// everyCommand calls fn with each command and topic.
func everyCommand(cmd *cobra.Command, fn func(cmd *cobra.Command)) {
	fn(cmd)
	for _, sub := range cmd.Commands() {
		everyCommand(sub, fn)
	}
}

func TestHelp(t *testing.T) {
	t.Parallel()

	t.Run("IsAsTheGoldenFilesSay", func(t *testing.T) {
		t.Parallel()
		texts := map[string]string{}
		everyCommand(cli.Root(), func(cmd *cobra.Command) {
			words := strings.Fields(cmd.CommandPath())[1:]
			r := run(t.Context(), nil, "", append([]string{"help"}, words...)...)
			require.Equal(t, 0, r.code)
			require.Empty(t, r.err)
			texts[strings.Join(append([]string{"ratelimit"}, words...), "-")+".txt"] = r.out
		})
		golden.Directory(t, "help", texts)
	})

	t.Run("SaysTheExitCodesOfEachCommand", func(t *testing.T) {
		t.Parallel()
		everyCommand(cli.Root(), func(cmd *cobra.Command) {
			path := cmd.CommandPath()
			if cmd.HasSubCommands() || cmd.IsAdditionalHelpTopicCommand() || strings.Contains(path, "completion") || strings.HasSuffix(path, "help") {
				return
			}
			require.Contains(t, cmd.Long, "Exit codes: ", path)
			require.NotEmpty(t, cmd.Example, path)
		})
	})

	t.Run("OfATopicNeedsNoFurtherWord", func(t *testing.T) {
		t.Parallel()
		for _, topic := range []string{"exit-codes", "environment", "policies", "completion"} {
			r := run(t.Context(), nil, "", topic)
			require.Equal(t, 0, r.code)
			require.Equal(t, run(t.Context(), nil, "", "help", topic).out, r.out)
		}
	})

	t.Run("TheFlagSaysTheSameAsTheCommand", func(t *testing.T) {
		t.Parallel()
		byFlag := run(t.Context(), nil, "", "take", "--help")
		require.Equal(t, 0, byFlag.code)
		require.Equal(t, run(t.Context(), nil, "", "help", "take").out, byFlag.out)
		alone := run(t.Context(), nil, "")
		require.Equal(t, result{0, run(t.Context(), nil, "", "help").out, ""}, alone)
	})

	t.Run("CompletesWithoutADatabase", func(t *testing.T) {
		t.Parallel()
		for _, shell := range []string{"bash", "zsh", "fish", "powershell"} {
			r := run(t.Context(), nil, "", "completion", shell)
			require.Equal(t, 0, r.code)
			require.Contains(t, r.out, "ratelimit")
			require.Equal(t, 0, run(t.Context(), nil, "", "completion", shell, "--no-descriptions").code)
		}
		r := run(t.Context(), nil, "", "__complete", "rules", "")
		require.Contains(t, r.out, "apply")
	})
}

func TestVersion(t *testing.T) {
	t.Parallel()
	f := &fixture{}
	require.Contains(t, f.ok(t, "version"), "go1.")
	v := read[struct{ Version, Go, Platform string }](t, f, 0, "version")
	require.NotEmpty(t, v.Version)
	require.Contains(t, f.ok(t, "--version"), v.Version)
	require.Equal(t, 0, run(t.Context(), nil, "", "help", "exit-codes").code)
}

func TestPlayground(t *testing.T) {
	t.Parallel()
	page := (&fixture{}).ok(t, "playground")
	require.True(t, strings.HasPrefix(page, "<!doctype html>"))
	require.True(t, strings.HasSuffix(page, "</html>\n"))
}
