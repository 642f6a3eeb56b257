package links_test

import (
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var (
	inlineCode = regexp.MustCompile("`([^`\n]+)`")
	fenced     = regexp.MustCompile("(?s)```.*?```")
	nameOf     = regexp.MustCompile(`\w+`)
	twoWords   = regexp.MustCompile(`\b[A-Z][a-z0-9]+[A-Z]\w*`) // an exported name as RetryAfter is
	qualified  = regexp.MustCompile(`\b([a-z]+)\.([A-Z]\w*)`)
)

// foreign are names in pages that other projects export.
var foreign = []string{
	"ConnConfig", "DeadlineDelay", "DefaultQueryExecMode", "OnNotice", "OnPgError", // pgx
	"FetchPollInterval", "MaxWorkers", "PollOnly", "ReadTimeout", // River and net/http
}

// TestPagesNamePublicAPI promises that each exported name in the text of a page is in the documentation of a public package. A name
// such as rules.Store must be in the documentation of rules. The test skips pages for contributors and names of other limiters.
func TestPagesNamePublicAPI(t *testing.T) {
	t.Parallel()
	names, packages := map[string]bool{}, map[string]map[string]bool{}
	for file, text := range pages(t, "internal/golden/testdata/doc/*.txt") {
		of := map[string]bool{}
		for _, name := range nameOf.FindAllString(text, -1) {
			of[name] = true
		}
		maps.Copy(names, of)
		packages[strings.TrimSuffix(filepath.Base(file), ".txt")] = of
	}
	for page, text := range pages(t, "docs/*.md", "README.md", "SECURITY.md", "CHANGELOG.md") {
		base := filepath.Base(page)
		if base == "architecture.md" || base == "reliability.md" {
			continue
		}
		for _, code := range inlineCode.FindAllStringSubmatch(fenced.ReplaceAllString(text, ""), -1) {
			if strings.HasPrefix(code[1], "go test") || strings.HasPrefix(code[1], "Test") {
				continue
			}
			for _, name := range qualified.FindAllStringSubmatch(code[1], -1) {
				if of := packages[name[1]]; of != nil && !of[name[2]] {
					t.Errorf("%s names %s, which package %s does not export", base, name[0], name[1])
				}
			}
			for _, name := range twoWords.FindAllString(code[1], -1) {
				if base != "migrating.md" && !names[name] && !slices.Contains(foreign, name) {
					t.Errorf("%s names %s, which no package exports", base, name)
				}
			}
		}
	}
}
