package golden_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// otherWords matches names of other projects, and what a word means there.
var otherWords = regexp.MustCompile(`denial-of-service|KeyByEndpoint|endpoint:<route>|endpoint\s+is\s+route`)

// TestWords checks that texts for users have the words of the glossary in CONTRIBUTING.md, and not other words for the same things.
// It checks the documentation of public packages, the pages, tables, the help and JSON of the command, and metrics.
func TestWords(t *testing.T) {
	t.Parallel()
	var files []string
	for _, pattern := range []string{
		"internal/golden/testdata/doc/*.txt", "README.md", "docs/*.md", "migrations/*.sql", "cmd/ratelimit/internal/cli/testdata/help/*.txt",
		"cmd/ratelimit/internal/cli/testdata/json.txt", "httplimit/testdata/*.txt", "otellimit/testdata/metrics.txt", "promlimit/testdata/metrics.txt",
	} {
		found, err := filepath.Glob(filepath.Join(root, pattern))
		require.NoError(t, err)
		require.NotEmpty(t, found, pattern)
		files = append(files, found...)
	}
	for use, not := range map[string]*regexp.Regexp{
		"refusal":     regexp.MustCompile(`(?i)denials?\b|\bden(y|ies|ied)\b|denycache`),
		"credit":      regexp.MustCompile(`(?i)refund`),
		"kind":        regexp.MustCompile(`(?i)\balgorithm[=,}]`),
		"shadow":      regexp.MustCompile(`(?i)\bon trial\b|\bas a trial\b`),
		"prefetch":    regexp.MustCompile(`(?i)taken ahead`),
		"reservation": regexp.MustCompile(`(?i)\ballowances?\b`),
		"owed":        regexp.MustCompile(`(?i)debts?\b`),
		"route":       regexp.MustCompile(`(?i)\bendpoints?\b`),
		"override":    regexp.MustCompile(`(?i)\bexceptions? (for|of) (a |the |one |single )?keys?\b`),
		"ruling":      regexp.MustCompile(`(?i)\bcompiled rules?\b|\bratelimit\.(New)?Rule\b`),
	} {
		for _, file := range files {
			text, err := os.ReadFile(file)
			require.NoError(t, err)
			if use == "route" && strings.HasSuffix(file, "docs/recipes.md") {
				continue // webhooks have endpoints
			}
			kept := otherWords.ReplaceAllString(string(text), "")
			require.Empty(t, not.FindAllString(kept, -1), "%s: write %q", file, use)
		}
	}
}
