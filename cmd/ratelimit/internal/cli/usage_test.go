package cli_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/url"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/cmd/ratelimit/internal/cli"
	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
)

func TestUsage(t *testing.T) {
	t.Parallel()
	nothing, short, line, x := file(t, "empty", ""), file(t, "tokens", "short\n"), file(t, "line", "\n"), file(t, "x", "x")
	for _, c := range []struct{ args, says string }{
		{"rulse list", "did you mean rules?"},
		{"rules", "\n  apply "},
		{"leases", "\n  release "},
		{"rules aply", "did you mean apply?"},
		{"migrate dwon", "did you mean down?"},
		{"reservations lst", "did you mean list?"},
		{"take", "no limit is named"},
		{"take sendMessage ''", "the key is empty"},
		{"take a b c", "there are 3 arguments"},
		{"rules list more", "takes no arguments"},
		{"rules get", "needs a LIMIT"},
		{"rules get 'two words'", `name "two words"`},
		{"rules history 'two words'", `name "two words"`},
		{"rules history a b", "there are 2 arguments"},
		{"reservations cancel", "needs an ID"},
		{"get sendMessage --rte 5", "unknown flag: --rte; see ratelimit get --help"},
		{"get sendMessage -o xml", "use -o table or json"},
		{"get sendMessage --timeout -1s", "the timeout is -1s"},
		{"get sendMessage --policy 'rate: 5, period: soon'", "write a duration such as"},
		{"get sendMessage --policy 'rate: 5, period: 99999999d'", "write a duration of up to 40000 days"},
		{"get sendMessage --policy 'kind: fixed window, rate: 5, period: hour, start: noon'", "write a time such as"},
		{"get sendMessage", "no database is named"},
		{"rules validate", "give -f rules.yaml"},
		{"rules diff", "give -f rules.yaml"},
		{"rules apply", "the change has no author"},
		{"rules apply --author ana", "the change has no reason"},
		{"pause sendMessage ada --author ana --reason x", "with one of --for and --until"},
		{"pause sendMessage ada --author ana --reason x --for 1h --until 2030-01-01T00:00:00Z", "with one of --for and --until"},
		{"resume sendMessage ada --author ana", "the change has no reason"},
		{"prune", "name limits, or give --refusals-older-than"},
		{"top --by size", "use refusals or allowed"},
		{"top --most 0", "use 1 to 1000"},
		{"simulate", "give -f rules.yaml"},
		{"grants", "no role is named; give --application"},
		{"grants --application app --schema Bad", "invalid schema name"},
		{"doctor --hash-key-file " + nothing, "is empty"},
		{"doctor", "no database is named"},
		{"migrate down --yes --schema=", "is empty; give it a value, or leave it out"},
		{"rules list --database-url=", "--database-url is empty"},
		{"take sends ada --policy 'rate: 1, period: week' --hash-key-file=", "--hash-key-file is empty"},
		{"pause sends ada --for 1h --reason x --author=", "--author is empty"},
		// The server does not start where others could call it without a token.
		{"serve --http 0.0.0.0:8080 --database-url postgres://127.0.0.1:1/x", "other machines can reach it; add --token-file"},
		{"serve --grpc :8081 --database-url postgres://127.0.0.1:1/x", "other machines can reach it"},
		{"serve --http 8080 --database-url postgres://127.0.0.1:1/x", "it has no host and port"},
		{"serve --database-url postgres://127.0.0.1:1/x --token-file " + short, "line 1 is no token of 16 characters or more"},
		{"serve --database-url postgres://127.0.0.1:1/x --token-file " + line, "the file is empty; write a token on each line"},
		{"serve --database-url postgres://127.0.0.1:1/x --token-file /nowhere", "no such file"},
		{"serve --database-url postgres://127.0.0.1:1/x --tls-cert " + x, "go together"},
		{"serve --database-url postgres://127.0.0.1:1/x --tls-key " + x + " --tls-cert " + x, "failed to find any PEM data"},
		// What destroys something is refused before a database is looked for.
		{"migrate down", "give --yes"},
		{"reset sendMessage ada", "give --yes"},
		{"prune sendMessage", "give --yes"},
		{"pause sendMessage --author ana --reason x --for 1h", "give --yes"},
		{"reservations cancel 0d5f7c0e-6c0b-4f6e-9a5c-0f1f8e3d2a11", "give --yes"},
	} {
		t.Run(c.args, func(t *testing.T) {
			t.Parallel()
			r := run(t.Context(), nil, split(c.args)...)
			require.Equal(t, 2, r.code, r.err)
			require.Contains(t, r.err, c.says)
			require.True(t, strings.HasPrefix(r.err, "ratelimit: "), r.err)
			require.Equal(t, 1, strings.Count(r.err, "ratelimit: "), r.err)
			require.Empty(t, r.out)
		})
	}
}

