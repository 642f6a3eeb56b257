//go:build unix

package postgrestest

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
)

var errNoPgBouncer = errors.New("no PgBouncer to use: apt-get install pgbouncer, or brew install pgbouncer")

// pgbouncerPrograms are where PgBouncer is.
func pgbouncerPrograms() []string {
	return []string{"pgbouncer", "/usr/sbin/pgbouncer", "/opt/homebrew/bin/pgbouncer", "/usr/local/bin/pgbouncer"}
}

// StartPgBouncer starts a PgBouncer for the test in front of the database at databaseURL, which must use TCP. It
// returns the connection string of the same database through it. It ends with the test. Without a PgBouncer the test is
// skipped, with the reason, on a developer's machine, and fails when CI is set.
func StartPgBouncer(t testing.TB, databaseURL string, mode PoolMode) string {
	t.Helper()
	program, err := findPgBouncer(pgbouncerPrograms())
	switch {
	case err != nil && os.Getenv("CI") == "":
		t.Skip(err)
	case err != nil:
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), setupTimeout)
	defer cancel()
	b, err := startPgBouncer(ctx, program, databaseURL, mode)
	if err != nil {
		t.Fatalf("start PgBouncer: %v", err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("PgBouncer's log ends with:\n%s", b.log())
		}
		if err := b.stop(); err != nil {
			t.Errorf("clean up: %v", err)
		}
	})
	return b.url
}

// findPgBouncer returns the first program that is there.
func findPgBouncer(programs []string) (string, error) {
	for _, program := range programs {
		if path, err := exec.LookPath(program); err == nil {
			return path, nil
		}
	}
	return "", errNoPgBouncer
}

// HasTrackingPool reports whether the PgBouncer of this machine can keep track of prepared statements, as it can from
// 1.21 on.
func HasTrackingPool(t testing.TB) bool {
	t.Helper()
	program, err := findPgBouncer(pgbouncerPrograms())
	if err != nil {
		return false // StartPgBouncer says so
	}
	can, err := canTrack(t.Context(), program)
	if err != nil {
		t.Fatal(err)
	}
	return can
}

// canTrack asks a PgBouncer for its version.
func canTrack(ctx context.Context, program string) (bool, error) {
	out, err := exec.CommandContext(ctx, program, "--version").Output()
	if err != nil {
		return false, fmt.Errorf("%s --version: %w", program, err)
	}
	var major, minor int
	if _, err := fmt.Sscanf(string(out), "PgBouncer %d.%d", &major, &minor); err != nil {
		return false, fmt.Errorf("the version of PgBouncer in %.40q: %w", out, err)
	}
	return major > 1 || major == 1 && minor >= 21, nil
}

// settings returns the lines of pgbouncer.ini that a mode is.
func (m PoolMode) settings(ctx context.Context, program string) (string, error) {
	can, err := canTrack(ctx, program)
	switch {
	case err != nil:
		return "", err
	case m == TrackingPool && !can:
		return "", errors.New("this PgBouncer keeps no track of prepared statements; 1.21 is the first that does")
	case m == TrackingPool:
		return "pool_mode = transaction\nmax_prepared_statements = 200\n", nil
	case can: // some do by default
		return fmt.Sprintf("pool_mode = %s\nmax_prepared_statements = 0\n", m), nil
	}
	return fmt.Sprintf("pool_mode = %s\n", m), nil
}

// pgbouncerScript starts PgBouncer $1 in its directory $2. It stops the PgBouncer and deletes the directory when its
// input ends, because the process at the other end has closed it or has ended.
const pgbouncerScript = `
trap '' INT HUP TERM
"$1" "$2/pgbouncer.ini" </dev/null >/dev/null 2>&1 &
read -r line
cd /
kill -KILL $! 2>/dev/null
wait
rm -rf "$2"
`

// pgbouncer is a PgBouncer that runs.
type pgbouncer struct {
	url      string
	dir      string
	watchdog *watchdog
}

func startPgBouncer(ctx context.Context, program, databaseURL string, mode PoolMode) (_ *pgbouncer, err error) {
	user, err := serverAccount()
	if err != nil {
		return nil, err
	}
	port, err := freePort(ctx, 0)
	if err != nil {
		return nil, err
	}
	b := &pgbouncer{}
	if b.dir, err = makeDir(ctx, user, directories(false)); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.stop())
		}
	}()
	settings, err := mode.settings(ctx, program)
	if err != nil {
		return nil, err
	}
	if err := b.configure(databaseURL, port, settings, user); err != nil {
		return nil, err
	}
	if b.watchdog, err = startWatchdog(user, pgbouncerScript, program, b.dir); err != nil {
		return nil, err
	}
	return b, b.await(ctx)
}

// configure writes the files that PgBouncer reads. It lets everybody in as the role that they name: the clients are
// tests, and the password of that role's is in the file.
func (b *pgbouncer) configure(databaseURL string, port int, settings string, user *account) error {
	config, err := pgx.ParseConfig(databaseURL)
	if err != nil {
		return errors.New("the connection string cannot be read") // the error could quote it
	}
	quote := func(text string) string { return "'" + strings.ReplaceAll(text, "'", "''") + "'" }
	files := map[string]string{
		"pgbouncer.ini": fmt.Sprintf(`[databases]
%s = host=%s port=%d dbname=%s
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = %d
unix_socket_dir =
auth_type = trust
auth_file = %s
default_pool_size = 10
%slogfile = %s
`, config.Database, config.Host, config.Port, quote(config.Database), port, filepath.Join(b.dir, "users"), settings, filepath.Join(b.dir, "log")),
		"users": fmt.Sprintf("%q %q\n", config.User, config.Password),
	}
	for name, content := range files {
		path := filepath.Join(b.dir, name)
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			return err
		}
		if err := user.own(path); err != nil {
			return err
		}
	}
	b.url = (&url.URL{
		Scheme: "postgres", User: url.UserPassword(config.User, config.Password), Host: "127.0.0.1:" + strconv.Itoa(port),
		Path: "/" + config.Database, RawQuery: "sslmode=disable",
	}).String()
	return nil
}

// await returns when a connection comes through.
func (b *pgbouncer) await(ctx context.Context) error {
	for {
		conn, err := pgx.Connect(ctx, b.url)
		if err == nil {
			return conn.Close(ctx)
		}
		if log := b.log(); strings.Contains(log, "FATAL") || !pause(ctx) {
			return fmt.Errorf("%w\nits log ends with:\n%s", err, log)
		}
	}
}

func (b *pgbouncer) log() string {
	content, err := os.ReadFile(filepath.Join(b.dir, "log"))
	if err != nil {
		return "" // it has written nothing yet
	}
	return lastLines(string(content))
}

// stop ends the process, and removes its directory.
func (b *pgbouncer) stop() error {
	if b.watchdog == nil {
		return os.RemoveAll(b.dir)
	}
	return b.watchdog.Close()
}
