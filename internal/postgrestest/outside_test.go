//go:build unix

package postgrestest

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

// actOutside plays the program outside, with a server of this machine for a container.
func actOutside() {
	server, err := startLocal(context.Background(), Options{}, environmentFromOS())
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	requests, answers := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	running := true
	_ = answers.Encode(answer{URLs: []string{"postgres://127.0.0.1:1/nobody", server.url}})
	for {
		var r request
		if requests.Decode(&r) != nil {
			_ = server.Close()
			return
		}
		a := answer{Running: running, Text: "the end of the log"}
		switch r.Do {
		case "start":
			err, running = server.host.start(context.Background()), true
		case "stop":
			err, running = server.host.stop(context.Background(), StopMode(r.Mode)), false
		}
		if err != nil {
			a = answer{Error: err.Error()}
		}
		_ = answers.Encode(a)
	}
}

func TestOutside(t *testing.T) {
	t.Parallel()
	shell := func(script string) []string { return []string{"sh", "-c", script} }

	t.Run("KeepsAServerUntilItIsClosed", func(t *testing.T) {
		t.Parallel()
		needsLocal(t)
		server, err := startContainer(t.Context(), []string{"env", helperVariable + "=outside", os.Args[0]}, Options{}, "postgres:17")
		require.NoError(t, err)
		require.Contains(t, server.String(), "in Docker, image postgres:17")
		require.NoError(t, server.Stop(t.Context(), Immediate))
		requireDown(t, server.URL())
		require.NoError(t, server.Restart(t.Context()))
		_, err = describe(t.Context(), server.URL())
		require.NoError(t, err)
		require.Equal(t, "the end of the log", server.host.log(t.Context()))
		require.NoError(t, server.Close())
		requireDown(t, server.URL())
	})

	t.Run("SaysWhatFailed", func(t *testing.T) {
		t.Parallel()
		_, err := startContainer(t.Context(), shell(`echo '{"Error":"no Docker here"}'`), Options{}, "")
		require.EqualError(t, err, "no Docker here")
	})

	t.Run("SaysWhyItDoesNotRun", func(t *testing.T) {
		t.Parallel()
		_, err := startContainer(t.Context(), shell("echo go: updates to go.mod needed >&2; exit 1"), Options{}, "")
		require.ErrorContains(t, err, "updates to go.mod needed")
		_, err = startContainer(t.Context(), []string{"/nowhere/outside"}, Options{}, "")
		require.ErrorIs(t, err, os.ErrNotExist)
	})

	t.Run("EndsWhenTheContextDoes", func(t *testing.T) {
		t.Parallel()
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, err := startContainer(ctx, shell("read line"), Options{}, "")
		require.ErrorIs(t, err, context.Canceled)
	})

	t.Run("SaysWhatAContainerEndedWith", func(t *testing.T) {
		t.Parallel()
		script := `echo '{"URLs":["postgres://127.0.0.1:1/nobody"]}'
			read state; echo '{"Text":"the container ended with code 3"}'
			read log; echo '{"Text":"FATAL: no"}'; read end`
		_, err := startContainer(t.Context(), shell(script), Options{}, "small")
		require.ErrorContains(t, err, "run image small: the container ended with code 3:\nFATAL: no")
	})

	t.Run("GetsProgramsThatAreDownloaded", func(t *testing.T) {
		t.Parallel()
		binDir := t.TempDir()
		for _, name := range []string{"initdb", "pg_ctl", "postgres"} {
			require.NoError(t, os.WriteFile(binDir+"/"+name, nil, 0o700))
		}
		found, err := download(t.Context(), shell(`echo '{"BinDir":"`+binDir+`"}'`), t.TempDir())
		require.NoError(t, err)
		require.Equal(t, binDir, found)
	})

	t.Run("NeedsACheckout", func(t *testing.T) {
		t.Parallel()
		_, err := programIn(t.TempDir())
		require.ErrorIs(t, err, os.ErrNotExist)
		require.ErrorContains(t, err, "takes a checkout of pgratelimit, built without -trimpath; set RATELIMIT_DATABASE_URL, or install the server programs of Postgres")
	})

	t.Run("IsAModuleBesideThisPackage", func(t *testing.T) {
		t.Parallel()
		command, err := program()
		require.NoError(t, err)
		require.DirExists(t, command[2])
	})
}
