package main

import (
	"fmt"
	"go/ast"
	"go/token"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// A number is one of those that the program prints. Its items are the things counted, with their places.
type number struct {
	name  string
	value int
	items []item
}

// An item is a part of a number: a file with the count of its lines, or one branch.
type item struct {
	file string
	line int // 0 for the whole file
	text string
	size int
}

func (i item) String() string {
	where := i.file
	if i.line > 0 {
		where = fmt.Sprintf("%s:%d", i.file, i.line)
	}
	if i.text == "" {
		return fmt.Sprintf("%s  %d", where, i.size)
	}
	return where + "  " + i.text
}

// numbers are collected by name.
type numbers map[string]*number

// define adds a number that may stay 0.
func (n numbers) define(name string) *number {
	if n[name] == nil {
		n[name] = &number{name: name}
	}
	return n[name]
}

func (n numbers) add(name string, i item) {
	of := n.define(name)
	of.value += i.size
	of.items = append(of.items, i)
}

// sorted returns the numbers in the order of their names.
func (n numbers) sorted() (list []*number) {
	for _, of := range n {
		list = append(list, of)
	}
	slices.SortFunc(list, func(a, b *number) int { return strings.Compare(a.name, b.name) })
	return list
}

// measure counts everything that needs no server.
func measure(t *tree) numbers {
	n := numbers{}
	for _, receiver := range receivers() {
		n.define("methods/" + receiver)
		n.define("methods/" + receiver + "/exported")
	}
	n.define("core/branches")
	for _, m := range mechanisms() {
		n.define("branches/" + m.name)
	}
	for i := range t.files {
		f := &t.files[i]
		countPackage(n, t, f)
		countStatements(n, t, f)
		if f.isSource() && f.isCore() {
			countMethods(n, t, f)
			countBranches(n, t, f)
		}
	}
	return n
}

// receivers returns the types of the core whose methods are counted.
func receivers() []string { return []string{"Limiter", "Session", "Terms"} }

// countPackage counts the lines, the file and the exported names of a Go file, for its package and for the core. Tests
// are left out.
func countPackage(n numbers, t *tree, f *file) {
	if !f.isSource() {
		return
	}
	add := func(what string, i item) {
		n.add("package/"+f.dir()+"/"+what, i)
		if f.isCore() {
			n.add("core/"+what, i)
		}
	}
	add("lines", item{file: f.path, size: strings.Count(f.text, "\n")})
	add("files", item{file: f.path, size: 1})
	n.define("package/" + f.dir() + "/exported")
	for _, name := range exported(f.ast) {
		add("exported", item{file: f.path, line: t.line(name.pos), text: name.text, size: 1})
	}
}

type exportedName struct {
	text string
	pos  token.Pos
}

// exported returns the exported constants, variables, types and functions of a file, and the exported methods of its
// exported types.
func exported(f *ast.File) (names []exportedName) {
	add := func(prefix string, ident *ast.Ident) {
		if ident.IsExported() {
			names = append(names, exportedName{prefix + ident.Name, ident.Pos()})
		}
	}
	for _, declaration := range f.Decls {
		switch d := declaration.(type) {
		case *ast.FuncDecl:
			if receiver := receiverOf(d); receiver == "" {
				add("", d.Name)
			} else if ast.IsExported(receiver) {
				add(receiver+".", d.Name)
			}
		case *ast.GenDecl:
			for _, spec := range d.Specs {
				switch s := spec.(type) {
				case *ast.TypeSpec:
					add("", s.Name)
				case *ast.ValueSpec:
					for _, ident := range s.Names {
						add("", ident)
					}
				}
			}
		}
	}
	return names
}

// receiverOf returns the name of the type of a method; "" of a function.
func receiverOf(f *ast.FuncDecl) string {
	if f.Recv == nil {
		return ""
	}
	receiver := f.Recv.List[0].Type
	for {
		switch t := receiver.(type) {
		case *ast.StarExpr:
			receiver = t.X
		case *ast.IndexExpr: // a generic type
			receiver = t.X
		case *ast.IndexListExpr:
			receiver = t.X
		case *ast.Ident:
			return t.Name
		default:
			return ""
		}
	}
}

// countMethods counts the methods of the receivers.
func countMethods(n numbers, t *tree, f *file) {
	for _, declaration := range f.ast.Decls {
		d, ok := declaration.(*ast.FuncDecl)
		if !ok || !slices.Contains(receivers(), receiverOf(d)) {
			continue
		}
		i := item{file: f.path, line: t.line(d.Pos()), text: receiverOf(d) + "." + d.Name.Name, size: 1}
		n.add("methods/"+receiverOf(d), i)
		if d.Name.IsExported() {
			n.add("methods/"+receiverOf(d)+"/exported", i)
		}
	}
}

// countStatements counts SQL files, and the strings of Go files that begin like a statement. Templates and tests are
// left out. The statements in a directory called sql belong to the package around it.
func countStatements(n numbers, t *tree, f *file) {
	add := func(i item) {
		n.add("package/"+f.owner()+"/sql", i)
		if f.isCore() {
			n.add("core/sql", i)
		}
	}
	switch {
	case path.Ext(f.path) == ".sql":
		add(item{file: f.path, size: 1})
	case f.isSource() && !f.generated:
		begin := regexp.MustCompile(`^\s*(SELECT|INSERT INTO|UPDATE|DELETE FROM|WITH|CREATE|DROP|ALTER|LOCK)\s`)
		ast.Inspect(f.ast, func(node ast.Node) bool {
			literal, ok := node.(*ast.BasicLit)
			if !ok || literal.Kind != token.STRING {
				return true
			}
			if text, err := strconv.Unquote(literal.Value); err == nil && begin.MatchString(text) {
				first, _, _ := strings.Cut(strings.TrimSpace(text), "\n")
				add(item{file: f.path, line: t.line(literal.Pos()), text: first, size: 1})
			}
			return true
		})
	}
}
