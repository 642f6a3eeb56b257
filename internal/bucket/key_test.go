package bucket

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
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
	testsize.Rand(t).Shuffle(len(keys), func(i, j int) { keys[i], keys[j] = keys[j], keys[i] })
	slices.SortFunc(keys, Key.Compare)
	require.Equal(t, sorted, keys)
}
