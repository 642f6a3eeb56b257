package links_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
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

// TestNoLinkIsBroken promises that every page's links into the repository lead to existing files and headings.
func TestNoLinkIsBroken(t *testing.T) {
	t.Parallel()
	for page, text := range pages(t, "*.md", "*/*.md") {
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
		case entry.IsDir() && slices.Contains([]string{".git", "node_modules"}, entry.Name()):
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

var (
	goBlock    = regexp.MustCompile("(?s)```go\n(.*?)```")
	lineIndent = regexp.MustCompile(`(?m)^\t+`)
)

// TestBlocksAreRun promises that each part of a block of Go between blank lines is in a test that runs it, or in a
// program of examples. The package of docs/testing.md compares it line by line (TestGuide of ratelimittest,
// TestTestingGuide of integration_test/driver).
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
	require.Greater(t, blocks, 30)
}

var placeRow = regexp.MustCompile("(?m)^\\| [^|]* \\| `([^`]+)` \\| (`[^|]+`) \\|$")

// TestArchitecture promises that docs/architecture.md names, for each change, a file that exists and directories that
// have tests.
func TestArchitecture(t *testing.T) {
	t.Parallel()
	text := pages(t, "docs/architecture.md")[filepath.Join(root, "docs/architecture.md")]
	_, where, found := strings.Cut(text, "| change | begin in | guarded by |\n| --- | --- | --- |\n")
	require.True(t, found)
	where, _, _ = strings.Cut(where, "\n\n")
	rows := placeRow.FindAllStringSubmatch(where+"\n", -1)
	require.Len(t, rows, strings.Count(where, "\n")+1, "each row names one file, and tests")
	for _, row := range rows {
		_, err := os.Stat(filepath.Join(root, row[1]))
		require.NoError(t, err)
		for _, directory := range strings.Split(row[2], ", ") {
			pages(t, strings.Trim(directory, "`")+"/*_test.go")
		}
	}
}

var (
	inlineCode = regexp.MustCompile("`([^`\n]+)`")
	fenced     = regexp.MustCompile("(?s)```.*?```")
	twoWords   = regexp.MustCompile(`\b[A-Z][a-z0-9]+[A-Z]\w*`) // an exported name as RetryAfter is
	qualified  = regexp.MustCompile(`\b([a-z]+)\.([A-Z]\w*)`)
)

// foreign are names in pages that other projects export.
var foreign = []string{
	"ConnConfig", "DeadlineDelay", "DefaultQueryExecMode", "OnNotice", "OnPgError", // pgx
	"FetchPollInterval", "MaxWorkers", "PollOnly", "ModifyResponse", "ReadTimeout", "ReverseProxy", "StripPrefix", "JobSnooze", // River and net/http
	"DeadlineExceeded", "WithoutCancel", // context
	"RateLimit", "SendMessage", // a field of HTTP, and a method of an example
}

// declared returns the names in the declarations of each public package: of types, fields, functions and their
// parameters.
func declared(t *testing.T) map[string]map[string]bool {
	t.Helper()
	packages := map[string]map[string]bool{}
	for path, text := range pages(t, "*/*.go", "*/*/*.go", "middleware/httplimit/client/*.go") {
		name := filepath.Base(filepath.Dir(path))
		if strings.HasSuffix(path, "_test.go") || slices.Contains([]string{"bench", "examples", "integration_test"}, name) {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, text, parser.SkipObjectResolution)
		require.NoError(t, err)
		if packages[name] == nil {
			packages[name] = map[string]bool{}
		}
		ast.Inspect(file, func(node ast.Node) bool {
			if ident, ok := node.(*ast.Ident); ok {
				packages[name][ident.Name] = true
			}
			_, isBody := node.(*ast.BlockStmt)
			return !isBody
		})
	}
	return packages
}

// TestPagesNamePublicAPI promises that each exported name in the text of a page is an alert, or declared in a public
// package. A name such as rules.Store must be declared in rules. The test skips pages for contributors and names of
// other limiters.
func TestPagesNamePublicAPI(t *testing.T) {
	t.Parallel()
	names, packages := map[string]bool{}, declared(t)
	for _, of := range packages {
		maps.Copy(names, of)
	}
	for _, text := range pages(t, "observe/promlimit/alerts.yaml") {
		for _, alert := range regexp.MustCompile(`- alert: (\w+)`).FindAllStringSubmatch(text, -1) {
			names[alert[1]] = true
		}
	}
	for page, text := range pages(t, "docs/*.md", "README.md", "SECURITY.md", "CHANGELOG.md") {
		base := filepath.Base(page)
		if base == "architecture.md" {
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

// promised is the number of entries of integration_test/promises.txt.
const promised = 45

// TestPromisesNameTests promises that the entries of integration_test/promises.txt are numbered in order, that each
// names a test, and that each of these tests is in the directory that the entry names.
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

var makeTarget = regexp.MustCompile("(?m)(?:^|`)make ([a-z-]+)")

// TestPagesNameTargets promises that each target of make that a page names is in the Makefile.
func TestPagesNameTargets(t *testing.T) {
	t.Parallel()
	makefile := pages(t, "Makefile")[filepath.Join(root, "Makefile")]
	named := 0
	for page, text := range pages(t, "*.md", "docs/*.md") {
		for _, target := range makeTarget.FindAllStringSubmatch(text, -1) {
			named++
			require.Contains(t, makefile, "\n"+target[1]+":", page)
		}
	}
	require.Positive(t, named)
}
