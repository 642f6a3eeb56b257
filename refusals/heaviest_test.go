package refusals

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
)

// see counts one more of a key.
func (h *heaviest) see(key string) {
	h.raise(h.admit(id{key: key}))
}

// requireBounds checks what space-saving promises of counts, by the exact ones.
func (h *heaviest) requireBounds(t require.TestingT, exact map[string]int64) {
	var n, sum int64
	for _, count := range exact {
		n += count
	}
	require.LessOrEqual(t, len(h.order), h.places)
	require.Len(t, h.of, len(h.order))
	for i, r := range h.order {
		sum += r.count
		truth := exact[r.id.key]
		require.Equal(t, i, r.rank)
		require.Same(t, r.place, h.of[r.id])
		require.GreaterOrEqual(t, r.count, truth, r.id.key)
		require.LessOrEqual(t, r.count-r.over, truth, r.id.key)
		require.LessOrEqual(t, r.over*int64(h.places), n, r.id.key)
		if i > 0 {
			require.LessOrEqual(t, r.count, h.order[i-1].count, "the order is by count")
		}
	}
	require.Equal(t, n, sum)
	for key, truth := range exact {
		if truth*int64(h.places) > n {
			require.Contains(t, h.of, id{key: key}, "%d of %d", truth, n)
		}
	}
}

func TestHeaviest(t *testing.T) {
	t.Parallel()

	t.Run("KeepsItsBounds", func(t *testing.T) {
		t.Parallel()
		r := testsize.Rand(t)
		for range 100 {
			h, exact := newHeaviest(1+r.IntN(12)), make(map[string]int64)
			for i := range r.IntN(400) {
				key := fmt.Sprint(r.IntN([]int{4, 41}[r.IntN(2)])) // some are heavy
				h.see(key)
				exact[key]++
				if i%50 == 0 {
					h.requireBounds(t, exact)
				}
			}
			h.requireBounds(t, exact)
		}
	})

	t.Run("IsExactWhileThereIsRoom", func(t *testing.T) {
		t.Parallel()
		h := newHeaviest(3)
		for _, key := range []string{"a", "b", "b", "c", "c", "c"} {
			h.see(key)
		}
		for i, key := range []string{"c", "b", "a"} {
			require.Equal(t, key, h.order[i].id.key)
			require.EqualValues(t, 3-i, h.order[i].count)
			require.Zero(t, h.order[i].over)
		}
		h.see("d") // in the place of a
		require.EqualValues(t, 2, h.order[2].count)
		require.Equal(t, "d", h.order[2].id.key)
		require.EqualValues(t, 1, h.order[2].over)
		require.NotContains(t, h.of, id{key: "a"})
	})
}
