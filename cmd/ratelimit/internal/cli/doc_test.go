package cli_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/cmd/ratelimit/internal/cli"
	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
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

// varying is what differs from run to run: instants, how far away they are, and numbers with fractions that depend on
// the time. A new function of the schema has a new version.
var varying = regexp.MustCompile(`\bversion +\d+( of \d+)?|\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\dZ( \([^)]*\))?|\b(\d+m)?\d+(\.\d+)?m?s\b|remaining +\S+`)

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
		testkit.Long(t, "builds the program, and runs it in a shell")
		requireRuns(t, blocks(t, document))
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
		help := run(t.Context(), nil, "help", "exit-codes").out
		rows := regexp.MustCompile(`(?m)^\| (\d+) \| (.*) \|$`).FindAllStringSubmatch(document, -1)
		require.Len(t, rows, 8)
		for _, row := range rows {
			require.Regexp(t, `(?m)^ +`+row[1]+`  `+regexp.QuoteMeta(row[2])+`$`, help)
		}
	})
}

// requireRuns runs blocks in a shell in one directory, and compares the outputs that a block shows.
func requireRuns(t *testing.T, found []block) {
	t.Helper()
	shell, err := exec.LookPath("bash")
	if err != nil {
		t.Skip("there is no bash")
	}
	f := on(t, postgrestest.NewEmptyDatabase(t))
	bin, work := t.TempDir(), t.TempDir()
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

// everyCommand calls fn with each command and topic.
func everyCommand(cmd *cobra.Command, fn func(cmd *cobra.Command)) {
	fn(cmd)
	for _, sub := range cmd.Commands() {
		everyCommand(sub, fn)
	}
}

// TestDumpAndRestore promises what docs/operations.md says of dumps: its commands copy the data into new tables, a
// whole dump is a working database, and what the page warns of fails as it says. A Limiter goes on when its tables are
// replaced.
func TestDumpAndRestore(t *testing.T) {
	t.Parallel()
	testkit.Long(t, "builds the program, and runs pg_dump")
	f, empty := setup(t), func() string { return postgrestest.NewEmptyDatabase(t) }
	var version string
	require.NoError(t, f.pool.QueryRow(t.Context(), `SELECT (current_setting('server_version_num')::integer / 10000)::text`).Scan(&version))
	if out, err := exec.CommandContext(t.Context(), "pg_dump", "--version").Output(); err != nil || !strings.Contains(string(out), " "+version+".") {
		t.Skip("no pg_dump of version " + version)
	}
	page, err := os.ReadFile(filepath.Join("..", "..", "..", "..", "docs", "operations.md"))
	require.NoError(t, err)
	found := blocks(t, string(page))
	require.Len(t, found, 1)
	bin, work := t.TempDir(), t.TempDir()
	built, err := exec.CommandContext(t.Context(), "go", "build", "-o", filepath.Join(bin, "ratelimit"), "../..").CombinedOutput()
	require.NoError(t, err, "%s", built)
	shell := func(to, commands string) (string, error) {
		cmd := exec.CommandContext(t.Context(), "sh", "-e", "-c", commands)
		cmd.Dir = work
		cmd.Env = append(os.Environ(), "PATH="+bin+string(os.PathListSeparator)+os.Getenv("PATH"), "OLD="+f.url, "NEW="+to)
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	limit := ratelimit.Define("dumped", ratelimit.TokenBucket{Rate: 10, Period: 365 * ratelimit.Day})
	open := func(url string) *ratelimit.Limiter {
		limiter, err := ratelimit.New(on(t, url).pool, ratelimit.Config{})
		require.NoError(t, err)
		return limiter
	}
	left := func(l *ratelimit.Limiter) float64 {
		v, err := l.Value(t.Context(), limit.For("ada"))
		require.NoError(t, err)
		return v.Tokens
	}
	before := open(f.url)
	require.NoError(t, before.Require(t.Context(), limit.For("ada").Cost(3)))
	r, err := before.Reserve(t.Context(), limit.For("ada").Cost(2))
	require.NoError(t, err)

	copied := empty()
	out, err := shell(copied, found[0].commands)
	require.NoError(t, err, out)
	require.InDelta(t, 5, left(open(copied)), 0.01)
	require.NoError(t, open(copied).Settle(t.Context(), r.ID))

	whole := empty()
	out, err = shell(whole, `pg_dump -Fc -f whole.dump "$OLD"; pg_restore -d "$NEW" whole.dump; ratelimit --database-url "$NEW" migrate up`)
	require.NoError(t, err, out)
	require.Contains(t, out, "nothing to apply")
	require.InDelta(t, 5, left(open(whole)), 0.01)

	later, err := before.Reserve(t.Context(), limit.For("ada").Cost(1))
	require.NoError(t, err)
	require.ErrorIs(t, open(whole).Settle(t.Context(), later.ID), ratelimit.ErrNotReserved)

	out, err = shell(postgrestest.NewDatabase(t), `pg_dump -Fc -n ratelimit --data-only -f all.dump "$OLD"; pg_restore --single-transaction -d "$NEW" all.dump`)
	require.Error(t, err)
	require.Contains(t, out, "goose_db_version")

	out, err = shell(empty(), `pg_dump -n ratelimit --schema-only -Fc -f schema.dump "$OLD"; pg_restore -d "$NEW" schema.dump; ratelimit --database-url "$NEW" migrate up`)
	require.Error(t, err)
	require.Contains(t, out, "drop the schema")

	running := open(whole)
	require.NoError(t, running.Require(t.Context(), limit.For("ada")))
	out, err = shell(whole, `pg_restore --clean --if-exists -n ratelimit -d "$NEW" whole.dump`)
	require.NoError(t, err, out)
	require.InDelta(t, 5, left(running), 0.01)
	require.NoError(t, running.Require(t.Context(), limit.For("ada")))
	require.InDelta(t, 4, left(running), 0.01)
}

func TestHelp(t *testing.T) {
	t.Parallel()

	t.Run("IsAsTheGoldenFilesSay", func(t *testing.T) {
		t.Parallel()
		texts := map[string]string{}
		everyCommand(cli.Root(), func(cmd *cobra.Command) {
			words := strings.Fields(cmd.CommandPath())[1:]
			r := run(t.Context(), nil, append([]string{"help"}, words...)...)
			require.Equal(t, 0, r.code)
			require.Empty(t, r.err)
			texts[strings.Join(append([]string{"ratelimit"}, words...), "-")+".txt"] = r.out
		})
		testkit.GoldenDirectory(t, "help", texts)
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
			r := run(t.Context(), nil, strings.Fields(form)...)
			require.Equal(t, result{0, run(t.Context(), nil, strings.Fields(command)...).out, ""}, r, form)
		}
	})

	t.Run("CompletesWithoutADatabase", func(t *testing.T) {
		t.Parallel()
		for _, shell := range []string{"bash", "zsh", "fish", "powershell"} {
			r := run(t.Context(), nil, "completion", shell)
			require.Equal(t, 0, r.code)
			require.Contains(t, r.out, "ratelimit")
			require.Equal(t, 0, run(t.Context(), nil, "completion", shell, "--no-descriptions").code)
		}
		r := run(t.Context(), nil, "__complete", "rules", "")
		require.Contains(t, r.out, "apply")
	})
}

func TestVersionAndPlayground(t *testing.T) {
	t.Parallel()
	f := &fixture{}
	require.Contains(t, f.ok(t, "--version"), "ratelimit version")
	page := f.ok(t, "playground")
	require.True(t, strings.HasPrefix(page, "<!doctype html>"))
	require.True(t, strings.HasSuffix(page, "</html>\n"))
}

// masked are the values that differ from run to run or from server to server: instants, IDs, fencing tokens, times
// until an instant, versions, and the findings of doctor.
var masked = regexp.MustCompile(`"\d{4}-\d\d-\d\dT[^"]*"|"[0-9a-f]{8}-[0-9a-f-]{27}"|("(?:fence|retry_after_us|reset_after_us|was|go|platform|level|says|do)": )(?:"(?:\\.|[^"\\])*"|[-+.e\d]+)`)

// TestJSON compares the answer of each command with -o json with testdata/json.txt.
func TestJSON(t *testing.T) {
	t.Parallel()
	f := setup(t)
	author := []string{"--author", "ana", "--reason", "a test"}
	sends := weekly("sends", "", 10)
	sends.Unit, sends.Description = "messages", "What a visitor may send."
	stated := file(t, "rules.yaml", `match: all
rules:
  - {limit: jobs, kind: concurrency, slots: 3, lease: 1h}
  - {limit: sends, kind: fixed window, rate: 10, period: 7d, start: `+sends.Policy.(ratelimit.FixedWindow).Start.Format(time.RFC3339)+`, unit: messages, description: What a visitor may send.}
  - {limit: calls, plan: pro, rate: 5, period: day, capacity: 9, mode: shadow}
tiers:
  - {limit: sends, key: "{user}", route: POST /send, when: {plan: free}}
overrides:
  - {limit: sends, key: bob, multiplier: 2}
`)
	simulated, requests := file(t, "simulated.yaml", "rules: [{limit: perUser, rate: 1, period: minute}]"), file(t, "requests.csv", "time,user\n2026-11-22T08:00:00Z,ada\n2026-11-22T08:00:01Z,ada\n")
	jobs := ratelimit.Define("jobs", ratelimit.Concurrency{Slots: 3, Lease: time.Hour})
	f.put(t, sends, rules.Rule{Limit: "jobs", Policy: ratelimit.Concurrency{Slots: 3, Lease: time.Hour}})
	f.refuse(t, "sends", "POST /chat", "ada", 9, 5*time.Minute)
	limiter := f.limiter(t, ratelimit.Config{})
	_, err := limiter.Acquire(t.Context(), jobs.For("acme"))
	require.NoError(t, err)
	reservation := f.reserve(t, "later", "ada", 30)
	held := read[struct{ Leases []struct{ Fence int64 } }](t, f, 0, "get", "jobs", "acme")
	require.Len(t, held.Leases, 1)
	names := strings.NewReplacer("FILE", stated, "SIMULATED", simulated, "REQUESTS", requests, "RESERVATION", reservation, "FENCE", fmt.Sprint(held.Leases[0].Fence))

	var text strings.Builder
	for _, command := range []string{
		"migrate status", "migrate up", "rules validate -f FILE", "rules list", "rules get sends",
		"take sends ada --cost 4", "check sends ada", "take sends ada --cost 7", "get sends ada", "get sends bob", "credit sends ada --cost 1", "reset sends ada --yes",
		"pause sends eve --for 1h", "get sends eve", "take sends eve", "key eve", "resume sends eve",
		"top --by refusals", "get later ada",
		"reservations list", "reservations cancel RESERVATION --yes", "get jobs acme", "leases release jobs acme --fence FENCE --yes",
		"prune sends --yes", "simulate -f SIMULATED --by user REQUESTS", "get later nobody", "get nothing ada",
		"rules diff -f FILE", "rules apply -f FILE --yes", "override set sends eve --multiplier 3 --yes", "rules history", "doctor", "migrate down --yes",
	} {
		args := split(names.Replace(command))
		if regexp.MustCompile(`^(rules apply|override|pause|resume)`).MatchString(command) {
			args = append(args, author...)
		}
		r := f.run(t, append(args, "-o", "json")...)
		if command == "doctor" {
			r.code, r.out = 0, regexp.MustCompile(`,\n *"do": .*`).ReplaceAllString(r.out, "") // which depend on the server
		}
		fmt.Fprintf(&text, "== %s: exit code %d ==\n%s%s", command, r.code, r.out, r.err)
	}
	testkit.Golden(t, "json.txt", strings.ReplaceAll(masked.ReplaceAllString(text.String(), "$1…"), stated, "FILE"))
}
