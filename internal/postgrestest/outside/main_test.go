package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestRun(t *testing.T) {
	t.Parallel()

	t.Run("RefusesWhatItDoesNotKnow", func(t *testing.T) {
		t.Parallel()
		for _, args := range [][]string{nil, {"docker"}, {"docker", "image"}, {"embedded"}, {"cloud", "small"}} {
			require.ErrorContains(t, run(args, strings.NewReader(""), nil), "usage: ")
		}
	})

	t.Run("AnswersWithTheProgramsThatAreThere", func(t *testing.T) {
		t.Parallel()
		cache := t.TempDir()
		binDir := filepath.Join(cache, "postgres-"+string(embeddedVersion), "bin")
		require.NoError(t, os.MkdirAll(binDir, 0o700))
		for _, program := range []string{"initdb", "pg_ctl", "postgres"} {
			require.NoError(t, os.WriteFile(filepath.Join(binDir, program), nil, 0o700))
		}
		var out bytes.Buffer
		require.NoError(t, run([]string{"embedded", cache}, strings.NewReader(""), &out))
		var answer response
		require.NoError(t, json.Unmarshal(out.Bytes(), &answer))
		require.Equal(t, response{BinDir: binDir}, answer)
	})

	t.Run("DownloadsNothingForNobody", func(t *testing.T) {
		t.Parallel()
		file := filepath.Join(t.TempDir(), "file")
		require.NoError(t, os.WriteFile(file, nil, 0o600))
		var out bytes.Buffer
		require.NoError(t, run([]string{"embedded", filepath.Join(file, "cache")}, strings.NewReader(""), &out))
		require.Contains(t, out.String(), "not a directory")
	})
}
