package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestMeasure measures testdata/tree: numbers by the beginnings of their names, and what a number counts.
func TestMeasure(t *testing.T) {
	t.Parallel()
	read, err := readTree(filepath.Join("testdata", "tree"))
	require.NoError(t, err)
	n := measure(read)
	for prefix, want := range map[string][]string{
		"core/":    {"branches 11", "exported 10", "files 4", "lines 72", "sql 4"},
		"methods/": {"Limiter 2", "Limiter/exported 1", "Session 1", "Session/exported 1", "Terms 2", "Terms/exported 1"},
		"package/": {
			"internal/bucket/exported 2", "internal/bucket/files 2", "internal/bucket/lines 22",
			"internal/store/exported 2", "internal/store/files 1", "internal/store/lines 15", "internal/store/sql 4",
			"ratelimit/exported 6", "ratelimit/files 1", "ratelimit/lines 35",
			"tool/ent/exported 1", "tool/ent/files 1", "tool/ent/lines 6",
			"tool/exported 0", "tool/files 1", "tool/lines 4",
		},
		"phrases/": {"comments 102", "core 113.6", "pages 166.7"},
	} {
		require.Equal(t, want, values(n, prefix), prefix)
	}
	for name, want := range map[string][]string{
		"package/ratelimit/exported": {
			"ratelimit/limiter.go:6  Limiter", "ratelimit/limiter.go:12  Config", "ratelimit/limiter.go:15  One", "ratelimit/limiter.go:19  First",
			"ratelimit/limiter.go:22  New", "ratelimit/limiter.go:24  Limiter.Take",
		},
		"package/internal/store/sql": {
			"internal/store/session.go:11  SELECT 1", "internal/store/session.go:13  UPDATE rows SET value = 1",
			"internal/store/sql/lock.sql  1", "internal/store/sql/take.sql  1",
		},
		"branches/transaction": {"internal/store/session.go:6  s.mode == ownTx", "ratelimit/limiter.go:25  if l.pool == nil"},
		"branches/shards": {
			"internal/bucket/terms.go:8  t.Shards > 1", "internal/bucket/terms.go:12  case t.Kind == nil && !t.Sharded()",
			"internal/bucket/terms.go:16  for t.Sharded()", "internal/store/session.go:6  s.Rows != nil",
		},
		"branches/kinds":  {"internal/bucket/shards.go:3  t.Sharded() || t.Kind == nil", "internal/bucket/terms.go:12  case t.Kind == nil && !t.Sharded()"},
		"branches/routed": {"internal/store/session.go:7  !s.IsRouted() && s.memory != nil", "internal/store/session.go:8  if err := s.LeavesOutHeld(); err != nil"},
		"branches/memory": {"internal/store/session.go:7  !s.IsRouted() && s.memory != nil"},
		"branches/eras":   nil,
		"phrases/comments": {
			"internal/store/sql/tmpl/take.sql.tmpl:2  what was", "internal/store/sql/tmpl/take.sql.tmpl:3  somebody",
			"ratelimit/limiter.go:1  what a caller", "ratelimit/limiter.go:4  nobody", "ratelimit/limiter.go:5  one that",
		},
		"phrases/pages": {"docs/page.md:3  what is", "docs/page.md:10  that of", "docs/page.md:10  whoever"},
	} {
		var items []string
		for _, i := range n[name].items {
			items = append(items, i.String())
		}
		require.Equal(t, want, items, name)
	}
}

// values returns the numbers whose names begin with prefix, as "name value" without the prefix.
func values(n numbers, prefix string) (list []string) {
	for _, of := range n.sorted() {
		if name, ok := strings.CutPrefix(of.name, prefix); ok {
			list = append(list, name+" "+format(of.value))
		}
	}
	return list
}

func TestMechanismsHaveFilesInTheRepository(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	for _, m := range mechanisms() {
		require.False(t, seen[m.name], m.name)
		seen[m.name] = true
		for _, pattern := range m.own {
			files, err := filepath.Glob(filepath.Join("..", "..", filepath.FromSlash(pattern)))
			require.NoError(t, err)
			require.NotEmpty(t, files, "%s: no file matches %s", m.name, pattern)
		}
	}
}

func TestWalks(t *testing.T) {
	t.Parallel()
	n := numbers{}
	require.NoError(t, readWalks(n, "                 files changes    back   calls\ntx-1                16      36      21      91\n"))
	require.Equal(t, []string{"tx-1/back 21", "tx-1/files 16"}, values(n, "walk/"))
	for _, table := range []string{"", "files back\n", "files changes back calls\ntx-1 1 2 3\n", "files changes back calls\ntx-1 1 2 x 4\n"} {
		require.Error(t, readWalks(numbers{}, table), table)
	}
	walked, err := countWalks(t.Context(), n, filepath.Join("testdata", "tree"))
	require.NoError(t, err)
	require.False(t, walked)
}

