package main

import (
	"fmt"
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
		"core/":    {"branches 10", "exported 10", "files 4", "lines 77", "sql 4"},
		"methods/": {"Limiter 2", "Limiter/exported 1", "Session 1", "Session/exported 1", "Terms 2", "Terms/exported 1"},
		"package/": {
			"internal/bucket/exported 2", "internal/bucket/files 1", "internal/bucket/lines 19",
			"internal/store/exported 2", "internal/store/files 1", "internal/store/lines 15", "internal/store/sql 4",
			"ratelimit/exported 6", "ratelimit/files 2", "ratelimit/lines 43",
			"tool/ent/exported 1", "tool/ent/files 1", "tool/ent/lines 6",
			"tool/exported 0", "tool/files 1", "tool/lines 4",
		},
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
			"internal/bucket/terms.go:16  for t.Sharded()",
		},
		"branches/kinds":  {"internal/bucket/terms.go:12  case t.Kind == nil && !t.Sharded()", "ratelimit/shards.go:7  t.Sharded() || t.Kind == nil"},
		"branches/routed": {"internal/store/session.go:7  !s.IsRouted() && s.memory != nil", "internal/store/session.go:8  if err := s.LeavesOutHeld(); err != nil"},
		"branches/memory": {"internal/store/session.go:7  !s.IsRouted() && s.memory != nil"},
		"branches/eras":   nil,
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
			list = append(list, fmt.Sprintf("%s %d", name, of.value))
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
	require.NoError(t, countWalks(t.Context(), n, filepath.Join("testdata", "tree")))
}
