package main

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

// TestRun promises that a command gets the URL of a server, that run returns its status, and that a server that run has started is down
// afterwards.
func TestRun(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "url")
	status, err := run("sh", []string{"-c", `printf %s "$RATELIMIT_DATABASE_URL" >"$1"; exit 3`, "sh", file})
	require.NoError(t, err)
	require.Equal(t, 3, status)
	url, err := os.ReadFile(file)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	conn, err := pgx.Connect(ctx, string(url))
	if named := os.Getenv("RATELIMIT_DATABASE_URL") + os.Getenv("DATABASE_URL"); named == "" {
		require.Error(t, err)
		return
	}
	require.NoError(t, err)
	require.NoError(t, conn.Close(ctx))
}

func TestRunOfNoCommand(t *testing.T) {
	t.Parallel()
	status, err := run("/nowhere/command", nil)
	require.ErrorIs(t, err, os.ErrNotExist)
	require.Equal(t, 1, status)
}
