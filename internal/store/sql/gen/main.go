// Command gen writes the SQL statements from their templates. It is run by
//
//	go generate ./internal/store
//
// Each statement sql/x.sql has a template sql/tmpl/x.sql.tmpl, which names the expressions of sql/tmpl/algebra.sql.tmpl
// instead of repeating them. The statements are committed as they run, to be read and explained.
package main

import (
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"text/template"
)

// algebra is the template that defines the expressions. It is no statement.
const algebra = "algebra.sql.tmpl"

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: gen directory-of-the-statements...")
		os.Exit(2)
	}
	for _, dir := range os.Args[1:] {
		if err := write(os.Args[1], dir); err != nil {
			fmt.Fprintln(os.Stderr, "gen:", err)
			os.Exit(1)
		}
	}
}

// write renders the templates in dir/tmpl to dir, by the algebra in first/tmpl.
func write(first, dir string) error {
	statements, err := render(os.DirFS(filepath.Join(first, "tmpl")), os.DirFS(filepath.Join(dir, "tmpl")))
	if err != nil {
		return err
	}
	for name, text := range statements {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// render returns the statement that each template gives, by the name of its file.
func render(first, templates fs.FS) (map[string]string, error) {
	macros, err := readMacros(first)
	if err != nil {
		return nil, err
	}
	all := template.New("").Option("missingkey=error").Funcs(macros.funcs())
	if all, err = all.ParseFS(first, algebra); err != nil {
		return nil, err
	}
	if all, err = all.ParseFS(templates, "*.sql.tmpl"); err != nil {
		return nil, err
	}
	names, err := fs.Glob(templates, "*.sql.tmpl")
	if err != nil {
		return nil, err
	}
	statements := make(map[string]string)
	for _, name := range names {
		if name == algebra {
			continue
		}
		var text strings.Builder
		if err := all.ExecuteTemplate(&text, name, ""); err != nil {
			return nil, err
		}
		statements[strings.TrimSuffix(name, ".tmpl")] = text.String()
	}
	return statements, nil
}

// macros are the expressions of the algebra.
type macros struct{ *template.Template }

func readMacros(templates fs.FS) (macros, error) {
	parsed, err := template.New("").Option("missingkey=error").ParseFS(templates, algebra)
	return macros{parsed}, err
}

// names returns the name of each expression.
func (m macros) names() (names []string) {
	for _, t := range m.Templates() {
		if t.Name() != algebra {
			names = append(names, t.Name())
		}
	}
	return names
}

// expand returns the expression of that name for some arguments.
func (m macros) expand(name string, arguments map[string]string) (string, error) {
	var text strings.Builder
	err := m.ExecuteTemplate(&text, name, arguments)
	return text.String(), err
}

// funcs returns what a template can call: each expression, and args and columns, which make arguments for it.
func (m macros) funcs() template.FuncMap {
	funcs := template.FuncMap{"args": args, "columns": columns}
	for _, name := range m.names() {
		funcs[name] = func(arguments ...any) (string, error) {
			named, err := args(arguments...)
			if err != nil {
				return "", err
			}
			return m.expand(name, named)
		}
	}
	return funcs
}

// args returns named arguments. Each of those it is given is name=value, or several that args has returned; the last of
// one name counts.
func args(arguments ...any) (map[string]string, error) {
	named := make(map[string]string)
	for _, argument := range arguments {
		switch a := argument.(type) {
		case map[string]string:
			maps.Copy(named, a)
		case string:
			name, value, found := strings.Cut(a, "=")
			if !found {
				return nil, fmt.Errorf("argument %q is not name=value", a)
			}
			named[name] = value
		default:
			return nil, fmt.Errorf("argument %v is neither name=value nor what args returned", a)
		}
	}
	return named, nil
}

// columns returns the terms of a policy that are columns of a row of that name.
func columns(row string) map[string]string {
	return map[string]string{
		"capacity": row + ".capacity", "rate": row + ".rate", "step": row + ".step_us", "steps": row + ".steps",
		"phase": row + ".phase_us", "tolerance": row + ".tolerance_us",
		"since": row + ".since_us", "until": row + ".until_us",
	}
}
