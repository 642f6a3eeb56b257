//go:build unix

package postgrestest

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
)

// helperVariable makes this test binary a program that starts a server, says where, and waits.
const helperVariable = "POSTGRESTEST_HELPER"

func TestMain(m *testing.M) {
	switch os.Getenv(helperVariable) {
	case "":
		m.Run()
	default:
		startAndWait()
	}
}

func startAndWait() {
	server, err := startLocal(context.Background(), Options{}, environmentFrom(os.Getenv))
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(server.host.(*cluster).dir)
	fmt.Println(server.URL())
	_, _ = io.Copy(io.Discard, os.Stdin) // until the test ends or kills this process
	_ = server.Close()
}

// The highest version comes first, and only directories that hold a server count, each once.
func TestBinDirs(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	for _, version := range []string{"14", "18", "15"} {
		require.NoError(t, os.MkdirAll(filepath.Join(root, version, "bin"), 0o700))
	}
	var got []string
	for _, dir := range newestFirst(filepath.Join(root, "*", "bin")) {
		got = append(got, filepath.Base(filepath.Dir(dir)))
	}
	require.Equal(t, []string{"18", "15", "14"}, got)

	complete, clientOnly := t.TempDir(), t.TempDir()
	for _, program := range []string{"initdb", "pg_ctl", "postgres"} {
		require.NoError(t, os.WriteFile(filepath.Join(complete, program), nil, 0o700))
	}
	require.NoError(t, os.WriteFile(filepath.Join(clientOnly, "pg_config"), nil, 0o700))
	require.Equal(t, []string{complete}, usable([]string{clientOnly, complete, "/nowhere", complete}))
}

// A server gets the port that is asked for, unless another program has it.
func TestFreePort(t *testing.T) {
	t.Parallel()
	listener, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	port := listener.Addr().(*net.TCPAddr).Port
	other, err := freePort(t.Context(), port)
	require.NoError(t, err)
	require.NotEqual(t, port, other)
	require.NoError(t, listener.Close())
	asked, err := freePort(t.Context(), port)
	require.NoError(t, err)
	require.Equal(t, port, asked)
}

// A version that is asked for is found by what the programs say, also beside programs of another version that a
// variable names.
func TestBinDirsOfAVersion(t *testing.T) {
	t.Parallel()
	env := environment{binDir: t.TempDir()}
	for _, program := range []string{"initdb", "pg_ctl", "postgres"} {
		script := "#!/bin/sh\necho 'postgres (PostgreSQL) 99.2 (Debian 99.2-1)'\n"
		require.NoError(t, os.WriteFile(filepath.Join(env.binDir, program), []byte(script), 0o700))
	}
	dirs, err := binDirs(t.Context(), env, 99)
	require.NoError(t, err)
	require.Equal(t, []string{env.binDir}, dirs)
	_, err = binDirs(t.Context(), env, 2)
	require.ErrorContains(t, err, "no server programs of version 2 where pg_config says")
	_, err = start(t.Context(), Options{Version: 2}, env)
	require.ErrorIs(t, err, ErrNoServer, "other ways can have this version")
}

// needsLocal ends a test of the server's programs if there are none.
func needsLocal(t *testing.T) environment {
	t.Helper()
	env := environmentFrom(os.Getenv)
	if _, err := binDirs(t.Context(), env, 0); err != nil {
		GiveUp(t, noServer(env, err))
	}
	return env
}

func TestLocal(t *testing.T) {
	t.Parallel()
	testkit.Long(t, "servers of its own, and a process")
	env := needsLocal(t)

	t.Run("LeavesNothingBehindWhenTheProcessIsKilled", func(t *testing.T) {
		t.Parallel()
		helper := exec.CommandContext(t.Context(), os.Args[0])
		helper.Env = append(os.Environ(), helperVariable+"=1")
		output, err := helper.StdoutPipe()
		require.NoError(t, err)
		input, err := helper.StdinPipe()
		require.NoError(t, err)
		require.NoError(t, helper.Start())
		t.Cleanup(func() { _ = input.Close() })
		lines := bufio.NewScanner(output)
		require.True(t, lines.Scan())
		dir := lines.Text()
		require.True(t, lines.Scan(), dir)
		url := lines.Text()
		_, err = describe(t.Context(), url)
		require.NoError(t, err)

		require.NoError(t, helper.Process.Kill())
		require.Error(t, helper.Wait())
		require.Eventually(t, func() bool {
			_, err := os.Stat(dir)
			return os.IsNotExist(err)
		}, cleanupTimeout, 10*time.Millisecond)
		_, err = describe(t.Context(), url)
		require.Error(t, err)
	})

	t.Run("AServerThatFailsToStartNamesTheReasonAndLeavesNothing", func(t *testing.T) {
		t.Parallel()
		_, err := startLocal(t.Context(), Options{Settings: map[string]string{"no_such_setting": "1"}}, env)
		require.ErrorContains(t, err, `unrecognized configuration parameter "no_such_setting"`)
		_, rest, found := strings.Cut(err.Error(), "-D ")
		if found {
			require.NoDirExists(t, strings.Fields(rest)[0])
		}
	})

	t.Run("AsksEachRoleButTheSuperuserForItsPassword", func(t *testing.T) {
		t.Parallel()
		server := StartOwn(t, nil)
		config, err := pgx.ParseConfig(server.URL())
		require.NoError(t, err)
		connect := func(user, password string) error {
			config := config.Copy()
			config.User, config.Password = user, password
			conn, err := pgx.ConnectConfig(t.Context(), config)
			if err == nil && user == "postgres" {
				_, err = conn.Exec(t.Context(), "CREATE ROLE app LOGIN PASSWORD 'right'")
			}
			if err == nil {
				err = conn.Close(t.Context())
			}
			return err
		}
		require.NoError(t, connect("postgres", ""))
		require.NoError(t, connect("app", "right"))
		require.ErrorContains(t, connect("app", "wrong"), "password authentication failed")
		require.NotEmpty(t, config.Password, "tests look for it in what programs show")
	})
}
