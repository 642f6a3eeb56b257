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

// typed runs the program on a terminal, with typed input.
func (f *fixture) typed(t *testing.T, types string, args ...string) result {
	t.Helper()
	keyboard, screen := terminal(t)
	_, err := keyboard.WriteString(types)
	require.NoError(t, err)
	var out, errOut bytes.Buffer
	code := cli.Run(t.Context(), args, screen, &out, &errOut, func(name string) string { return variable(f.env, name) })
	return result{code, out.String(), errOut.String()}
}

func TestATerminalAsksForConfirmation(t *testing.T) {
	t.Parallel()
	f := setup(t)
	f.put(t, weekly("sends", "", 5))
	f.ok(t, "take", "sends", "ada", "--cost", "5")
	for _, types := range []string{"\n", "no\n", "\x04", "Y\n"} {
		r := f.typed(t, types, "reset", "sends", "ada")
		require.Contains(t, r.err, "Fill the bucket of ada of sends, and forget what it owes? [y/N] ")
		level := "level       0 of 5"
		if types == "Y\n" {
			level = "level       5 of 5"
			require.Equal(t, 0, r.code, r.err)
		} else {
			require.Equal(t, 2, r.code)
			require.Contains(t, r.err, "not confirmed; nothing was done")
		}
		require.Contains(t, f.ok(t, "get", "sends", "ada"), level)
	}
}

func TestADifferenceIsShownBeforeTheQuestion(t *testing.T) {
	t.Parallel()
	f := setup(t)
	path := file(t, "rules.yaml", firstFile)
	for _, format := range []string{"table", "json"} {
		r := f.typed(t, "n\n", "rules", "apply", "-f", path, "--reason", "x", "-o", format)
		require.Equal(t, 2, r.code)
		require.Contains(t, map[string]string{"table": r.out, "json": r.err}[format], "+ rule search, plan free")
		require.Contains(t, r.err, "Make 5 changes? [y/N]")
	}
	require.Contains(t, f.ok(t, "rules", "list"), "no rules")
}
