package links_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// reliabilityEntries is the number of entries of docs/reliability.md.
const reliabilityEntries = 45

var (
	reliabilityEntry = regexp.MustCompile(`(?m)^(\d+)\. (.*(?:\n +.*)*)`)
	reliabilityTest  = regexp.MustCompile("`([a-z0-9/_]+) ((?:Test|Fuzz)[A-Za-z0-9_]*)((?:/[^` ]+)?)`")
	namesATest       = regexp.MustCompile(`\b(?:Test|Fuzz)[A-Z]`)
)

// TestReliabilityNamesTests promises that the entries of docs/reliability.md are numbered in order, that each names a test, and that each
// of these tests is in the directory that the entry names.
func TestReliabilityNamesTests(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../../docs/reliability.md")
	require.NoError(t, err)
	packages := map[string]*testsOf{}
	entries := reliabilityEntry.FindAllStringSubmatch(string(text), -1)
	require.Len(t, entries, reliabilityEntries)
	for i, entry := range entries {
		number := entry[1]
		require.Equal(t, strconv.Itoa(i+1), number)
		named := reliabilityTest.FindAllStringSubmatch(entry[2], -1)
		if len(named) == 0 {
			t.Errorf("entry %s names no test", number)
		}
		if len(named) != len(namesATest.FindAllString(entry[2], -1)) {
			t.Errorf("entry %s names a test otherwise than by `directory TestName`", number)
		}
		for _, test := range named {
			directory, name, part := test[1], test[2], strings.TrimPrefix(test[3], "/")
			if packages[directory] == nil {
				packages[directory] = testsIn(t, filepath.Join("..", "..", "..", directory))
			}
			if found := packages[directory]; !found.functions[name] || part != "" && !found.texts[part] {
				t.Errorf("entry %s names %s, which is not in %s", number, name+test[3], directory)
			}
		}
	}
}

// testsOf are the tests of a package, and the texts in them, of which some are the names of parts.
type testsOf struct{ functions, texts map[string]bool }

// testsIn parses the tests of a directory.
func testsIn(t *testing.T, directory string) *testsOf {
	t.Helper()
	found := &testsOf{functions: map[string]bool{}, texts: map[string]bool{}}
	files, err := filepath.Glob(filepath.Join(directory, "*_test.go"))
	require.NoError(t, err)
	for _, file := range files {
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
		require.NoError(t, err)
		ast.Inspect(parsed, func(node ast.Node) bool {
			switch n := node.(type) {
			case *ast.FuncDecl:
				if n.Recv == nil {
					found.functions[n.Name.Name] = true
				}
			case *ast.BasicLit:
				if n.Kind == token.STRING {
					text, err := strconv.Unquote(n.Value)
					require.NoError(t, err)
					found.texts[text] = true
				}
			}
			return true
		})
	}
	return found
}
