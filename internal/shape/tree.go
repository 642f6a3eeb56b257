package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// A tree is a checkout of the repository, read and parsed. Directories whose names begin with a dot or an underscore,
// testdata and node_modules are left out.
type tree struct {
	set   *token.FileSet
	files []file // sorted by path
}

// A file is a source file. Its path is relative to the root, with slashes.
type file struct {
	path, text string
	ast        *ast.File // nil unless it is Go
	generated  bool      // Go that a program wrote
}

func (f *file) dir() string    { return path.Dir(f.path) }
func (f *file) isGo() bool     { return f.ast != nil }
func (f *file) isTest() bool   { return strings.HasSuffix(f.path, "_test.go") }
func (f *file) isSource() bool { return f.isGo() && !f.isTest() }
func (f *file) isCore() bool   { return slices.Contains(core(), f.owner()) }

// owner returns the directory of the package that a file belongs to: statements are in its directory sql.
func (f *file) owner() string {
	dir := strings.TrimSuffix(f.dir(), "/tmpl")
	return strings.TrimSuffix(dir, "/sql")
}

// core returns the directories of the packages in which calls are decided.
func core() []string {
	return []string{"internal/batch", "internal/bucket", "internal/store", "ratelimit"}
}

// readTree reads the Go files and SQL files below root.
func readTree(root string) (*tree, error) {
	t := &tree{set: token.NewFileSet()}
	err := filepath.WalkDir(root, func(name string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() {
			if name != root && isLeftOut(entry.Name()) {
				return filepath.SkipDir
			}
			return nil
		}
		relative, err := filepath.Rel(root, name)
		if err != nil {
			return err
		}
		return t.read(name, filepath.ToSlash(relative))
	})
	if err == nil && len(t.files) == 0 {
		err = fmt.Errorf("%s has no source files", root)
	}
	slices.SortFunc(t.files, func(a, b file) int { return strings.Compare(a.path, b.path) })
	return t, err
}

func isLeftOut(directory string) bool {
	return strings.HasPrefix(directory, ".") || strings.HasPrefix(directory, "_") || directory == "testdata" ||
		directory == "node_modules"
}

func (t *tree) read(name, relative string) error {
	extension := path.Ext(relative)
	if !slices.Contains([]string{".go", ".sql"}, extension) {
		return nil
	}
	text, err := os.ReadFile(name)
	if err != nil {
		return err
	}
	f := file{path: relative, text: string(text)}
	if extension == ".go" {
		if f.ast, err = parser.ParseFile(t.set, relative, text,
			parser.ParseComments|parser.SkipObjectResolution); err != nil {
			return err
		}
		f.generated = ast.IsGenerated(f.ast)
	}
	t.files = append(t.files, f)
	return nil
}

// line returns the number of the line at pos.
func (t *tree) line(pos token.Pos) int { return t.set.Position(pos).Line }