func TestDatabase(t *testing.T) {
	t.Parallel()

	t.Run("IsNeverShown", func(t *testing.T) {
		t.Parallel()
		for _, dsn := range []string{
			"postgres://ana:s3cr3t-word@127.0.0.1:1/limits",
			"postgres://ana:s3cr3t-word@127.0.0.1:bad/limits",
			"postgres://ana:12/s3cr3t-word@127.0.0.1:1/limits",
			"postgres://ana:12?s3cr3t-word@127.0.0.1:1/limits",
			"postgres://ana:12#s3cr3t-word@127.0.0.1:1/limits",
			"postgres://ana:s3cr3t-word%zz@127.0.0.1:1/limits",
			"postgres://ana:pw s3cr3t-word@127.0.0.1:1/limits",
			"postgres://ana:s3cr3t-word@[::1/limits",
			"postgres://127.0.0.1:1/limits?user=ana&password=s3cr3t-word",
			"postgres://127.0.0.1:1/limits?user=ana&password=s3cr3t-word&sslmode=nonsense",
			"postgresql://s3cr3t-word@nowhere.invalid/limits?connect_timeout=x",
			"host=127.0.0.1 port=1 user=ana password=s3cr3t-word",
			"host=127.0.0.1 port=1 user=ana password='s3cr3t-word",
			"host=127.0.0.1 port=1 user=ana password=pw s3cr3t-word",
			"mysql://ana:s3cr3t-word@127.0.0.1:1/limits",
			"s3cr3t-word",
		} {
			for _, args := range [][]string{
				{"rules", "list", "--database-url", dsn},
				{"rules", "list", "--database-url=" + dsn},
				{"migrate", "up", "--timeout", "5s", "--database-url", dsn},
				{"take", "sendMessage", "ada", "--policy", "rate: 1, period: 1s", "--database-url", dsn},
				{"doctor", "--timeout", "20s", "--database-url", dsn},
			} {
				r := run(t.Context(), []string{"USER=ana"}, args...)
				require.NotEqual(t, 0, r.code, "%v", args)
				require.NotContains(t, r.out+r.err, "s3cr3t-word", "%v", args)
				require.NotContains(t, r.out+r.err, "limits?", "%v", args)
			}
			r := run(t.Context(), []string{"DATABASE_URL=" + dsn}, "rules", "list")
			require.NotEqual(t, 0, r.code)
			require.NotContains(t, r.out+r.err, "s3cr3t-word")
			require.Contains(t, r.err, "DATABASE_URL", "where it is from is said")
		}
		const dsn = "postgres://ana:s3cr3t-word@127.0.0.1:1/limits" // where it is no flag
		for _, args := range [][]string{
			{"rules", "list", "-database-url=" + dsn},
			{dsn, "rules", "list"},
			{"rules", dsn},
			{"rules", "list", dsn},
			{"take", dsn},
			{"get", dsn, "ada"},
			{"rules", "list", "--database", dsn},
			{"rules", "list", "--schema", dsn},
			{"rules", "list", "-o", dsn},
			{"rules", "validate", "-f", dsn},
			{"simulate", "-f", dsn},
			{"get", "x", "--policy", dsn},
		} {
			r := run(t.Context(), []string{"RATELIMIT_DATABASE_URL=" + dsn}, args...)
			require.NotEqual(t, 0, r.code, "%v", args)
			require.NotContains(t, r.out+r.err, "s3cr3t-word", "%v", args)
		}
	})

	t.Run("AMissingDatabaseIsAFailure", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		other, err := url.Parse(f.url)
		require.NoError(t, err)
		other.Path = "/which_is_not_there"
		r := run(t.Context(), []string{"DATABASE_URL=" + other.String()}, "rules", "list")
		require.Equal(t, 1, r.code)
		require.Contains(t, r.err, "there is no database of that name")
	})

	t.Run("AReadOnlyRoleGetsTheMissingPrivilege", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.env = append(f.env, "RATELIMIT_DATABASE_URL="+withParameter(f.url, "default_transaction_read_only=on"))
		said := f.fails(t, 1, "take", "a", "b", "--policy", "rate: 1, period: 1s")
		require.Contains(t, said, "the server is read-only (cannot execute")
		require.Equal(t, 1, strings.Count(said, "primary"), "it is said once: %s", said)
		f.ok(t, "rules", "list")
		f.ok(t, "get", "a", "b", "--policy", "rate: 1, period: 1s")
	})

	t.Run("AnInterruptEndsACall", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		r := run(ctx, f.env, "rules", "list")
		require.Equal(t, 130, r.code)
		require.Contains(t, r.err, "interrupted")
	})

	t.Run("ATimeoutHasAnUnknownOutcome", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		tx, err := f.pool.Begin(t.Context())
		require.NoError(t, err)
		defer func() { _ = tx.Rollback(context.Background()) }()
		_, err = tx.Exec(t.Context(), "LOCK TABLE ratelimit.buckets")
		require.NoError(t, err)
		said := f.fails(t, 1, "take", "a", "b", "--policy", "rate: 1, period: 1s", "--timeout", "200ms")
		require.Contains(t, said, "may have been made or not; --timeout gives it longer")
	})
}

