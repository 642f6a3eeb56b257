// Package scenario_test runs the programs of examples as a reader does, and plays against them from outside: over HTTP,
// and with SQL. Each program is copied into a module of its own and built there, so it compiles for readers who copy
// it.
//
// With -v the scenarios print attempts, admissions and refusals.
package scenario_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
)

const (
	examples = "../../examples"
	patience = 2 * time.Minute // It only ends a test that hangs.
)

// programs are built once for all tests of this process.
var programs = struct {
	sync.Mutex
	directory string            // deleted by TestMain
	built     map[string]string // paths by the name of an example
}{built: map[string]string{}}

func TestMain(m *testing.M) {
	code := m.Run()
	_ = os.RemoveAll(programs.directory)
	os.Exit(code)
}

// build returns the path of a program. It copies the files of the example, without its tests, into a module that
// requires what the module of examples requires, and builds that module outside the workspace.
func build(t *testing.T, example string) string {
	t.Helper()
	programs.Lock()
	defer programs.Unlock()
	if programs.directory == "" {
		directory, err := os.MkdirTemp("", "scenario") //nolint:usetesting // it outlives the test that builds first
		require.NoError(t, err)
		programs.directory = directory
	}
	if path, ok := programs.built[example]; ok {
		return path
	}
	module := filepath.Join(programs.directory, example)
	require.NoError(t, os.CopyFS(module, os.DirFS(filepath.Join(examples, example))))
	for _, name := range []string{"go.mod", "go.sum"} {
		text, err := os.ReadFile(filepath.Join(examples, name))
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(filepath.Join(module, name), text, 0o600))
	}
	root, err := filepath.Abs("../..")
	require.NoError(t, err)
	edit := []string{"mod", "edit", "-module", "example.com/copied"}
	for _, line := range regexp.MustCompile(`(?m)^\s*(\S+) => \.\.(\S*)$`).FindAllStringSubmatch(read(t, filepath.Join(module, "go.mod")), -1) {
		edit = append(edit, "-replace="+line[1]+"="+root+line[2])
	}
	require.Greater(t, len(edit), 4)
	run(t, module, edit...)
	run(t, module, "build", "-mod=mod", "-ldflags=-s -w", "-o", "program", ".")
	programs.built[example] = filepath.Join(module, "program")
	return programs.built[example]
}

func read(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	return string(text)
}

// run runs a command of Go outside the workspace.
func run(t *testing.T, directory string, args ...string) {
	t.Helper()
	command := exec.CommandContext(t.Context(), "go", args...)
	command.Dir, command.Env = directory, append(os.Environ(), "GOWORK=off")
	output, err := command.CombinedOutput()
	require.NoError(t, err, "go %s: %s", strings.Join(args, " "), output)
}

// invoke runs a program to its end, and returns its output.
func invoke(t *testing.T, database, example string, args ...string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	command := exec.CommandContext(ctx, build(t, example), args...)
	command.Env = append(os.Environ(), "DATABASE_URL="+database)
	output, err := command.CombinedOutput()
	return string(output), err
}

// server is a running program that answers requests over HTTP.
type server struct {
	url     string
	command *exec.Cmd
	printed *strings.Builder // complete once drained is closed
	drained chan struct{}
	once    sync.Once
}

// start starts a program that serves HTTP on a free port. It ends with the test at the latest. settings are environment
// variables.
func start(t *testing.T, database, example string, settings []string, args ...string) *server {
	t.Helper()
	s := &server{printed: new(strings.Builder), drained: make(chan struct{})}
	s.command = exec.CommandContext(context.WithoutCancel(t.Context()), build(t, example), append(slices.Clone(args), "-listen", "127.0.0.1:0")...)
	s.command.Env = append(append(os.Environ(), "DATABASE_URL="+database), settings...)
	output, err := s.command.StderrPipe()
	require.NoError(t, err)
	require.NoError(t, s.command.Start())
	t.Cleanup(func() {
		s.stop(t)
		if t.Failed() {
			t.Logf("%s printed: %s", example, s.printed)
		}
	})
	lines, found := bufio.NewScanner(output), make(chan string, 1)
	go func() {
		defer close(s.drained)
		defer close(found)
		for lines.Scan() {
			fmt.Fprintln(s.printed, lines.Text())
			if _, url, ok := strings.Cut(lines.Text(), "listening on "); ok {
				found <- url
			}
		}
		_, _ = io.Copy(io.Discard, output) // after a line that is too long
	}()
	select {
	case s.url = <-found:
	case <-time.After(patience):
	}
	require.NotEmpty(t, s.url, "%s does not listen", example)
	return s
}

