package processes_test

import (
	"fmt"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// acrossProcesses is the limit that the processes share.
func acrossProcesses(rate float64) ratelimit.TokenBucket {
	return ratelimit.TokenBucket{Rate: rate, Period: time.Second, Capacity: 20_000, Prefetch: 500 * time.Millisecond}
}

// prefetching is a process that takes as fast as it can from a limit with the rate of its argument. It stops after enough takes,
// without tokens, or when it is killed. It reports each token that it was given before it takes the next.
func prefetching(t *testing.T, url string, arguments []string) {
	t.Helper()
	rate, err := strconv.ParseFloat(arguments[0], 64)
	require.NoError(t, err)
	limiter := world.Open(t, url).Limiter
	limit := ratelimit.Define("across", acrossProcesses(rate))
	for range 4000 {
		d, err := limiter.Take(t.Context(), limit.For("hot"))
		require.NoError(t, err)
		if d.RetryAfter > time.Minute {
			break
		}
		if !d.Allowed {
			time.Sleep(min(d.RetryAfter, 10*time.Millisecond))
			continue
		}
		require.NoError(t, report(d, 0))
	}
	require.NoError(t, limiter.Close(t.Context()))
}

// Processes share a key at full speed, and two of them are killed. By the instants of the decisions, no span has more than the
// capacity plus the tokens arriving in it.
func TestPrefetchAcrossProcesses(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "eight processes")
	t.Run("NoSpanHasMore", func(t *testing.T) {
		t.Parallel()
		const rate = 2000
		took := allowedAt(prefetchFleet(t, world.New(t), rate))
		level, last := 0.0, took[0]
		for _, at := range took {
			level = max(level-float64(at-last)*rate/1e6, 0) + 1
			require.LessOrEqual(t, level, acrossProcesses(rate).Capacity)
			last = at
		}
	})
	t.Run("NoneIsGivenTwice", func(t *testing.T) {
		t.Parallel()
		const rate = 1e-4 // hardly any arrive
		w := world.New(t)
		took, fromMemory := prefetchFleet(t, w, rate), 0
		for _, d := range took {
			if d.Prefetched {
				fromMemory++
			}
		}
		stranded := acrossProcesses(rate).Capacity - float64(len(took)) - w.Held(t, "across", "hot")
		require.GreaterOrEqual(t, stranded, -1.0)
		require.LessOrEqual(t, stranded, 2*acrossProcesses(rate).Capacity/8, "a process keeps so much at most")
		require.Greater(t, fromMemory, len(took)/2)
	})
}

// prefetchFleet returns the decisions of eight processes by which they were given tokens.
func prefetchFleet(t *testing.T, w *world.World, rate float64) (took []decided) {
	t.Helper()
	var processes [8]*process
	require.NoError(t, atonce.Do(len(processes), func(n int) error {
		p := start(t, "prefetching", w.URL(), fmt.Sprint(rate))
		processes[n] = p
		if n >= 2 {
			return p.End()
		}
		p.await(t, 1000, func(decided) bool { return true })
		p.Kill()
		return nil
	}))
	for _, p := range processes {
		took = append(took, p.decisions...)
	}
	return took
}
