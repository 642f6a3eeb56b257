package links_test

import (
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
	for _, text := range pages(t, "integration_test/docs/*_test.go", "integration_test/http/*_test.go", "admin/*_test.go", "admin/playground/*_test.go", "examples/*/*.go") {
		source.WriteString(lineIndent.ReplaceAllString(text, ""))
	}
	blocks := 0
	for page, text := range pages(t, "docs/*.md", "README.md") {
		if filepath.Base(page) == "testing.md" {
			continue
		}
		for _, block := range goBlock.FindAllStringSubmatch(text, -1) {
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
