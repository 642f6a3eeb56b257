package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestCount(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		entered string
		want    figures
	}{
		"Nothing":         {"", figures{}},
		"OneFile":         {"a a a", figures{[]string{"a"}, 0, 0, 3}},
		"StraightThrough": {"a a b c c", figures{[]string{"a", "b", "c"}, 2, 0, 5}},
		"ThereAndBack":    {"b a b", figures{[]string{"b", "a"}, 2, 1, 3}},
		"BackAndForth":    {"a b a c b b a", figures{[]string{"a", "b", "c"}, 5, 3, 7}},
	} {
		require.Equal(t, c.want, count(strings.Fields(c.entered)), name)
	}
}

func TestReadKeepsTheLastRunOfACall(t *testing.T) {
	t.Parallel()
	const marks = `walk-enter a before
walk-begin one
walk-enter a first
walk-end
walk-begin one
a line of something else
walk-enter a f
walk-enter b g
walk-end
walk-enter a between
walk-begin two
walk-end
`
	require.Equal(t, []recording{{"one", []string{"a f", "b g"}}, {"two", nil}}, read(strings.NewReader(marks)))
}

func TestMark(t *testing.T) {
	t.Parallel()
	got, err := mark("core/file.go", `package core // and a comment

func (n *number[T]) method() int {
	return func() int { return 1 }()
}
func short() int { return 1 }
func (text) empty() {}
func assembly()
`)
	require.NoError(t, err)
	require.Equal(t, `package core // and a comment

func (n *number[T]) method() int { println("walk-enter core/file.go method");
	return func() int { return 1 }()
}
func short() int { println("walk-enter core/file.go short"); return 1 }
func (text) empty() { println("walk-enter core/file.go empty");}
func assembly()
`, got)
	_, err = mark("file.go", "no source")
	require.ErrorContains(t, err, "file.go")
}
