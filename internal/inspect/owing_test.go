package inspect_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/inspect"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
)

// owing writes buckets of two limits, of up to four rows, and returns the buckets that owe, in their order.
func (f *fixture) owing(t *testing.T) (owing []inspect.Bucket) {
	t.Helper()
	for n := range 60 {
		b := inspect.Bucket{Limit: []string{"messages", "words"}[n/30], Key: fmt.Sprintf("key %02d", n)}
		tokens := make([]float64, 1+n%4)
		for shard := range tokens {
			tokens[shard] = 3
			if n%7 == 3 && shard == n%len(tokens) { // one of the rows, be it the first or the last
				tokens[shard] = -2
			}
			b.Rows = append(b.Rows, inspect.Row{Shard: shard, Tokens: tokens[shard], At: noon})
		}
		f.put(t, b.Limit, b.Key, tokens...)
		if slices.Contains(tokens, -2) {
			owing = append(owing, b)
		}
	}
	return owing
}

// For any page size, a search finds each bucket that owes once, with all its rows, in order.
func TestOwingByPages(t *testing.T) {
	t.Parallel()
	f := setup(t)
	owing := f.owing(t)
	ofMessages := owing[:slices.IndexFunc(owing, func(b inspect.Bucket) bool { return b.Limit == "words" })]
	require.NotEmpty(t, ofMessages)
	for limit, want := range map[string][]inspect.Bucket{"": owing, "messages": ofMessages, "words": owing[len(ofMessages):], "none": nil} {
		for look := 1; look <= 160; look += testsize.Of(3+look/4, 1+look/10) {
			for _, most := range []int{0, 1, 3} {
				var found []inspect.Bucket
				query := inspect.OwingQuery{Limit: limit, Look: look, Most: most}
				for searches := 1; ; searches++ {
					require.LessOrEqual(t, searches, 61, "each search gets on by a bucket")
					owing, err := f.Owing(t.Context(), query)
					require.NoError(t, err)
					require.True(t, most == 0 || len(owing.Buckets) <= most)
					found = append(found, owing.Buckets...)
					if owing.Next == nil {
						break
					}
					query.After = owing.Next
				}
				require.Equal(t, want, found, "of %q, looking at %d, %d at most", limit, look, most)
			}
		}
	}
}

// A search reads a bounded number of rows, and returns where it stopped, whether or not it found a bucket.
func TestOwingLooksNoFurther(t *testing.T) {
	t.Parallel()
	f := setup(t)
	for n := range 10 {
		f.put(t, "messages", fmt.Sprint(n), 1)
	}
	f.put(t, "messages", "9 owes", -1)
	owing, err := f.Owing(t.Context(), inspect.OwingQuery{Look: 10})
	require.NoError(t, err)
	require.Empty(t, owing.Buckets)
	require.Equal(t, &inspect.Position{Limit: "messages", Key: "9"}, owing.Next)
	owing, err = f.Owing(t.Context(), inspect.OwingQuery{Look: 10, After: owing.Next})
	require.NoError(t, err)
	require.Equal(t, []string{"9 owes"}, keysOf(owing.Buckets))
	require.Nil(t, owing.Next)
}

func TestOwingOfHostileKeys(t *testing.T) {
	t.Parallel()
	f := setup(t)
	for _, key := range hostile {
		f.put(t, "hostile", key, -1)
	}
	var found []string
	query := inspect.OwingQuery{Limit: "hostile", Look: 1}
	for {
		owing, err := f.Owing(t.Context(), query)
		require.NoError(t, err)
		found = append(found, keysOf(owing.Buckets)...)
		if query.After = owing.Next; query.After == nil {
			break
		}
	}
	require.Equal(t, slices.Sorted(slices.Values(hostile)), found)
}
