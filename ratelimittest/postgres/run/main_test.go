package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/ratelimittest/postgres"
)

// started returns a server, which sets stopped when it is closed.
func started(t *testing.T, stopped *bool) func(context.Context, int) (*postgrestest.Server, error) {
	t.Helper()
	url := postgres.URL(t)
	return func(ctx context.Context, _ int) (*postgrestest.Server, error) {
		return postgrestest.StartedAt(ctx, url, "of another test", func(context.Context) error {
			*stopped = true
			return nil
		})
	}
}

// TestRun promises that a command gets the URL of a server, that run returns its status, and that a server that run has
// started is down afterwards.
func TestRun(t *testing.T) {
	t.Parallel()
	var out strings.Builder
	var stopped bool
	start := started(t, &stopped)
	server, err := start(t.Context(), 0)
	require.NoError(t, err)
	file := filepath.Join(t.TempDir(), "url")
	status, err := runner{start: start, version: 18, out: &out}.run([]string{
		"sh", "-c", `printf %s "$RATELIMIT_DATABASE_URL, $DATABASE_URL, $RATELIMIT_POSTGRES_BINDIR." >"$1"; exit 3`, "sh", file,
	})
	require.NoError(t, err)
	require.Equal(t, 3, status)
	require.True(t, stopped)
	require.Contains(t, out.String(), "== PostgreSQL ")
	url, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, server.URL()+", "+server.URL()+", .", string(url), "programs of another version must not be used beside the server")
}

func TestRunOfNoCommand(t *testing.T) {
	t.Parallel()
	var stopped bool
	status, err := runner{start: started(t, &stopped), out: new(strings.Builder)}.run([]string{"/nowhere/command"})
	require.ErrorIs(t, err, os.ErrNotExist)
	require.Equal(t, 1, status)
	require.True(t, stopped)
}

// Without a server run fails, with the reasons; with -optional it runs the command, and tests hear of it.
func TestRunWithoutAServer(t *testing.T) {
	t.Parallel()
	none := &postgrestest.NoServerError{Tried: []postgrestest.Attempt{{Way: "npm", Err: errors.New("npm is not installed")}}}
	fails := func(failure error) func(context.Context, int) (*postgrestest.Server, error) {
		return func(context.Context, int) (*postgrestest.Server, error) { return nil, failure }
	}
	var out strings.Builder
	command := []string{"sh", "-c", `exit "4$RATELIMIT_NO_POSTGRES"`}
	status, err := runner{start: fails(none), out: &out}.run(command)
	require.Equal(t, none, err)
	require.Equal(t, 1, status)
	require.Empty(t, out.String())

	status, err = runner{start: fails(none), optional: true, out: &out}.run(command)
	require.NoError(t, err)
	require.Equal(t, 41, status)
	require.Equal(t, none.Error()+`

== There is no Postgres, so tests that need one are skipped; -v names them.
`, out.String())

	broken := errors.New("RATELIMIT_DATABASE_URL: connection refused")
	_, err = runner{start: fails(broken), optional: true, out: &out}.run(command)
	require.Equal(t, broken, err, "a server that was asked for is not optional")
}
