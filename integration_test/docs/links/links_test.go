package links_test

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
)

var (
	mdLink     = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	mdHeading  = regexp.MustCompile(`(?m)^#+ (.*)$`)
	pageOfDocs = regexp.MustCompile(`docs/[a-z]+\.md`)
	mdCode     = regexp.MustCompile("(?s)```.*?```|`[^`\n]*`")
	unspoken   = regexp.MustCompile(`[^\p{L}\p{N} _-]`)
)

const root = "../../.."

// pages returns the texts of the files that patterns match, by their paths.
func pages(t *testing.T, patterns ...string) map[string]string {
	t.Helper()
	texts := map[string]string{}
	for _, pattern := range patterns {
		paths, err := filepath.Glob(filepath.Join(root, pattern))
		require.NoError(t, err)
		require.NotEmpty(t, paths, pattern)
		for _, path := range paths {
			text, err := os.ReadFile(path)
			require.NoError(t, err)
			texts[path] = string(text)
		}
	}
	return texts
}

// TestLinksLeadSomewhere promises that every page's links into the repository lead to existing files and headings.
func TestLinksLeadSomewhere(t *testing.T) {
	t.Parallel()
	for page, text := range pages(t, "*.md", "*/*.md", "*/*/*.md") {
		require.NotRegexp(t, `(?m)^(<<<<<<<|>>>>>>>) `, text, "%s has the marks of a merge", page)
		for _, link := range mdLink.FindAllStringSubmatch(mdCode.ReplaceAllString(text, ""), -1) {
			if strings.Contains(link[1], "://") || strings.HasPrefix(link[1], "mailto:") {
				continue
			}
			path, heading, _ := strings.Cut(link[1], "#")
			target := page
			if path != "" {
				target = filepath.Join(filepath.Dir(page), path)
			}
			if _, err := os.Stat(target); err != nil {
				t.Errorf("%s links to %s, which is not there", page, link[1])
				continue
			}
			if heading != "" && !hasHeading(t, target, heading) {
				t.Errorf("%s links to %s, and there is no such heading", page, link[1])
			}
		}
	}
}

// TestCodeNamesPagesOfTheRepository promises that each page of docs that a comment or a message names is there.
func TestCodeNamesPagesOfTheRepository(t *testing.T) {
	t.Parallel()
	named := 0
	require.NoError(t, filepath.WalkDir(root, func(path string, entry os.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir() && slices.Contains([]string{".git", "node_modules", "shape"}, entry.Name()): // shape has a page of its tests' own
			return filepath.SkipDir
		case entry.IsDir() || !slices.Contains([]string{".go", ".sql", ".js", ".html", ".tmpl"}, filepath.Ext(path)):
			return nil
		}
		text, err := os.ReadFile(path)
		for _, page := range pageOfDocs.FindAllString(string(text), -1) {
			named++
			if _, err := os.Stat(filepath.Join(root, page)); err != nil {
				t.Errorf("%s names %s, which is not there", path, page)
			}
		}
		return err
	}))
	require.Positive(t, named)
}

// hasHeading reports whether a page has a heading with that anchor.
func hasHeading(t *testing.T, page, anchor string) bool {
	t.Helper()
	text, err := os.ReadFile(page)
	require.NoError(t, err)
	for _, heading := range mdHeading.FindAllStringSubmatch(string(text), -1) {
		words := unspoken.ReplaceAllString(strings.ToLower(strings.TrimSpace(heading[1])), "")
		if strings.ReplaceAll(words, " ", "-") == anchor {
			return true
		}
	}
	return false
}

// TestLinesFit promises that no line of a page has more than 120 characters, also in tables.
func TestLinesFit(t *testing.T) {
	t.Parallel()
	for page, text := range pages(t, "*.md", "docs/*.md", "examples/*.md") {
		if filepath.Base(page) == "BENCHMARKS.md" { // it shows what a program prints
			continue
		}
		number := 0
		for line := range strings.Lines(text) {
			number++
			if n := utf8.RuneCountInString(strings.TrimSuffix(line, "\n")); n > 120 {
				t.Errorf("%s:%d has %d characters", page, number, n)
			}
		}
	}
}
