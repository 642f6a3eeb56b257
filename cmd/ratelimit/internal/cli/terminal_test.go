//go:build linux

package cli_test

import (
	"bytes"
	"fmt"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/pgratelimit/pgratelimit/cmd/ratelimit/internal/cli"
)

// terminal returns both ends of a terminal: who types, and what the program reads.
func terminal(t *testing.T) (keyboard, screen *os.File) {
	t.Helper()
	keyboard, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	require.NoError(t, err)
	t.Cleanup(func() { _ = keyboard.Close() })
	require.NoError(t, unix.IoctlSetPointerInt(int(keyboard.Fd()), unix.TIOCSPTLCK, 0))
	n, err := unix.IoctlGetInt(int(keyboard.Fd()), unix.TIOCGPTN)
	require.NoError(t, err)
	screen, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	require.NoError(t, err)
	t.Cleanup(func() { _ = screen.Close() })
	return keyboard, screen
}

func TestATerminalIsAsked(t *testing.T) {
	t.Parallel()
	f := setup(t)
	f.put(t, weekly("sends", "", 5))
	f.ok(t, "take", "sends", "ada", "--cost", "5")
	for _, c := range []struct {
		types string
		code  int
		says  string
	}{
		{"\n", 2, "not confirmed; nothing was done"},
		{"no\n", 2, "not confirmed; nothing was done"},
		{"\x04", 2, "not confirmed; nothing was done"},
		{"Y\n", 0, ""},
	} {
		keyboard, screen := terminal(t)
		_, err := keyboard.WriteString(c.types)
		require.NoError(t, err)
		var out, errOut bytes.Buffer
		code := cli.Run(t.Context(), []string{"reset", "sends", "ada"}, screen, &out, &errOut, func(name string) string {
			return map[string]string{"RATELIMIT_DATABASE_URL": f.url}[name]
		})
		require.Equal(t, c.code, code, errOut.String())
		require.Contains(t, errOut.String(), "Fill the bucket of ada of sends, and forget what it owes? [y/N] ")
		require.Contains(t, errOut.String(), c.says)
		tokens := read[bucket](t, f, 0, "get", "sends", "ada").Tokens
		require.Equal(t, map[bool]float64{true: 5, false: 0}[code == 0], tokens)
	}
}

func TestADifferenceIsShownBeforeATerminalIsAsked(t *testing.T) {
	t.Parallel()
	f := setup(t)
	path := file(t, "rules.yaml", firstFile)
	for _, format := range []string{"table", "json"} {
		keyboard, screen := terminal(t)
		_, err := keyboard.WriteString("n\n")
		require.NoError(t, err)
		var out, errOut bytes.Buffer
		code := cli.Run(t.Context(), []string{"rules", "apply", "-f", path, "--reason", "x", "-o", format}, screen, &out, &errOut, func(name string) string {
			return map[string]string{"RATELIMIT_DATABASE_URL": f.url, "USER": "ana"}[name]
		})
		require.Equal(t, 2, code)
		shown := map[string]string{"table": out.String(), "json": errOut.String()}[format]
		require.Contains(t, shown, "+ rule search, plan free")
		require.Contains(t, errOut.String(), "Make 5 changes? [y/N]")
	}
	require.Contains(t, f.ok(t, "rules", "list"), "no rules")
}
