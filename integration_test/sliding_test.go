package integration_test

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// slider is a window from which nothing falls out during a test.
var slider = ratelimit.Define("slider", ratelimit.SlidingWindow{Rate: 1e6, Period: ratelimit.Week})

// slidingDesk is a limiter with a clock of the test's own.
type slidingDesk struct {
	*ratelimit.Limiter
	now atomic.Int64
}

func (b *bundle) slidingDesk(t *testing.T, config ratelimit.Config) *slidingDesk {
	t.Helper()
	d := &slidingDesk{}
	d.at(0)
	config.AsOf = func() time.Time { return time.UnixMicro(d.now.Load()) }
	d.Limiter = b.with(t, config)
	return d
}

// at sets the clock to so much after noon.
func (d *slidingDesk) at(after time.Duration) { d.now.Store(clockNoon.Add(after).UnixMicro()) }

// tokens returns what the bucket holds.
func (d *slidingDesk) tokens(t *testing.T, request ratelimit.Request) float64 {
	t.Helper()
	v, err := d.Value(t.Context(), request)
	require.NoError(t, err)
	return v.Tokens
}

// requireTake takes and checks the answer. retryAfter is the expected wait; 0 means allowed.
func (d *slidingDesk) requireTake(t *testing.T, retryAfter time.Duration, requests ...ratelimit.Request) ratelimit.Decision {
	t.Helper()
	decision, err := d.Take(t.Context(), requests...)
	require.NoError(t, err)
	require.Equal(t, retryAfter, decision.RetryAfter, "%+v", decision)
	require.Equal(t, retryAfter == 0, decision.Allowed)
	return decision
}

// perMinute gives n in any minute, and counts in slices of 10 s.
func perMinute(name string, n float64) ratelimit.Limit {
	return ratelimit.Define(name, ratelimit.SlidingWindow{Rate: n, Period: time.Minute, Slices: 6})
}

// A sliding window gives back the tokens of a slice a period after the slice.
func TestSlidingWindow(t *testing.T) {
	t.Parallel()
	b := setup(t)
	d, limit := b.slidingDesk(t, ratelimit.Config{}), perMinute("gives", 10)
	d.requireTake(t, 0, limit.Global().Cost(6))
	d.at(15 * time.Second)
	decision := d.requireTake(t, 0, limit.Global().Cost(4))
	require.Zero(t, decision.Remaining)
	require.Equal(t, 65*time.Second, decision.ResetAfter)
	d.requireTake(t, 55*time.Second, limit.Global())
	d.at(70*time.Second - time.Microsecond)
	d.requireTake(t, time.Microsecond, limit.Global())
	d.at(70 * time.Second)
	decision = d.requireTake(t, 0, limit.Global())
	require.InDelta(t, 5, decision.Remaining, 0)
	d.requireTake(t, 10*time.Second, limit.Global().Cost(9))
	check, err := d.Check(t.Context(), limit.Global().Cost(5))
	require.NoError(t, err)
	require.True(t, check.Allowed)
	require.InDelta(t, 5, check.States[0].Value.Tokens, 0)
	require.InDelta(t, 9, check.States[0].Value.At(clockNoon.Add(80*time.Second)), 0)
}

// TestSlidingWindowIsPruned promises that Prune deletes full windows, and no others.
func TestSlidingWindowIsPruned(t *testing.T) {
	t.Parallel()
	b := setup(t)
	d, limit := b.slidingDesk(t, ratelimit.Config{}), perMinute("pruned", 10)
	d.requireTake(t, 0, limit.For("a").Cost(10))
	lowered := perMinute("pruned", 1)
	for after := time.Duration(0); after < 3*time.Minute; after += 7 * time.Second {
		d.at(after)
		n, err := d.Prune(t.Context(), lowered)
		require.NoError(t, err)
		if after < 70*time.Second {
			require.Zero(t, n)
			require.InDelta(t, 0, d.tokens(t, limit.For("a")), 0)
			require.InDelta(t, -9, d.tokens(t, lowered.For("a")), 0)
		}
	}
	require.Empty(t, b.rows(t, "a"))
	require.InDelta(t, 10, d.tokens(t, limit.For("a")), 0)
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
