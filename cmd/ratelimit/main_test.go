package main_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"

	bootstrapv3 "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ratelimit/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/router/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/upstreams/http/v3"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
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
	testkit.Long(t, "builds the program and runs it")

	t.Run("EndsWithItsExitCode", func(t *testing.T) {
		t.Parallel()
		env := []string{"RATELIMIT_DATABASE_URL=" + postgrestest.NewDatabase(t)}
		take := []string{"take", "sends", "ada", "--policy", "rate: 1, period: week"}
		for _, c := range []struct {
			code int
			args []string
		}{{0, []string{"--version"}}, {0, nil}, {2, []string{"tak"}}, {0, take}, {3, take}, {2, []string{"migrate", "down"}}, {6, []string{"rules", "get", "none"}}} {
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
		cmd, _, errOut := command(t, []string{"RATELIMIT_DATABASE_URL=" + url}, "take", "sends", "ada", "--policy", "rate: 1, period: week")
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

	t.Run("ASecondInterruptEndsTheProcess", func(t *testing.T) {
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
}

// TestEnvoyConfiguration expects that Envoy knows every field of envoy.yaml, and accepts its values.
func TestEnvoyConfiguration(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("envoy.yaml")
	require.NoError(t, err)
	var parsed map[string]any
	require.NoError(t, yaml.Unmarshal(text, &parsed))
	data, err := json.Marshal(parsed)
	require.NoError(t, err)
	var bootstrap bootstrapv3.Bootstrap
	require.NoError(t, protojson.Unmarshal(data, &bootstrap))
	require.NoError(t, bootstrap.ValidateAll())
}
