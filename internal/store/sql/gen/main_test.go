package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestStatementsAreGenerated compares each committed statement with its template.
func TestStatementsAreGenerated(t *testing.T) {
	t.Parallel()
	statements, err := render(os.DirFS("../tmpl"), os.DirFS("../tmpl"))
	require.NoError(t, err)
	for name, text := range statements {
		committed, err := os.ReadFile(filepath.Join("..", name))
		require.NoError(t, err, "run go generate ./internal/store")
		require.Equal(t, text, string(committed), "sql/%s differs from sql/tmpl/%s.tmpl: change the template and run go generate ./internal/store", name, name)
	}
	committed, err := filepath.Glob("../*.sql")
	require.NoError(t, err)
	for _, file := range committed {
		require.Contains(t, statements, filepath.Base(file), "a statement is written in sql/tmpl and made by go generate ./internal/store")
	}
}

// TestTheAlgebraIsWrittenOnce finds templates that spell out an expression of the algebra instead of naming it.
func TestTheAlgebraIsWrittenOnce(t *testing.T) {
	t.Parallel()
	templates := os.DirFS("../tmpl")
	macros, err := readMacros(templates)
	require.NoError(t, err)
	expressions := make(map[string]*regexp.Regexp)
	for _, name := range macros.names() {
		expressions[name] = macros.pattern(t, name)
	}
	statements, err := render(templates, templates)
	require.NoError(t, err)
	used := make(map[string]int)
	for statement, rendered := range statements {
		text, err := os.ReadFile(filepath.Join("../tmpl", statement+".tmpl"))
		require.NoError(t, err)
		for name, expression := range expressions {
			require.NotRegexp(t, expression, squeezed(string(text)), "sql/tmpl/%s.tmpl spells out an expression: write {{%s ..}}, which algebra.sql.tmpl defines", statement, name)
			used[name] += len(expression.FindAllString(squeezed(rendered), -1))
		}
	}
	for name := range expressions { // else the patterns above find nothing
		require.Positive(t, used[name], "no statement has the expression %s", name)
	}
}

// pattern returns what finds the expression in a text without spaces. An argument is a name, a parameter or, in a
// template, another expression.
func (m macros) pattern(t *testing.T, expression string) *regexp.Regexp {
	t.Helper()
	const argument = "ARGUMENT"
	arguments := columns("")
	for _, other := range []string{"as_of", "now", "value", "ts", "begun", "until", "at", "taken", "period", "cost", "lowest", "of"} {
		arguments[other] = ""
	}
	for name := range arguments {
		arguments[name] = argument
	}
	text, err := m.expand(expression, arguments)
	require.NoError(t, err)
	return regexp.MustCompile(strings.ReplaceAll(regexp.QuoteMeta(squeezed(text)), argument, `(?:[\w.$:]+|\{\{[^}]*\}\})`))
}

// squeezed returns text without spaces and line ends, which may be set otherwise.
func squeezed(text string) string {
	return strings.Join(strings.Fields(text), "")
}