func TestBudget(t *testing.T) {
	t.Parallel()
	n := numbers{"lines": {name: "lines", value: 10}, "files": {name: "files", value: 2}, "rate": {name: "rate", value: 0.5}}
	name := filepath.Join(t.TempDir(), "shape.txt")
	read := func(text string) (budget, error) {
		require.NoError(t, os.WriteFile(name, []byte(text), 0o600))
		return readBudget(name)
	}

	b, err := readBudget(name)
	require.NoError(t, err)
	require.Nil(t, b)
	b, err = b.lowered(n, true)
	require.NoError(t, err)
	require.Equal(t, budgetHeader+"files 2\nlines 10\nrate 0.5\n", b.String())
	again, err := read(b.String())
	require.NoError(t, err)
	require.Equal(t, b, again)
	require.Empty(t, b.risen(n))

	b, err = read("lines 12\nfiles 2\nrate 0.6\ngone 3\nwalk/one/files 4\n")
	require.NoError(t, err)
	lower, err := b.lowered(n, false)
	require.NoError(t, err)
	require.Equal(t, budget{"lines": 10, "files": 2, "rate": 0.5, "walk/one/files": 4}, lower)
	lower, err = b.lowered(n, true)
	require.NoError(t, err)
	require.NotContains(t, lower, "walk/one/files")

	for _, text := range []string{"lines 9\nfiles 2\nrate 1\n", "files 2\nrate 1\n"} {
		b, err = read(text)
		require.NoError(t, err)
		require.Len(t, b.risen(n), 1)
		_, err = b.lowered(n, true)
		require.ErrorContains(t, err, "lines 10")
	}
	for _, text := range []string{"lines", "lines 1 2", "lines ten", "lines 1\nlines 2"} {
		_, err = read(text)
		require.ErrorContains(t, err, name+":", text)
	}
}

// program runs the program and returns its output.
func program(t *testing.T, args ...string) (string, error) {
	t.Helper()
	o, err := parse(args)
	require.NoError(t, err)
	var out strings.Builder
	err = run(t.Context(), &out, o)
	return out.String(), err
}

func TestCheckNamesAddedLines(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "tree")
	require.NoError(t, os.CopyFS(dir, os.DirFS(filepath.Join("testdata", "tree"))))
	require.NoError(t, os.Mkdir(filepath.Join(dir, ".ci"), 0o755))
	commit := func() {
		for _, command := range []string{"init -q", "add -A", "-c user.name=a -c user.email=a@example.com commit -q -m all"} {
			out, err := exec.CommandContext(t.Context(), "git", append([]string{"-C", dir}, strings.Fields(command)...)...).CombinedOutput()
			require.NoError(t, err, "%s", out)
		}
	}
	session := filepath.Join(dir, "internal", "store", "session.go")
	add := func(text string) {
		old, err := os.ReadFile(session)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(session, append(old, text...), 0o600))
	}

	_, err := program(t, "-dir", dir, "-check")
	require.ErrorContains(t, err, "UPDATE=1")
	_, err = program(t, "-dir", dir, "-update")
	require.NoError(t, err)
	commit()
	out, err := program(t, "-dir", dir, "-check")
	require.NoError(t, err)
	require.Empty(t, out)

	add("\n// It is to be.\nfunc More(s *Session) bool { return s.Shards > 1 }\n")
	out, err = program(t, "-dir", dir, "-check")
	require.ErrorContains(t, err, "are above the budget")
	for number, added := range map[string]string{
		"branches/shards is 5; its budget is 4":                 "internal/store/session.go:18  s.Shards > 1",
		"core/lines is 75; its budget is 72":                    "internal/store/session.go  3",
		"package/internal/store/exported is 3; its budget is 2": "internal/store/session.go:18  More",
		"phrases/core is 125; its budget is 113.6":              "internal/store/session.go:17  is to be",
	} {
		require.Contains(t, out, number+"\n    "+added+"\n")
	}
	require.NotContains(t, out, "limiter.go")
	_, err = program(t, "-dir", dir, "-update")
	require.ErrorContains(t, err, "branches/shards 5")
	out, err = program(t, "-dir", dir)
	require.NoError(t, err)
	require.Regexp(t, `(?m)^branches/shards +5 +4  above$`, out)

	commit() // which leaves the budget: the commit before is still the one to compare with
	out, err = program(t, "-dir", dir, "-check")
	require.Error(t, err)
	require.Contains(t, out, "branches/shards is 5; its budget is 4\n    internal/store/session.go:18  s.Shards > 1\n")
	require.NotContains(t, out, "limiter.go")
}
