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
	goBlock    = regexp.MustCompile("(?s)```go\n(.*?)```")
	lineIndent = regexp.MustCompile(`(?m)^\t+`)
)

// TestBlocksAreRun promises that each part of a block of Go between blank lines is in a test that runs it, or in a program of examples. The
// package of docs/testing.md compares it line by line (TestGuide of ratelimittest, TestTestingGuide of integration_test/driver).
func TestBlocksAreRun(t *testing.T) {
	t.Parallel()
	var source strings.Builder
	for _, pattern := range []string{"../*_test.go", "../../http/*_test.go", "../../../admin/*_test.go", "../../../admin/playground/*_test.go", "../../../examples/*/*.go"} {
		files, err := filepath.Glob(pattern)
		require.NoError(t, err)
		require.NotEmpty(t, files, pattern)
		for _, file := range files {
			text, err := os.ReadFile(file)
			require.NoError(t, err)
			source.WriteString(lineIndent.ReplaceAllString(string(text), ""))
		}
	}
	pages, err := filepath.Glob("../../../docs/*.md")
	require.NoError(t, err)
	blocks := 0
	for _, page := range append(pages, "../../../README.md") {
		if filepath.Base(page) == "testing.md" {
			continue
		}
		text, err := os.ReadFile(page)
		require.NoError(t, err)
		for _, block := range goBlock.FindAllStringSubmatch(string(text), -1) {
			blocks++
			for part := range strings.SplitSeq(strings.TrimSpace(block[1]), "\n\n") {
				if !strings.Contains(source.String(), lineIndent.ReplaceAllString(part, "")+"\n") {
					t.Errorf("%s shows code that no test runs:\n%s", page, part)
				}
			}
		}
	}
	require.Greater(t, blocks, 40)
}
