package cli_test

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/cmd/ratelimit/internal/cli"
	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

func TestMain(m *testing.M) { testkit.Main(everyFlag{m}) }

// everyFlag fails a run in which the packages below have logged something, because users would see it beside the answer
// of a command. It also fails a run of all tests that has not used every command and every flag.
type everyFlag struct{ *testing.M }

func (m everyFlag) Run() int {
	var logged bytes.Buffer
	slog.SetDefault(slog.New(slog.NewTextHandler(&logged, nil)))
	code := m.M.Run()
	if logged.Len() > 0 {
		fmt.Fprintf(os.Stderr, "commands have logged:\n%s", logged.String())
		code = 1
	}
	if code == 0 && flag.Lookup("test.run").Value.String() == "" && flag.Lookup("test.skip").Value.String() == "" {
		if unused := used.unused(); len(unused) > 0 {
			fmt.Fprintf(os.Stderr, "no test uses these commands and flags:\n  %s\n", strings.Join(unused, "\n  "))
			code = 1
		}
	}
	return code
}

// used are the commands and flags that tests have used.
var used usage

type usage struct {
	mu     sync.Mutex
	seen   map[string]bool
	served bool // whether there is a server to test with
}

// note remembers the command and the flags of a run.
func (u *usage) note(args []string) {
	cmd, rest, err := cli.Root().Find(args)
	if err != nil {
		return
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.seen == nil {
		u.seen = make(map[string]bool)
	}
	u.seen[cmd.CommandPath()] = true
	if cmd.ParseFlags(rest) != nil {
		return
	}
	cmd.Flags().Visit(func(f *pflag.Flag) {
		u.seen[nameOf(cmd, f)] = true
	})
}

// nameOf returns the name of a flag for the list of used flags. A flag of all commands has the same name for each.
func nameOf(cmd *cobra.Command, f *pflag.Flag) string {
	if cmd.Root().PersistentFlags().Lookup(f.Name) == f {
		return "--" + f.Name
	}
	return cmd.CommandPath() + " --" + f.Name
}

// unused returns what no test has used.
func (u *usage) unused() (names []string) {
	if !u.served {
		return nil
	}
	var walk func(cmd *cobra.Command)
	walk = func(cmd *cobra.Command) {
		if !u.seen[cmd.CommandPath()] {
			names = append(names, cmd.CommandPath())
		}
		cmd.LocalFlags().VisitAll(func(f *pflag.Flag) {
			if f.Name != "help" && !u.seen[nameOf(cmd, f)] {
				names = append(names, nameOf(cmd, f))
			}
		})
		for _, sub := range cmd.Commands() {
			walk(sub)
		}
	}
	walk(cli.Root())
	slices.Sort(names)
	return slices.Compact(names)
}

// result is what a run of the program has said.
type result struct {
	code     int
	out, err string
}

// run runs the program with variables NAME=value.
func run(ctx context.Context, env []string, args ...string) result {
	var out bytes.Buffer
	return runTo(ctx, &out, env, args...)
}

// runner is cli.Run, or the same with pools that stay open.
type runner func(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer, env func(name string) string) int

// runTo is run with another place for the output.
func runTo(ctx context.Context, out interface {
	io.Writer
	String() string
}, env []string, args ...string,
) result {
	return runBy(ctx, cli.Run, out, env, "", args...)
}

func runBy(ctx context.Context, by runner, out interface {
	io.Writer
	String() string
}, env []string, stdin string, args ...string,
) result {
	used.note(args)
	var errOut bytes.Buffer
	code := by(ctx, args, strings.NewReader(stdin), out, &errOut, func(name string) string { return variable(env, name) })
	return result{code, out.String(), errOut.String()}
}

// variable returns the last value of an environment variable.
func variable(env []string, name string) string {
	for _, assignment := range slices.Backward(env) {
		if value, ok := strings.CutPrefix(assignment, name+"="); ok {
			return value
		}
	}
	return ""
}

// fixture is a database of the test's own, and what works on it beside the program.
type fixture struct {
	url   string
	env   []string
	pool  *pgxpool.Pool
	pools *cli.Pools   // of the program
	store *rules.Store // whose changes hold at once
	start time.Time    // of windows that do not end while the test runs
}

func setup(t *testing.T) *fixture {
	t.Helper()
	return on(t, postgrestest.NewDatabase(t))
}

func on(t *testing.T, url string) *fixture {
	t.Helper()
	used.mu.Lock()
	used.served = true
	used.mu.Unlock()
	pool, err := pgxpool.New(t.Context(), url)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	store, err := rules.NewStore(pool, rules.StoreConfig{Lead: -1})
	require.NoError(t, err)
	pools := &cli.Pools{}
	t.Cleanup(pools.Close)
	return &fixture{
		url: url, pools: pools, env: []string{"RATELIMIT_DATABASE_URL=" + url, "USER=ana"}, pool: pool, store: store, start: time.Now().UTC().Truncate(time.Second),
	}
}

// run runs the program on the database.
func (f *fixture) run(t *testing.T, args ...string) result {
	t.Helper()
	return f.feed(t, "", args...)
}

// feed is run with a standard input.
func (f *fixture) feed(t *testing.T, stdin string, args ...string) result {
	t.Helper()
	return runBy(t.Context(), f.pools.Run, new(bytes.Buffer), f.env, stdin, args...)
}

// ok runs the program, requires exit code 0, and returns its output.
func (f *fixture) ok(t *testing.T, args ...string) string {
	t.Helper()
	r := f.run(t, args...)
	require.Equal(t, 0, r.code, "%v: %s%s", args, r.out, r.err)
	return r.out
}

// fails runs the program, requires an exit code, and returns its standard error.
func (f *fixture) fails(t *testing.T, code int, args ...string) string {
	t.Helper()
	r := f.run(t, args...)
	require.Equal(t, code, r.code, "%v: %s%s", args, r.out, r.err)
	return r.err
}

// read runs the program with -o json and reads its answer.
func read[T any](t *testing.T, f *fixture, code int, args ...string) (v T) {
	t.Helper()
	r := f.run(t, append(args, "-o", "json")...)
	require.Equal(t, code, r.code, "%v: %s%s", args, r.out, r.err)
	decoder := json.NewDecoder(strings.NewReader(r.out))
	require.NoError(t, decoder.Decode(&v), r.out)
	require.False(t, decoder.More(), "more than one document")
	return v
}

// put states rules that hold at once.
func (f *fixture) put(t *testing.T, stated ...rules.Rule) {
	t.Helper()
	_, err := f.store.Put(t.Context(), rules.Edit{Author: "eve", Reason: "a test"}, stated...)
	require.NoError(t, err)
}

// limiter returns a limiter of a program without rules.
func (f *fixture) limiter(t *testing.T, config ratelimit.Config) *ratelimit.Limiter {
	t.Helper()
	limiter, err := ratelimit.New(f.pool, config)
	require.NoError(t, err)
	return limiter
}

// withRules returns a limiter of a program with the stored rules, and the secret of RATELIMIT_HASH_KEY.
func (f *fixture) withRules(t *testing.T) *ratelimit.Limiter {
	t.Helper()
	set, err := rules.NewSet(f.pool, rules.Config{})
	require.NoError(t, err)
	require.NoError(t, set.Load(t.Context()))
	config := ratelimit.Config{Policies: set}
	if secret := variable(f.env, "RATELIMIT_HASH_KEY"); secret != "" {
		config.HashKey = []byte(secret)
	}
	return f.limiter(t, config)
}

// refuse writes that a key was refused so often, so long ago.
func (f *fixture) refuse(t *testing.T, limit, route, key string, refused int64, ago time.Duration) {
	t.Helper()
	_, err := f.pool.Exec(t.Context(), `INSERT INTO ratelimit.refusals (minute, name, route, key, shadow, refused, cost, last_us)
		SELECT date_trunc('minute', at), $1, $2::text, $3, $2::text = 'shadow', $4::bigint, $4::bigint * 2, (extract(epoch FROM at) * 1e6)::bigint
		FROM (SELECT clock_timestamp() - $5::interval AS at) a`, limit, route, key, refused, ago)
	require.NoError(t, err)
}

// reserve reserves under the stored rule, or a policy of 10 tokens a week, and returns the reservation's ID.
func (f *fixture) reserve(t *testing.T, limit, key string, cost float64) string {
	t.Helper()
	policy := ratelimit.FixedWindow{Rate: 10, Period: ratelimit.Week, Start: f.start}
	r, err := f.withRules(t).Reserve(t.Context(), ratelimit.Define(limit, policy).For(key).Cost(cost))
	require.NoError(t, err)
	require.True(t, r.Allowed)
	return r.ID
}

// file writes a file and returns its path.
func file(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

// window are flags that define a limit of 3 tokens, whose window does not end while a test runs.
func window() []string {
	return []string{"--policy", "kind: fixed window, rate: 3, period: week, start: " + time.Now().UTC().Format(time.RFC3339)}
}

// weekly is a rule of n tokens, whose window does not end while a test runs.
func weekly(limit, plan string, n float64) rules.Rule {
	return rules.Rule{Limit: limit, Plan: plan, Policy: ratelimit.FixedWindow{Rate: n, Period: ratelimit.Week, Start: time.Now().UTC().Truncate(time.Second)}}
}

// split returns the arguments of a command line, of which some are in single quotes.
func split(line string) (args []string) {
	for i, part := range strings.Split(line, "'") {
		if i%2 == 1 {
			args = append(args, part)
			continue
		}
		args = append(args, strings.Fields(part)...)
	}
	return args
}

// with returns arguments and more of them.
func with(args []string, more ...string) []string { return append(slices.Clone(more), args...) }

const firstFile = `
match: all
rules:
  - {limit: search, plan: free, rate: 5, period: minute}
  - {limit: search, plan: pro, rate: 300, period: minute}
  - {limit: site, rate: 1000, period: 1s, capacity: 2000, unit: requests}
tiers:
  - {limit: search, key: "{user}", route: GET /search, when: {user: "*"}}
  - {limit: site}
overrides:
  - {limit: search, key: ada, multiplier: 10}
`