// Without tables, each command says how to create them.
func TestWithoutTables(t *testing.T) {
	t.Parallel()
	f := on(t, postgrestest.NewEmptyDatabase(t))
	path := file(t, "rules.yaml", "rules: [{limit: a, rate: 1, period: 1s}]")
	for _, args := range []string{
		"rules list", "rules history", "rules diff -f " + path, "rules apply --yes --reason x -f " + path, "get a b", "take a b --policy 'rate: 1, period: 1s'",
		"pause a b --for 1h --reason x", "resume a b --reason x", "top", "top --by allowed", "reservations cancel 0d5f7c0e-6c0b-4f6e-9a5c-0f1f8e3d2a11 --yes",
		"prune a --yes", "prune --refusals-older-than 1d --yes", "serve", "top --schema elsewhere",
	} {
		require.Contains(t, f.fails(t, 1, split(args)...), "run ratelimit migrate up, or name another with --schema", args)
	}
}

func withParameter(url, parameter string) string {
	if strings.Contains(url, "?") {
		return url + "&" + parameter
	}
	return url + "?" + parameter
}

func TestShown(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"ada":                       "ada",
		"user one":                  "user one",
		"Jürgen 北京":                 "Jürgen 北京",
		" ada":                      `" ada"`,
		"a\tb":                      `"a\tb"`,
		"a\nb":                      `"a\nb"`,
		"\x1b[2Jx":                  `"\x1b[2Jx"`,
		"a\u202eb":                  `"a\u202eb"`,
		"\u05d0\u05d1":              `"\u05d0\u05d1"`,
		"\u0627\u0628":              `"\u0627\u0628"`,
		"a\u200bb":                  `"a\u200bb"`,
		"a\u00a0b":                  `"a\u00a0b"`,
		"a\x80b":                    `"a\x80b"`,
		`"quoted"`:                  `"\"quoted\""`,
		"<script>alert(1)</script>": "<script>alert(1)</script>",
	} {
		require.Equal(t, want, cli.Shown(text), "%q", text)
	}
	shown := make(map[string]string)
	for _, key := range []string{"", "(shared)", `"(shared)"`, `\(shared)`, `\"(shared)\"`, "(every key)"} { // no key looks like none
		text := cli.KeyText(key)
		require.NotContains(t, shown, text, "%q is shown as %q", key, shown[text])
		shown[text] = key
	}
}

func TestHostileKeys(t *testing.T) {
	t.Parallel()
	f := setup(t)
	out := f.ok(t, with(window(), "take", "sends", "\x1b[2J\u202enc\r\nada\tx")...)
	require.Contains(t, out, `"\x1b[2J\u202enc\r\nada\tx"`)
	require.NotContains(t, out, "\x1b")
}

var errFull = errors.New("no space left on device")

// full is a disk that takes nothing.
type full struct{}

func (full) Write([]byte) (int, error) { return 0, errFull }

// runFull runs the program with nowhere to write its answer to.
func (f *fixture) runFull(t *testing.T, args ...string) result {
	t.Helper()
	var errOut bytes.Buffer
	code := f.pools.Run(t.Context(), args, strings.NewReader(""), full{}, &errOut, func(name string) string {
		return map[string]string{"RATELIMIT_DATABASE_URL": f.url, "USER": "ana"}[name]
	})
	return result{code, "", errOut.String()}
}

func TestAnAnswerThatCannotBeEncodedIsAFailure(t *testing.T) {
	t.Parallel()
	f := setup(t)
	f.put(t, weekly("sends", "", 5))
	reads := []string{
		"help", "help take", "take --help", "--version", "completion bash", "playground", "grants --application app", "doctor --all --max-transaction 1d",
		"rules list", "rules list -o yaml", "rules list -o json", "rules history", "check sends ada", "get sends ada", "top", "reservations list",
		"migrate status",
	}
	for _, args := range reads {
		r := f.runFull(t, split(args)...)
		require.Equal(t, 1, r.code, args)
		require.Equal(t, "ratelimit: the answer cannot be written: no space left on device\n", r.err, args)
	}
	rulesFile := file(t, "rules.yaml", "rules: [{limit: mail, rate: 1, period: 1s}]")
	for _, args := range []string{
		"take sends ada", "credit sends ada", "reset sends ada --yes", "pause sends ada --for 1h --reason x", "resume sends ada --reason x",
		"prune sends --yes", "migrate up", "rules apply --yes --reason x -o json -f " + rulesFile,
	} {
		r := f.runFull(t, split(args)...)
		require.Equal(t, 1, r.code, args)
		require.Contains(t, r.err, "ratelimit: the command is done, but the answer cannot be written", args)
	}
	require.Equal(t, 1, f.runFull(t, "rules", "apply", "--yes", "--reason", "x", "-f", file(t, "next.yaml", "rules: [{limit: mail, rate: 2, period: 1s}]")).code)
	require.Contains(t, f.ok(t, "rules", "get", "mail"), "1 per second", "what could not be shown was not done")
}

