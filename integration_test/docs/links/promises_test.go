package links_test

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// promised is the number of entries of integration_test/promises.txt.
const promised = 45

// TestPromisesNameTests promises that the entries of integration_test/promises.txt are numbered in order, that each names a test, and that each of
// these tests is in the directory that the entry names.
func TestPromisesNameTests(t *testing.T) {
	t.Parallel()
	file, err := os.ReadFile("../../promises.txt")
	require.NoError(t, err)
	entries, sources, named := 0, map[string]string{}, true
	for line := range strings.Lines(string(file)) {
		switch {
		case strings.HasPrefix(line, "    "):
			fields := strings.Fields(line)
			require.Len(t, fields, 2, line)
			directory := fields[0]
			if _, read := sources[directory]; !read {
				for _, text := range pages(t, filepath.Join(directory, "*_test.go")) {
					sources[directory] += text
				}
			}
			name, part, _ := strings.Cut(fields[1], "/")
			if !strings.Contains(sources[directory], "\nfunc "+name+"(") || part != "" && !strings.Contains(sources[directory], strconv.Quote(part)) {
				t.Errorf("entry %d names %s, which is not in %s", entries, fields[1], directory)
			}
			named = true
		case strings.TrimSpace(line) != "" && !strings.HasPrefix(line, "#"):
			require.Truef(t, named, "entry %d names no test", entries)
			entries, named = entries+1, false
			require.True(t, strings.HasPrefix(line, strconv.Itoa(entries)+". "), line)
		}
	}
	require.True(t, named)
	require.Equal(t, promised, entries)
}
