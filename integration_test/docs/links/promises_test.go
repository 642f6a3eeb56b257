package links_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// promised is the number of entries under "Faults and their tests" in docs/promises.md.
const promised = 45

var promiseEntry = regexp.MustCompile(`(?m)^(\d+)\. `)

// TestPromisesNameTests promises that the entries under "Faults and their tests" in docs/promises.md are numbered in order, that
// testdata/promises.txt names a test for each, and that each of these tests is in the directory that the file names.
func TestPromisesNameTests(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../../../docs/promises.md")
	require.NoError(t, err)
	_, faults, found := strings.Cut(string(page), "\n## Faults and their tests\n")
	require.True(t, found)
	entries := promiseEntry.FindAllStringSubmatch(faults, -1)
	require.Len(t, entries, promised)
	for i, entry := range entries {
		require.Equal(t, strconv.Itoa(i+1), entry[1])
	}

	file, err := os.ReadFile("testdata/promises.txt")
	require.NoError(t, err)
	tested, sources := [promised + 1]bool{}, map[string]string{}
	for line := range strings.Lines(string(file)) {
		if strings.HasPrefix(line, "#") {
			continue
		}
		fields := strings.Fields(line)
		require.Len(t, fields, 3, line)
		number, err := strconv.Atoi(fields[0])
		require.NoError(t, err)
		require.Truef(t, 0 < number && number <= promised, "there is no entry %d", number)
		tested[number] = true
		directory := fields[1]
		if _, read := sources[directory]; !read {
			sources[directory] = testsIn(t, filepath.Join("../../..", directory))
		}
		name, part, _ := strings.Cut(fields[2], "/")
		if !strings.Contains(sources[directory], "\nfunc "+name+"(") || !strings.Contains(sources[directory], strconv.Quote(part)) && part != "" {
			t.Errorf("entry %d names %s, which is not in %s", number, fields[2], directory)
		}
	}
	for number := 1; number <= promised; number++ {
		require.Truef(t, tested[number], "entry %d has no test", number)
	}
}

// testsIn returns the text of the test files of a directory.
func testsIn(t *testing.T, directory string) string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(directory, "*_test.go"))
	require.NoError(t, err)
	var all strings.Builder
	for _, file := range files {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		all.Write(text)
	}
	return all.String()
}
