package integration_test

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// slider is a window from which nothing falls out during a test.
var slider = ratelimit.Define("slider", ratelimit.SlidingWindow{Rate: 1e6, Period: ratelimit.Week})

// TestSlidingWindowRowsStaySmall takes in one slice after the other, from rows whose keys are as long as a key may be. A row drops
// expired slices from time to time. Doing so with each slice would write all of the row to the log. No answer shows it, and each
// row stays below 2,000 bytes, from where on Postgres would compress it or store it elsewhere.
func TestSlidingWindowRowsStaySmall(t *testing.T) {
	t.Parallel()
	b := setup(t)
	const moves, spare = 300, 44
	seed := testsize.Seed(t)
	for _, slices := range []int{6, 60, 128} {
		t.Run(fmt.Sprint(slices), func(t *testing.T) {
			t.Parallel()
			d, random := b.desk(t, ratelimit.Config{}), rand.New(rand.NewPCG(seed, uint64(slices)))
			rate := 7 * float64(slices+1)
			window := ratelimit.SlidingWindow{Rate: rate, Period: time.Duration(slices) * time.Second, Slices: slices}
			key := fmt.Sprintf("%0256d", slices)
			request := ratelimit.Define(strings.Repeat("n", 64), window).For(key)
			taken, length, dropped := make([]float64, moves), 0, 0
			for i := range moves {
				d.at(time.Duration(i) * time.Second)
				left, cost := rate, float64(1+random.IntN(10))
				for _, amount := range taken[max(0, i-slices) : i+1] {
					left -= amount
				}
				in := callers()[[]int{0, 3}[random.IntN(2)]] // a transaction, or none
				decision, err := in.take(t.Context(), b.pool, d.limiter, request.Cost(cost))
				require.NoError(t, err)
				require.Equal(t, left >= cost, decision.Allowed, "move %d", i)
				if decision.Allowed {
					taken[i] = cost
					require.InDelta(t, left-cost, decision.Remaining, 0, "move %d", i)
				}
				before, row, array := length, 0, 0
				require.NoError(t, b.pool.QueryRow(t.Context(), `SELECT cardinality(taken), pg_column_size(b), pg_column_size(taken) FROM ratelimit.buckets AS b
					WHERE key = $1`, key).Scan(&length, &row, &array))
				require.LessOrEqual(t, length, 4+slices+spare)
				require.Less(t, row, 2000)
				require.Greater(t, array, 8*length, "not compressed")
				if length < before {
					require.Equal(t, 4+slices, length, "what counts stays")
					dropped++
				}
			}
			require.Positive(t, dropped)
			require.LessOrEqual(t, dropped, (moves-slices)/spare)
		})
	}
}
