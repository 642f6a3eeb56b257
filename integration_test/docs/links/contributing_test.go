package links_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var (
	mapRow  = regexp.MustCompile("(?m)^\\| [^|]* \\| `([^`]+)` \\|$")
	wordRow = regexp.MustCompile(`(?m)^\| [a-z, ]+ \| [^|]* \| [^|]*\|$`)
)

// TestContributing promises that CONTRIBUTING.md names a file that exists for each of at most 20 changes, and has a glossary of at most 30
// words.
func TestContributing(t *testing.T) {
	t.Parallel()
	text := pages(t, "CONTRIBUTING.md")[filepath.Join(root, "CONTRIBUTING.md")]
	_, where, found := strings.Cut(text, "| change | begin in |\n")
	require.True(t, found)
	where, _, _ = strings.Cut(where, "\n\n")
	rows := mapRow.FindAllStringSubmatch(where+"\n", -1)
	require.Len(t, rows, strings.Count(where, "\n"), "each row names one file")
	require.LessOrEqual(t, len(rows), 20)
	for _, row := range rows {
		_, err := os.Stat(filepath.Join(root, row[1]))
		require.NoError(t, err)
	}

	_, glossary, found := strings.Cut(text, "| word | meaning | not |\n")
	require.True(t, found)
	glossary, _, _ = strings.Cut(glossary, "\n\n")
	words := wordRow.FindAllString(glossary+"\n", -1)
	require.Len(t, words, strings.Count(glossary, "\n"))
	require.LessOrEqual(t, len(words), 30)
}
