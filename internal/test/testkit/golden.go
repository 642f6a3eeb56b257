package testkit

import (
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

//nolint:gochecknoglobals // a flag of go test
var update = flag.Bool("update", false, "write the golden files of the tests that run")

// Updating reports whether the tests run with -update, and so write what they otherwise compare.
func Updating() bool { return *update }

// Golden fails t unless text equals the file testdata/name. With -update it writes the file.
func Golden(t testing.TB, name, text string) {
	t.Helper()
	path := filepath.Join("testdata", filepath.FromSlash(name))
	if *update {
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, []byte(text), 0o644))
		return
	}
	want, err := os.ReadFile(path)
	require.NoError(t, err, "To write the file, run this in the directory of the package: go test -run '^%s$' -update",
		t.Name())
	if difference := firstDifference(string(want), text); difference != "" {
		require.Fail(t, path+difference, "Users see this text. If you want the change, run this in the directory of the "+
			"package: go test -run '^%s$' -update", t.Name())
	}
}

// firstDifference returns the first line in which two texts differ, as ":3: want ..., got ..."; "" when they are equal.
func firstDifference(want, got string) string {
	wanted, lines := strings.SplitAfter(want, "\n"), strings.SplitAfter(got, "\n")
	for i := range max(len(wanted), len(lines)) {
		switch {
		case i >= len(wanted):
			return fmt.Sprintf(":%d: want the end, got %q", i+1, lines[i])
		case i >= len(lines):
			return fmt.Sprintf(":%d: want %q, got the end", i+1, wanted[i])
		case wanted[i] != lines[i]:
			return fmt.Sprintf(":%d: want %q, got %q", i+1, wanted[i], lines[i])
		}
	}
	return ""
}

// GoldenDirectory fails t unless the directory testdata/name has exactly these texts, by the names of their files. With
// -update it writes the files, and removes all others.
func GoldenDirectory(t testing.TB, name string, texts map[string]string) {
	t.Helper()
	for _, file := range slices.Sorted(maps.Keys(texts)) {
		Golden(t, name+"/"+file, texts[file])
	}
	directory := filepath.Join("testdata", filepath.FromSlash(name))
	files, err := os.ReadDir(directory)
	require.NoError(t, err)
	for _, file := range files {
		if _, ok := texts[file.Name()]; ok {
			continue
		}
		require.True(t, *update, "No text belongs to %s/%s. To remove it, run the test with -update.", directory, file.Name())
		require.NoError(t, os.Remove(filepath.Join(directory, file.Name())))
	}
}