// stop interrupts the program, which has to finish its requests and exit without an error. It returns the processor
// time that the program has used.
func (s *server) stop(t *testing.T) time.Duration {
	t.Helper()
	s.once.Do(func() {
		require.NoError(t, s.command.Process.Signal(syscall.SIGTERM))
		late := time.AfterFunc(patience, func() { _ = s.command.Process.Kill() })
		defer late.Stop()
		<-s.drained
		require.NoError(t, s.command.Wait(), "%s", s.printed)
	})
	return s.command.ProcessState.UserTime() + s.command.ProcessState.SystemTime()
}

// hand is a clock that a test moves by hand. Statements of the limiter read it in place of the database's clock.
type hand struct {
	pool  *pgxpool.Pool
	start time.Time
	now   time.Time
}

// newDatabase returns the URL of a database with the tables of the limiter, and a pool on it.
func newDatabase(t *testing.T) (string, *pgxpool.Pool) {
	t.Helper()
	database := postgrestest.NewDatabase(t)
	pool, err := pgxpool.New(t.Context(), database)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return database, pool
}

// stopClock puts a schema before pg_catalog in the search_path of new connections. Its clock_timestamp() and
// statement_timestamp() return the time of the hand.
func stopClock(t *testing.T, database string, pool *pgxpool.Pool) *hand {
	t.Helper()
	parsed, err := url.Parse(database)
	require.NoError(t, err)
	now := time.Now().UTC().Truncate(time.Second)
	h := &hand{pool: pool, start: now, now: now}
	execute(t, pool, `CREATE SCHEMA clock`)
	execute(t, pool, `ALTER DATABASE "`+strings.TrimPrefix(parsed.Path, "/")+`" SET search_path = public, clock, pg_catalog`)
	h.advance(t, 0)
	pool.Reset()
	return h
}

// advance moves the hand on.
func (h *hand) advance(t *testing.T, d time.Duration) {
	t.Helper()
	h.now = h.now.Add(d)
	for _, function := range []string{"clock_timestamp", "statement_timestamp"} {
		execute(t, h.pool, `CREATE OR REPLACE FUNCTION clock.`+function+`() RETURNS timestamptz LANGUAGE sql STABLE AS
			$$SELECT '`+h.now.Format("2006-01-02 15:04:05.999999")+`Z'::timestamptz$$`)
	}
}

// passed returns the time since the start.
func (h *hand) passed() time.Duration { return h.now.Sub(h.start) }

func execute(t *testing.T, pool *pgxpool.Pool, sql string, args ...any) {
	t.Helper()
	_, err := pool.Exec(t.Context(), sql, args...)
	require.NoError(t, err)
}

// query returns the one value that a query returns.
func query[T any](t *testing.T, pool *pgxpool.Pool, sql string, args ...any) (value T) {
	t.Helper()
	require.NoError(t, pool.QueryRow(t.Context(), sql, args...).Scan(&value))
	return value
}

// client does not follow redirects.
func client(connections int) *http.Client {
	return &http.Client{
		Transport:     &http.Transport{MaxIdleConnsPerHost: connections},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		Timeout:       patience,
	}
}

// short returns d without zeros at its end: 3m, not 3m0s.
func short(d time.Duration) string {
	text := d.String()
	for _, zeros := range []string{"m0s", "h0m"} {
		if strings.HasSuffix(text, zeros) {
			text = strings.TrimSuffix(text, zeros[1:])
		}
	}
	return text
}
