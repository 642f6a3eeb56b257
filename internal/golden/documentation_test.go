package golden_test

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/doc"
	"go/parser"
	"go/printer"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/golden"
)

const module = "github.com/pgratelimit/pgratelimit"

// private matches directories without public packages.
var private = regexp.MustCompile(`^([._].*|internal|testdata|node_modules)$`)

// root is this checkout.
var root = filepath.Join("..", "..")

// TestDocumentation compares the documentation of each public package, as go doc -all has it, with testdata/doc.
func TestDocumentation(t *testing.T) {
	t.Parallel()
	texts := map[string]string{}
	for directory, files := range packages(t) {
		if text := documentation(t, directory, files); text != "" {
			texts[strings.ReplaceAll(directory, "/", "-")+".txt"] = text
		}
	}
	require.Contains(t, texts, "ratelimit.txt")
	golden.Directory(t, "doc", texts)
}

// packages returns the names of the Go files of each directory that another module can import, without tests.
func packages(t *testing.T) map[string][]string {
	t.Helper()
	files := map[string][]string{}
	err := filepath.WalkDir(root, func(name string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		relative, err := filepath.Rel(root, name)
		if err != nil {
			return err
		}
		relative = filepath.ToSlash(relative)
		switch {
		case !entry.IsDir():
			if strings.HasSuffix(name, ".go") && !strings.HasSuffix(name, "_test.go") {
				files[path.Dir(relative)] = append(files[path.Dir(relative)], name)
			}
		case relative != "." && private.MatchString(entry.Name()), relative == "bench", relative == "examples", relative == "integration_test":
			return filepath.SkipDir
		}
		return nil
	})
	require.NoError(t, err)
	return files
}

// documentation returns the comment of a package, and each exported declaration with its comment; nothing of a program.
func documentation(t *testing.T, directory string, names []string) string {
	t.Helper()
	set := token.NewFileSet()
	var files []*ast.File
	for _, name := range names {
		source, err := os.ReadFile(name)
		require.NoError(t, err)
		file, err := parser.ParseFile(set, name, source, parser.ParseComments)
		require.NoError(t, err)
		if file.Name.Name == "main" {
			return ""
		}
		files = append(files, file)
	}
	p, err := doc.NewFromFiles(set, files, module+"/"+directory)
	require.NoError(t, err)
	var out bytes.Buffer
	fmt.Fprintf(&out, "package %s // import %q\n\n%s\n", p.Name, p.ImportPath, p.Text(p.Doc))
	// declare writes a declaration, with the comments of its fields, and its own comment, indented, below.
	declare := func(declaration ast.Decl, comment string) {
		switch d := declaration.(type) {
		case *ast.FuncDecl:
			d.Doc, d.Body = nil, nil
		case *ast.GenDecl:
			d.Doc = nil
		}
		config := printer.Config{Mode: printer.UseSpaces | printer.TabIndent, Tabwidth: 8}
		require.NoError(t, config.Fprint(&out, set, declaration))
		out.WriteString("\n")
		for line := range strings.Lines(string(p.Text(comment))) {
			if strings.TrimSpace(line) != "" {
				line = "    " + line
			}
			out.WriteString(line)
		}
		out.WriteString("\n")
	}
	all := func(values []*doc.Value, functions []*doc.Func) {
		for _, v := range values {
			declare(v.Decl, v.Doc)
		}
		for _, f := range functions {
			declare(f.Decl, f.Doc)
		}
	}
	all(slices.Concat(p.Consts, p.Vars), p.Funcs)
	for _, typ := range p.Types {
		declare(typ.Decl, typ.Doc)
		all(slices.Concat(typ.Consts, typ.Vars), slices.Concat(typ.Funcs, typ.Methods))
	}
	return strings.TrimRight(out.String(), "\n") + "\n"
}

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
