package bucket

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
)

func TestKeysAreInTheOrderOfThePrimaryKey(t *testing.T) {
	t.Parallel()
	sorted := []Key{ // by bytes, as COLLATE "C" does
		{Name: "Z", Key: "z", Shard: 9},
		{Name: "a", Key: "", Shard: 0},
		{Name: "a", Key: "", Shard: 1},
		{Name: "a", Key: "B", Shard: 0},
		{Name: "a", Key: "b", Shard: 2},
		{Name: "a", Key: "b", Shard: 10},
		{Name: "a", Key: "bb", Shard: 0},
		{Name: "a", Key: "é", Shard: 0},
		{Name: "ab", Key: "", Shard: 0},
	}
	keys := slices.Clone(sorted)
	testkit.Rand(t).Shuffle(len(keys), func(i, j int) { keys[i], keys[j] = keys[j], keys[i] })
	slices.SortFunc(keys, Key.Compare)
	require.Equal(t, sorted, keys)
}

// TestFirst finds the smallest number from any estimate, in a number of calls that grows with its error
// only as a logarithm does.
func TestFirst(t *testing.T) {
	t.Parallel()
	const limit = 1 << 50
	for _, want := range []int64{1, 2, 3, 17, 1000, 1 << 40, limit - 1, limit} {
		for _, estimate := range []int64{-5, 1, want / 2, want - 1, want, want + 1, 3 * want, limit, limit + 7} {
			calls := 0
			got := first(estimate, limit, func(n int64) bool { calls++; return n >= want })
			require.Equal(t, want, got, "from %d", estimate)
			require.LessOrEqual(t, calls, 110, "from %d", estimate)
		}
	}
	require.Equal(t, int64(limit), first(9, limit, func(int64) bool { return false }), "when there is none")
}
