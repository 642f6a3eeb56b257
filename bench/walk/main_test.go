package main

import (
	"go/parser"
	"go/token"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// of returns entries in files of these names.
func of(files string) (entries []entry) {
	for _, file := range strings.Fields(files) {
		entries = append(entries, entry{File: file, Function: "f"})
	}
	return entries
}

func TestCount(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, entered string
		want          figures
	}{
		{"Nothing", "", figures{}},
		{"OneFile", "a a a", figures{[]string{"a"}, 0, 0, 3}},
		{"StraightThrough", "a a b c c", figures{[]string{"a", "b", "c"}, 2, 0, 5}},
		{"ThereAndBack", "b a b", figures{[]string{"b", "a"}, 2, 1, 3}},
		{"BackAndForth", "a b a c b b a", figures{[]string{"a", "b", "c"}, 5, 3, 7}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			got := count(of(c.entered))
			require.Equal(t, c.want, got)
			require.Equal(t, got.back, got.changes-max(len(got.files)-1, 0))
		})
	}
}

func TestListHasALineForEachChange(t *testing.T) {
	t.Parallel()
	var w strings.Builder
	entries := of("a a b a")
	list(&w, entries, count(entries))
	require.Equal(t, "\n  a: f f\n  b: f\n  a: f\n\n  2 files: a b\n\n", w.String())
}

func TestInstrument(t *testing.T) {
	t.Parallel()
	got, err := instrument("core/file.go", `//go:build !other

// Package core is one.
package core // and stays one

import "sync"

type number[T any] struct{ of T }

func (n *number[T]) method() int {
	return func() int { return 1 }()
}
func short() int { return 1 }
func (text) empty() {}
func assembly()
`)
	require.NoError(t, err)
	require.Equal(t, `//go:build !other

// Package core is one.
package core; import "github.com/pgratelimit/pgratelimit/internal/walktrace" // and stays one

import "sync"

type number[T any] struct{ of T }

func (n *number[T]) method() int { walktrace.Enter("core/file.go", "number.method");
	return func() int { return 1 }()
}
func short() int { walktrace.Enter("core/file.go", "short"); return 1 }
func (text) empty() { walktrace.Enter("core/file.go", "text.empty");}
func assembly()
`, got)
}

func TestInstrumentLeavesAFileWithoutFunctionsAsItIs(t *testing.T) {
	t.Parallel()
	const source = "package core\n\nconst one = 1\n"
	got, err := instrument("file.go", source)
	require.NoError(t, err)
	require.Equal(t, source, got)
	_, err = instrument("file.go", "no source")
	require.ErrorContains(t, err, "file.go")
}

func TestTextsOfTheProgramAreGo(t *testing.T) {
	t.Parallel()
	for _, text := range []string{traceText, programText} {
		got, err := instrument("file.go", text)
		require.NoError(t, err)
		_, err = parser.ParseFile(token.NewFileSet(), "file.go", got, parser.AllErrors)
		require.NoError(t, err)
	}
}

func TestOptions(t *testing.T) {
	t.Parallel()
	o, err := parse([]string{"-rev", "v1", "-v", "-run", "tx"})
	require.NoError(t, err)
	require.Equal(t, options{revision: "v1", only: "tx", verbose: true}, o)
	for _, wrong := range [][]string{{"-run", "("}, {"surplus"}} {
		_, err := parse(wrong)
		require.Error(t, err, "%v", wrong)
	}
}
