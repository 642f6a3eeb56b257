package links_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
)

// TestLinesFit promises that no line of a page has more than 120 characters, also in tables.
func TestLinesFit(t *testing.T) {
	t.Parallel()
	for _, pattern := range []string{"../../../*.md", "../../../docs/*.md", "../../../examples/*.md"} {
		pages, err := filepath.Glob(pattern)
		require.NoError(t, err)
		require.NotEmpty(t, pages)
		for _, page := range pages {
			if filepath.Base(page) == "BENCHMARKS.md" { // it shows what a program prints
				continue
			}
			text, err := os.ReadFile(page)
			require.NoError(t, err)
			number := 0
			for line := range strings.Lines(string(text)) {
				number++
				if n := utf8.RuneCountInString(strings.TrimSuffix(line, "\n")); n > 120 {
					t.Errorf("%s:%d has %d characters", page, number, n)
				}
			}
		}
	}
}
