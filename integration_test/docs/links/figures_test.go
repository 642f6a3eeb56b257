package links_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var (
	toFigures = regexp.MustCompile(`BENCHMARKS\.md(#[\w-]+)?`)
	mdTarget  = regexp.MustCompile(`\]\([^)\s]+\)`)
	figure    = regexp.MustCompile(`\d[\d,]*(?:\.\d+)?`)
	comment   = regexp.MustCompile(`(?m)^\s*// ?(.*)$`)

	// measured is how pages and comments write figures that only a benchmark can know.
	measured = regexp.MustCompile(`\d times (?:as|the|a bare|those|slower|faster)\b|\d x (?:a|the)\b|\d (?:ns|µs)\b|\b0\.\d+ ms\b|\bp(?:50|99)\b|\d attempts\b`)
)

// TestFiguresAgree promises that each figure beside a link to BENCHMARKS.md stands in the section that the link names,
// perhaps with more digits, and that a figure which must have been measured has such a link.
func TestFiguresAgree(t *testing.T) {
	t.Parallel()
	source := sections(t)
	quoted := 0
	for where, paragraphs := range prose(t) {
		for _, paragraph := range paragraphs {
			links := toFigures.FindAllStringSubmatch(paragraph, -1)
			text := mdCode.ReplaceAllString(mdTarget.ReplaceAllString(paragraph, "]"), "")
			if len(links) == 0 {
				require.NotRegexp(t, measured, text, "%s quotes a figure and doesn't say where BENCHMARKS.md has it", where)
				continue
			}
			var known []string
			for _, link := range links {
				require.Contains(t, source, link[1], where)
				known = append(known, source[link[1]]...)
			}
			for _, quote := range figure.FindAllString(toFigures.ReplaceAllString(text, ""), -1) {
				quoted++
				if !slices.ContainsFunc(known, func(f string) bool { return rounds(f, quote) }) {
					t.Errorf("%s quotes %s, which BENCHMARKS.md doesn't have in %q:\n%s", where, quote, links, paragraph)
				}
			}
		}
	}
	require.Greater(t, quoted, 20)
}

// rounds reports whether a figure, written with as few digits as the quote, is the quote. One digit must be the figure,
// because almost every section has one that rounds to it.
func rounds(f, quote string) bool {
	f, quote = strings.ReplaceAll(f, ",", ""), strings.ReplaceAll(quote, ",", "")
	if len(quote) == 1 {
		return f == quote
	}
	_, decimals, _ := strings.Cut(quote, ".")
	value, err := strconv.ParseFloat(f, 64)
	return err == nil && strconv.FormatFloat(value, 'f', len(decimals), 64) == quote
}

// sections returns the figures below each heading of BENCHMARKS.md by its anchor. A link without an anchor has none.
func sections(t *testing.T) map[string][]string {
	t.Helper()
	page := pages(t, "BENCHMARKS.md")[filepath.Join(root, "BENCHMARKS.md")]
	sections := map[string][]string{"": nil}
	for _, section := range strings.Split(page, "\n## ")[1:] {
		heading, text, _ := strings.Cut(section, "\n")
		anchor := strings.ReplaceAll(unspoken.ReplaceAllString(strings.ToLower(heading), ""), " ", "-")
		sections["#"+anchor] = figure.FindAllString(text, -1)
	}
	return sections
}

// prose returns the paragraphs of all pages but BENCHMARKS.md, and of the comments in Go outside tests.
func prose(t *testing.T) map[string][]string {
	t.Helper()
	paragraphs := map[string][]string{}
	for path, text := range pages(t, "README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/*.md", "examples/*.md") {
		paragraphs[path] = strings.Split(fenced.ReplaceAllString(text, ""), "\n\n")
	}
	require.NoError(t, filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir() && slices.Contains([]string{".git", "bench", "testdata", "node_modules"}, entry.Name()):
			return filepath.SkipDir
		case entry.IsDir() || filepath.Ext(path) != ".go" || strings.HasSuffix(path, "_test.go"):
			return nil
		}
		source, err := os.ReadFile(path)
		paragraphs[path] = comments(string(source))
		return err
	}))
	return paragraphs
}

// comments returns the paragraphs of a Go file's comments.
func comments(source string) []string {
	var text strings.Builder
	for line := range strings.Lines(source) {
		if found := comment.FindStringSubmatch(strings.TrimRight(line, "\n")); found != nil {
			text.WriteString(found[1])
		}
		text.WriteString("\n")
	}
	return strings.Split(text.String(), "\n\n")
}
