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

// perMinute gives n in any minute, and counts in slices of 10 s.
func perMinute(name string, n float64) ratelimit.Limit {
	return ratelimit.Define(name, ratelimit.SlidingWindow{Rate: n, Period: time.Minute, Slices: 6})
}

// A sliding window gives back the tokens of a slice a period after the slice.
func TestSlidingWindow(t *testing.T) {
	t.Parallel()
	d, request := setup(t).desk(t, ratelimit.Config{}), perMinute("gives", 10).Global()
	for _, step := range []struct {
		at         time.Duration
		cost, left float64
		retryAfter time.Duration // of a refusal
	}{
		{0, 6, 4, 0},
		{15 * time.Second, 4, 0, 0},
		{15 * time.Second, 1, 0, 55 * time.Second},
		{70*time.Second - time.Microsecond, 1, 0, time.Microsecond},
		{70 * time.Second, 1, 5, 0},
		{70 * time.Second, 9, 5, 10 * time.Second},
	} {
		d.at(step.at)
		decision, err := d.limiter.Take(t.Context(), request.Cost(step.cost))
		require.NoError(t, err)
		require.Equal(t, step.retryAfter, decision.RetryAfter, "%+v", step)
		require.Equal(t, step.retryAfter == 0, decision.Allowed)
		require.InDelta(t, step.left, decision.Remaining, 0)
	}
	v, err := d.limiter.Value(t.Context(), request)
	require.NoError(t, err)
	require.InDelta(t, 9, v.At(clockNoon.Add(80*time.Second)), 0)
}

// Prune deletes full sliding windows, and no others.
func TestSlidingWindowIsPruned(t *testing.T) {
	t.Parallel()
	d, request, lowered := setup(t).desk(t, ratelimit.Config{}), perMinute("pruned", 10).For("a"), perMinute("pruned", 1)
	takeAll(t, d.limiter, request)
	for after := time.Duration(0); after < 3*time.Minute; after += 7 * time.Second {
		d.at(after)
		n, err := d.limiter.Prune(t.Context(), lowered)
		require.NoError(t, err)
		if after < 70*time.Second {
			require.Zero(t, n)
			d.requireTokens(t, 0, request)
			d.requireTokens(t, -9, lowered.For("a"))
		}
	}
	require.Empty(t, d.rows(t, "a"))
	d.requireTokens(t, 10, request)
}

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
