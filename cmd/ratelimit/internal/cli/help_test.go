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

	t.Run("IsTheSameInEachForm", func(t *testing.T) {
		t.Parallel()
		for form, command := range map[string]string{
			"": "help", "take --help": "help take", "exit-codes": "help exit-codes", "environment": "help environment", "policies": "help policies",
			"completion": "help completion",
		} {
			r := run(t.Context(), nil, "", strings.Fields(form)...)
			require.Equal(t, result{0, run(t.Context(), nil, "", strings.Fields(command)...).out, ""}, r, form)
		}
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

func TestVersionAndPlayground(t *testing.T) {
	t.Parallel()
	f := &fixture{}
	require.Contains(t, f.ok(t, "version"), "go1.")
	v := read[struct{ Version, Go, Platform string }](t, f, 0, "version")
	require.NotEmpty(t, v.Version)
	require.Contains(t, f.ok(t, "--version"), v.Version)
	page := f.ok(t, "playground")
	require.True(t, strings.HasPrefix(page, "<!doctype html>"))
	require.True(t, strings.HasSuffix(page, "</html>\n"))
}
