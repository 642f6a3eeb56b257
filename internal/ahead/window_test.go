package ahead

import (
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
)

// TestPrefetchKeepsThePromiseOfWindows is TestPrefetchKeepsThePromise for fixed windows, which begin by the database's clock. That
// clock runs faster or slower than the clocks of the processes. No window admits more than the capacity, and no sequence of windows
// more than the capacity plus the arriving tokens.
func TestPrefetchKeepsThePromiseOfWindows(t *testing.T) {
	t.Parallel()
	var tight, died, returned, lost atomic.Int64 // the sums over all histories, none of which may stay 0
	t.Run("Histories", func(t *testing.T) {
		t.Parallel()
		t.Cleanup(func() {
			require.GreaterOrEqual(t, tight.Load(), testsize.Of[int64](0, 1), "windows in which nearly all was admitted; short histories have 2 to 14")
			require.GreaterOrEqual(t, died.Load(), testsize.Of[int64](0, 1), "short histories have 2 to 10")
			require.Positive(t, returned.Load())
			require.Positive(t, lost.Load())
		})
		testsize.EachSeed(t, func(t *testing.T, seed uint64) {
			t.Helper()
			synctest.Test(t, func(t *testing.T) {
				w := newPrefetchWorld(t, rand.New(rand.NewPCG(seed, 18)))
				w.drift = (w.random.Float64() - 0.5) / 1000
				w.change = w.changeWindows
				w.run()
				tight.Add(w.requirePromiseOfWindows(t))
				died.Add(int64(w.died))
				returned.Add(int64(w.returned))
				lost.Add(int64(w.lost))
			})
		})
	})
}

// changeWindows has another policy hold, of windows of another length.
func (w *prefetchWorld) changeWindows() {
	prefetch := time.Duration(1<<(14+w.random.IntN(3))) * time.Microsecond
	period := prefetch << w.random.IntN(3)
	rate := math.Exp2(float64(3 - len(w.policies))) // tokens a millisecond, of 1,024 microseconds
	arrives := rate * float64(period.Microseconds()) / 1024
	capacity := arrives * float64(1+w.random.IntN(3)) // unused tokens roll over
	start := time.UnixMicro(w.random.Int64N(1 << 40))
	w.hold(fixedWindow("hot", arrives, period, capacity, start, prefetch), worldPace{rate, capacity, prefetch})
}

// requirePromiseOfWindows checks every window of the history, and every run of windows under one policy. An admission counts in the
// window whose tokens it got; tokens that a process gave from memory must be of the window of that moment. It returns the number of
// windows in which nearly all was admitted.
func (w *prefetchWorld) requirePromiseOfWindows(t *testing.T) (tight int64) {
	t.Helper()
	for i, limit := range w.policies {
		terms := limit.terms
		windows := make(map[int64]float64) // the tokens admitted in each, by its beginning
		for _, a := range w.took {
			if a.policy != i {
				continue
			}
			begin := terms.Begin(a.ts)
			windows[begin] += a.cost
			if a.ownInstant {
				require.Equal(t, terms.Begin(w.clock(a.at)), begin, "answered at %v, in another window", a.at)
			}
		}
		begins := slices.Sorted(maps.Keys(windows))
		most, admitted := math.Inf(1), 0.0
		for _, begin := range begins {
			arrived := float64((begin-begins[0])/terms.Step) * limit.rate
			require.LessOrEqual(t, windows[begin], limit.capacity, "in the window from %d", begin)
			most = min(most, admitted-arrived+limit.capacity) // of admitted - arrived, for runs that begin here and before
			admitted += windows[begin]
			require.LessOrEqual(t, admitted-arrived, most, "in windows up to that from %d", begin)
			if most-(admitted-arrived) < limit.capacity/16 {
				tight++
			}
		}
	}
	require.Greater(t, w.fromMemory, len(w.took)/20)
	return tight
}

// The prefetched tokens of a window end with it. Tokens left then are lost; before the end they are returned.
func TestPrefetchEndsWithTheWindow(t *testing.T) {
	t.Parallel()
	const period = 10 * time.Second
	setup := func(t *testing.T) (*ledger, *process, bucket.Ask, time.Time) {
		t.Helper()
		row := &ledger{}
		start := time.Now().Add(-period / 2)
		limit := fixedWindow("window", 10_000, period, 10_000, start, period)
		limiter := row.on(Options{})
		warm(t, limiter, limit.ask("hot", 1), 100)
		return row, limiter, limit.ask("hot", 1), start.Add(period)
	}
	t.Run("LostAfterIt", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			row, limiter, request, end := setup(t)
			limiter.timer.Stop() // as in a process that stood still
			pass(time.Until(end) - period/100)
			d, err := limiter.take(t.Context(), request)
			require.NoError(t, err)
			require.True(t, d.Prefetched)
			require.LessOrEqual(t, d.FullAfter, period/100, "all arrives with the next window")
			pass(time.Until(end))
			row.change(func() { row.asked = nil })
			_, err = limiter.take(t.Context(), request)
			require.NoError(t, err)
			require.Len(t, row.asked, 1)
			require.InDelta(t, 10_000-row.asked[0], row.row.Value, 0, "the next window has all its tokens")
			limiter.end(t)
			require.InDelta(t, 99, row.changed.Lost, 0)
			require.InDelta(t, 10_000-1, row.row.Value, 0)
		})
	})
	t.Run("GivenBackInIt", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			row, limiter, _, end := setup(t)
			before := row.held()
			pass(time.Until(end) - time.Millisecond)
			require.Zero(t, kept(limiter))
			require.InDelta(t, before+100, row.row.Value, 0)
			require.Zero(t, row.changed.Lost)
			limiter.end(t)
		})
	})
	t.Run("LostWithAnotherPolicy", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			row, limiter, _, end := setup(t)
			before := row.held()
			again := fixedWindow("window", 20_000, period, 20_000, end, period)
			_, err := limiter.take(t.Context(), again.ask("hot", 1))
			require.NoError(t, err)
			limiter.end(t)
			require.InDelta(t, 100, row.changed.Lost, 0)
			require.LessOrEqual(t, row.row.Value, before)
		})
	})
}
