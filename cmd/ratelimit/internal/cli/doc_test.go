package cli_test

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/cmd/ratelimit/internal/cli"
	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
)

// block is a block of commands of the document, with the output shown there, if any.
type block struct{ commands, output string }

var fences = regexp.MustCompile("(?ms)^```(sh|output)\n(.*?)^```$")

func blocks(t *testing.T, document string) (found []block) {
	t.Helper()
	for _, match := range fences.FindAllStringSubmatch(document, -1) {
		if match[1] == "sh" {
			found = append(found, block{commands: match[2]})
			continue
		}
		require.NotEmpty(t, found)
		found[len(found)-1].output = match[2]
	}
	return found
}

// varying is what differs from run to run: instants, how far away they are, and numbers with fractions that depend on the time.
var varying = regexp.MustCompile(`\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\dZ( \([^)]*\))?|\b(\d+m)?\d+(\.\d+)?m?s\b|remaining +\S+`)

// steady returns what does not differ from run to run.
func steady(output string) string {
	lines := strings.Split(output, "\n")
	for i, line := range lines {
		lines[i] = strings.TrimRight(varying.ReplaceAllString(line, "…"), " ")
	}
	return strings.Join(lines, "\n")
}

// endless matches the commands that run until they are interrupted.
var endless = regexp.MustCompile(`(?m)^ratelimit (maintain|serve) .*$`)

func TestDocument(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(filepath.Join("..", "..", "..", "..", "docs", "cli.md"))
	require.NoError(t, err)
	document := string(text)

	t.Run("EveryBlockRuns", func(t *testing.T) {
		t.Parallel()
		testsize.Long(t, "builds the program, and runs it in a shell")
		requireRuns(t, blocks(t, document), nil)
	})

	t.Run("TheCommandsOfTheGuideRun", func(t *testing.T) {
		t.Parallel()
		testsize.Long(t, "builds the program, and runs it in a shell")
		guide, err := os.ReadFile(filepath.Join("..", "..", "..", "..", "docs", "guide.md"))
		require.NoError(t, err)
		var found []block
		for _, b := range blocks(t, string(guide)) {
			for line := range strings.Lines(b.commands) {
				if strings.HasPrefix(line, "ratelimit ") {
					found = append(found, block{commands: line})
				}
			}
		}
		requireRuns(t, found, map[string]string{
			"rules.yaml": "rules: [{limit: sendMessage, rate: 1, period: hour}]\n",
			"access.log": strings.Repeat("192.0.2.7 - - [22/Nov/2026:08:00:00 +0000] \"GET / HTTP/1.1\" 200 5\n", 3),
		})
	})

	t.Run("NamesEveryCommand", func(t *testing.T) {
		t.Parallel()
		for _, cmd := range cli.Root().Commands() {
			if cmd.Runnable() && cmd.Name() != "help" {
				require.Contains(t, document, cmd.Name(), "docs/cli.md does not tell of %s", cmd.CommandPath())
			}
		}
	})

	t.Run("HasTheFieldsOfJSON", func(t *testing.T) {
		t.Parallel()
		shown, err := os.ReadFile(filepath.Join("testdata", "json.txt"))
		require.NoError(t, err)
		for name, view := range cli.Views() {
			for _, field := range fieldsOf(reflect.TypeOf(view)) {
				if !strings.Contains(document, "`"+field+"`") {
					require.Contains(t, string(shown), `"`+field+`":`, name)
				}
			}
		}
	})

	t.Run("HasTheExitCodesOfTheHelp", func(t *testing.T) {
		t.Parallel()
		help := run(t.Context(), nil, "", "help", "exit-codes").out
		rows := regexp.MustCompile(`(?m)^\| (\d+) \| (.*) \|$`).FindAllStringSubmatch(document, -1)
		require.Len(t, rows, 8)
		for _, row := range rows {
			require.Regexp(t, `(?m)^ +`+row[1]+`  `+regexp.QuoteMeta(row[2])+`$`, help)
		}
	})
}

// requireRuns runs blocks in a shell in a directory with files, and compares the outputs that a block shows.
func requireRuns(t *testing.T, found []block, files map[string]string) {
	t.Helper()
	shell, err := exec.LookPath("bash")
	if err != nil {
		t.Skip("there is no bash")
	}
	f := on(t, postgrestest.NewEmptyDatabase(t))
	bin, work := t.TempDir(), t.TempDir()
	for name, text := range files {
		require.NoError(t, os.WriteFile(filepath.Join(work, name), []byte(text), 0o600))
	}
	build := exec.CommandContext(t.Context(), "go", "build", "-o", filepath.Join(bin, "ratelimit"), "../..")
	out, err := build.CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Greater(t, len(found), 5)
	start := time.Now().UTC().Format(time.RFC3339) // of windows: none ends while the test runs
	for _, b := range found {
		f.wait(t)
		b.commands = strings.ReplaceAll(b.commands, "2026-01-01T00:00:00Z", start)
		b.commands = endless.ReplaceAllString(b.commands, "timeout --signal INT --preserve-status 2 $0 || test $$? = 130")
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		cmd := exec.CommandContext(ctx, shell, "-e", "-o", "pipefail", "-c", b.commands)
		cmd.Dir = work
		cmd.Env = append(os.Environ(), "PATH="+bin+string(os.PathListSeparator)+os.Getenv("PATH"), "RATELIMIT_DATABASE_URL="+f.url)
		var out, errOut bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &errOut
		err := cmd.Run()
		cancel()
		require.NoError(t, err, "%s\n%s%s", b.commands, &out, &errOut)
		if b.output != "" {
			require.Equal(t, steady(b.output), steady(out.String()), b.commands)
		}
	}
}

// fieldsOf returns the names that the fields of a type have in JSON.
func fieldsOf(of reflect.Type) (names []string) {
	for i := range of.NumField() {
		field := of.Field(i)
		name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
		switch {
		case field.Anonymous && strings.HasSuffix(field.Type.PkgPath(), "/rules"): // as a rules file has them
		case field.Anonymous && field.Type.Kind() == reflect.Pointer:
			names = append(names, fieldsOf(field.Type.Elem())...)
		case field.Anonymous:
			names = append(names, fieldsOf(field.Type)...)
		case name != "" && name != "-":
			names = append(names, name)
		}
	}
	return names
}

// wait waits until all stored rules are in effect, except rules that begin more than a day later.
func (f *fixture) wait(t *testing.T) {
	t.Helper()
	require.Eventually(t, func() bool {
		var hold bool
		err := f.pool.QueryRow(t.Context(), `SELECT count(*) = 0 FROM ratelimit.rules, extract(epoch FROM clock_timestamp()) now
			WHERE from_us > now * 1e6 AND from_us < (now + 86400) * 1e6`).Scan(&hold)
		return err != nil || hold // or there are no tables yet
	}, time.Minute, 10*time.Millisecond)
}
