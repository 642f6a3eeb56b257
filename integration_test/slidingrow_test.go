package integration_test

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

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
			d, random := b.slidingDesk(t, ratelimit.Config{}), rand.New(rand.NewPCG(seed, uint64(slices)))
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
				decision, err := d.takeEither(t, b, random.IntN(2) == 0, request.Cost(cost))
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

// takeEither takes by itself or in a transaction.
func (d *slidingDesk) takeEither(t *testing.T, b *bundle, inTx bool, request ratelimit.Request) (decision ratelimit.Decision, err error) {
	t.Helper()
	if !inTx {
		return d.Take(t.Context(), request)
	}
	err = pgx.BeginFunc(t.Context(), b.pool, func(tx pgx.Tx) error {
		decision, err = d.WithTx(tx).Take(t.Context(), request)
		return err
	})
	return decision, err
}