func TestAnErrorLeavesNoDocument(t *testing.T) {
	t.Parallel()
	f := setup(t)
	rulesFile, bad := file(t, "rules.yaml", "rules: [{limit: mail, rate: 1, period: 1s}]"), file(t, "bad.yaml", "rules: [{limit: mail, rps: -1}]")
	for args, code := range map[string]int{
		"take mail ada": 2, "get mail ada --cost": 2, "rules get none": 6, "resume mail ada --reason x": 6, "reset mail ada": 2,
		"rules apply --yes --reason x -f " + bad: 2, "rules diff -f " + bad: 2, "rules apply --reason x -f " + rulesFile: 2,
		"rules apply --yes --reason x --from 2020-01-01T00:00:00Z -f " + rulesFile: 2, "reservations cancel x --yes": 6,
		"rules list --schema elsewhere": 1, "top --schema elsewhere": 1, "prune mail --yes": 2, "doctor --max-transaction x": 2,
	} {
		r := f.run(t, append(split(args), "-o", "json")...)
		require.Equal(t, code, r.code, "%s: %s", args, r.err)
		require.Empty(t, r.out, args)
		require.Regexp(t, `(?m)^ratelimit: `, r.err, args) // behind what the command would do
	}
}

func TestAnInterruptEndsAWaitForInput(t *testing.T) {
	t.Parallel()
	rulesFile := file(t, "rules.yaml", "rules: [{limit: a, rate: 1, period: 1s}]")
	for _, args := range [][]string{{"simulate", "-f", rulesFile, "--by", "address"}, {"rules", "validate", "-f", "-"}} {
		ctx, cancel := context.WithCancel(t.Context())
		stdin, writer := io.Pipe()
		ended := make(chan int)
		var out, errOut bytes.Buffer
		go func() { ended <- cli.Run(ctx, args, stdin, &out, &errOut, func(string) string { return "" }) }()
		_, err := writer.Write([]byte("1")) // it reads
		require.NoError(t, err)
		cancel()
		require.Equal(t, 130, <-ended, errOut.String())
		require.NoError(t, writer.Close())
	}
}

// FuzzRun gives the program any arguments, a line each, and any input. Its context has ended, so it connects to no
// database and starts no server. It exits with a documented code, and prints the fault on standard error if that code
// alone does not say it.
func FuzzRun(f *testing.F) {
	for _, line := range []string{
		"", "--version", "help policies", "rules validate -f -", "take sendMessage ada --policy=10 --cost 3 --database-url postgres://127.0.0.1:1/x",
		"get a --policy 5", "get a --policy=1e400",
		"get a --policy= -o json", "simulate -f - --format json", "pause a b --for 1h --until 2030-01-01T00:00:00Z",
		"grants --application app --schema Bad", "reservations cancel x --yes", "prune --refusals-older-than NaNd --yes", "migrate down --yes --schema x",
		"doctor --hash-key-file /nowhere", "top --by allowed --most 5", "completion bash", "-h", "--", "take \x00 \xff", "leases release L1AAAA --yes",
	} {
		f.Add(strings.ReplaceAll(line, " ", "\n"), "rules: [{limit: a, rate: 1, period: 1s}]")
	}
	codes := []int{0, 1, 2, 3, 4, 5, 6, 130}
	f.Fuzz(func(t *testing.T, line, input string) {
		args := strings.Split(line, "\n")
		if slices.Contains(args, "playground") { // which listens
			return
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		var out, errOut bytes.Buffer
		code := cli.Run(ctx, args, strings.NewReader(input), &out, &errOut, func(string) string { return "" })
		require.Contains(t, codes, code)
		if code == 1 || code == 2 || code == 130 {
			require.True(t, strings.HasPrefix(errOut.String(), "ratelimit: "), "%q", errOut.String())
		}
		require.NotContains(t, errOut.String(), "goroutine ")
		require.False(t, strings.ContainsAny(errOut.String(), "\x00\x1b"), "%q", errOut.String())
	})
}
