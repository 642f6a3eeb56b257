package main_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
)

// program returns the path of the program, which is built once.
var program = sync.OnceValues(func() (string, error) {
	directory, err := os.MkdirTemp("", "ratelimit")
	if err != nil {
		return "", err
	}
	path := filepath.Join(directory, "ratelimit")
	out, err := exec.CommandContext(context.Background(), "go", "build", "-o", path, ".").CombinedOutput()
	if err != nil {
		return "", errors.New(string(out))
	}
	return path, nil
})

func TestMain(m *testing.M) {
	code := m.Run()
	if !testing.Short() {
		if path, err := program(); err == nil {
			_ = os.RemoveAll(filepath.Dir(path))
		}
	}
	os.Exit(code)
}

// command returns the program with arguments, and with no variables but those given.
func command(t *testing.T, env []string, args ...string) (cmd *exec.Cmd, out, errOut *bytes.Buffer) {
	t.Helper()
	path, err := program()
	require.NoError(t, err)
	cmd = exec.CommandContext(t.Context(), path, args...)
	cmd.Env = append([]string{"HOME=" + t.TempDir(), "USER=ana"}, env...)
	out, errOut = &bytes.Buffer{}, &bytes.Buffer{}
	cmd.Stdout, cmd.Stderr = out, errOut
	return cmd, out, errOut
}

func TestProgram(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "builds the program and runs it")

	t.Run("EndsWithItsExitCode", func(t *testing.T) {
		t.Parallel()
		env := []string{"RATELIMIT_DATABASE_URL=" + postgrestest.NewDatabase(t)}
		take := []string{"take", "sends", "ada", "--policy", "1 per week"}
		for _, c := range []struct {
			code int
			args []string
		}{{0, []string{"version"}}, {0, nil}, {2, []string{"tak"}}, {0, take}, {3, take}, {2, []string{"migrate", "down"}}, {6, []string{"rules", "get", "none"}}} {
			cmd, out, errOut := command(t, env, c.args...)
			_ = cmd.Run()
			require.Equal(t, c.code, cmd.ProcessState.ExitCode(), "%v: %s%s", c.args, out, errOut)
			require.NotContains(t, errOut.String(), "panic")
			require.NotContains(t, errOut.String(), "goroutine")
		}
	})

	t.Run("ReadsTheVariablesOfLibpq", func(t *testing.T) {
		t.Parallel()
		config, err := pgx.ParseConfig(postgrestest.NewDatabase(t))
		require.NoError(t, err)
		cmd, out, errOut := command(t, []string{
			"PGHOST=" + config.Host, fmt.Sprintf("PGPORT=%d", config.Port), "PGUSER=" + config.User, "PGPASSWORD=" + config.Password,
			"PGDATABASE=" + config.Database, "PGSSLMODE=disable",
		}, "rules", "list")
		require.NoError(t, cmd.Run(), "%s", errOut)
		require.Contains(t, out.String(), "no rules")
	})

	t.Run("AnInterruptWhileItWaitsUndoesTheCall", func(t *testing.T) {
		t.Parallel()
		if runtime.GOOS == "windows" {
			t.Skip("there are no signals")
		}
		ctx := t.Context()
		url := postgrestest.NewDatabase(t)
		conn, err := pgx.Connect(ctx, url)
		require.NoError(t, err)
		defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
		tx, err := conn.Begin(ctx)
		require.NoError(t, err)
		_, err = tx.Exec(ctx, "LOCK TABLE ratelimit.buckets IN ACCESS EXCLUSIVE MODE")
		require.NoError(t, err)
		cmd, _, errOut := command(t, []string{"RATELIMIT_DATABASE_URL=" + url}, "take", "sends", "ada", "--policy", "1 per week")
		require.NoError(t, cmd.Start())
		watch, err := pgx.Connect(ctx, url)
		require.NoError(t, err)
		defer func() { _ = watch.Close(context.WithoutCancel(ctx)) }()
		require.Eventually(t, func() bool {
			var waits bool
			err := watch.QueryRow(ctx, "SELECT count(*) > 0 FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'ratelimit' AND wait_event_type = 'Lock'").Scan(&waits)
			return err == nil && waits
		}, time.Minute, time.Millisecond)
		require.NoError(t, cmd.Process.Signal(syscall.SIGINT))
		_ = cmd.Wait()
		require.Equal(t, 130, cmd.ProcessState.ExitCode(), errOut.String())
		require.Contains(t, errOut.String(), "ratelimit: interrupted")
		require.NoError(t, tx.Rollback(ctx))
		var rows int
		require.NoError(t, watch.QueryRow(ctx, "SELECT count(*) FROM ratelimit.buckets").Scan(&rows))
		require.Zero(t, rows)
	})

	t.Run("ASecondInterruptEndsWhatDoesNotHearOfTheFirst", func(t *testing.T) {
		t.Parallel()
		if runtime.GOOS == "windows" {
			t.Skip("there are no signals")
		}
		pipe := filepath.Join(t.TempDir(), "rules.yaml")
		require.NoError(t, exec.CommandContext(t.Context(), "mkfifo", pipe).Run())
		cmd, _, errOut := command(t, nil, "rules", "validate", "-f", pipe)
		require.NoError(t, cmd.Start())
		var silent *os.File // who writes nothing
		require.Eventually(t, func() (opened bool) {
			var err error
			silent, err = os.OpenFile(pipe, os.O_WRONLY|syscall.O_NONBLOCK, 0)
			return err == nil // it reads
		}, time.Minute, time.Millisecond)
		defer silent.Close()
		ended := make(chan struct{})
		go func() { _ = cmd.Wait(); close(ended) }()
		require.Eventually(t, func() bool {
			_ = cmd.Process.Signal(syscall.SIGINT)
			select {
			case <-ended:
				return true
			default:
				return false
			}
		}, time.Minute, 50*time.Millisecond, "it has to be killed")
		require.Empty(t, errOut.String())
	})

	t.Run("CanBeInstalled", func(t *testing.T) {
		t.Parallel()
		cmd := exec.CommandContext(t.Context(), "go", "install", ".")
		directory := t.TempDir()
		cmd.Env = append(os.Environ(), "GOBIN="+directory)
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s", out)
		entries, err := os.ReadDir(directory)
		require.NoError(t, err)
		require.Len(t, entries, 1)
		require.True(t, strings.HasPrefix(entries[0].Name(), "ratelimit"))
	})
}
