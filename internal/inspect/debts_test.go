package inspect_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/inspect"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
)

// owing writes buckets of two limits, of up to four rows, and returns those that owe, in their order.
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

// Wherever a search is cut, those that owe are found once, with all their rows, and in their order.
func TestDebtsByPages(t *testing.T) {
	t.Parallel()
	f := setup(t)
	owing := f.owing(t)
	ofMessages := owing[:slices.IndexFunc(owing, func(b inspect.Bucket) bool { return b.Limit == "words" })]
	require.NotEmpty(t, ofMessages)
	for limit, want := range map[string][]inspect.Bucket{"": owing, "messages": ofMessages, "words": owing[len(ofMessages):], "none": nil} {
		for look := 1; look <= 160; look += testsize.Of(3+look/4, 1+look/10) {
			for _, most := range []int{0, 1, 3} {
				var found []inspect.Bucket
				query := inspect.DebtQuery{Limit: limit, Look: look, Most: most}
				for searches := 1; ; searches++ {
					require.LessOrEqual(t, searches, 61, "each search gets on by a bucket")
					debts, err := f.Debts(t.Context(), query)
					require.NoError(t, err)
					require.True(t, most == 0 || len(debts.Buckets) <= most)
					found = append(found, debts.Buckets...)
					if debts.Next == nil {
						break
					}
					query.After = debts.Next
				}
				require.Equal(t, want, found, "of %q, looking at %d, %d at most", limit, look, most)
			}
		}
	}
}

// A search looks at so many rows, and says where it stopped, whether it found something or not.
func TestDebtsLooksNoFurther(t *testing.T) {
	t.Parallel()
	f := setup(t)
	for n := range 10 {
		f.put(t, "messages", fmt.Sprint(n), 1)
	}
	f.put(t, "messages", "9 owes", -1)
	debts, err := f.Debts(t.Context(), inspect.DebtQuery{Look: 10})
	require.NoError(t, err)
	require.Empty(t, debts.Buckets)
	require.Equal(t, &inspect.Position{Limit: "messages", Key: "9"}, debts.Next)
	debts, err = f.Debts(t.Context(), inspect.DebtQuery{Look: 10, After: debts.Next})
	require.NoError(t, err)
	require.Equal(t, []string{"9 owes"}, keysOf(debts.Buckets))
	require.Nil(t, debts.Next)
}

func TestDebtsOfHostileKeys(t *testing.T) {
	t.Parallel()
	f := setup(t)
	for _, key := range hostile {
		f.put(t, "hostile", key, -1)
	}
	var found []string
	query := inspect.DebtQuery{Limit: "hostile", Look: 1}
	for {
		debts, err := f.Debts(t.Context(), query)
		require.NoError(t, err)
		found = append(found, keysOf(debts.Buckets)...)
		if query.After = debts.Next; query.After == nil {
			break
		}
	}
	require.Equal(t, slices.Sorted(slices.Values(hostile)), found)
}
