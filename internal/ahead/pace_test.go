package ahead

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

func TestPace(t *testing.T) {
	t.Parallel()
	terms := bucket.Terms{Kind: bucket.Steps{}, Capacity: 800, Rate: 1, Steps: 1e6, Step: 1, Prefetch: 8000}
	var p pace
	for _, step := range []struct {
		gap  int64
		size pace
	}{{5000, 0}, {999, 2}, {999, 4}, {1000, 4}, {4000, 4}, {4001, 2}, {0, 4}, {0, 8}, {0, 16}, {0, 32}, {0, 64}, {0, 100}, {0, 100}} {
		p.next(&terms, step.gap, 2)
		require.Equal(t, step.size, p, "after %d", step.gap)
	}
	require.InDelta(t, 100, p.ahead(800, 2, 2), 0)
	require.InDelta(t, 25, p.ahead(102, 2, 2), 0, "a share of what there is")
	require.Zero(t, p.ahead(9, 2, 2), "no more than asked")
	require.Zero(t, p.ahead(-50, 2, 2))
}
