package server

import (
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// machine makes a /proc of files.
func machine(t *testing.T, files map[string]string) *Meter {
	t.Helper()
	directory := t.TempDir()
	for name, text := range files {
		path := filepath.Join(directory, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	}
	return &Meter{directory: directory}
}

func TestMeter(t *testing.T) {
	t.Parallel()
	files := map[string]string{
		"10/task/10/schedstat": "1000000000 5 5\n", "10/task/10/children": "11 12 14 ", // 14 has ended meanwhile
		"11/schedstat": "2000000000 5 5\n", "12/schedstat": "4000000000 5 5\n", "13/schedstat": "8000000000 5 5\n",
		"10/stat":              "10 (a (b) c) S 1 10 10 0 -1 4194560 1 2 3 4 5 6 250 50 20 0 1 0\n",
		"20/task/20/schedstat": "500000000 5 5\n", "20/task/21/schedstat": "250000000 5 5\n",
	}
	m := machine(t, files)
	require.True(t, math.IsNaN(m.Seconds()), "the server is on another machine")
	require.True(t, math.IsNaN((*Meter)(nil).Seconds()))
	m.postgres, m.others = 10, []int{20}
	require.InDelta(t, 1+2+4+3+0.75, m.Seconds(), 1e-9, "the server, its children, also ended ones, and the threads of the others")
	m.others = []int{99}
	require.True(t, math.IsNaN(m.Seconds()), "this process has ended")
}
