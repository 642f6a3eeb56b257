package processes_test

import (
	"fmt"
	"slices"
	"strconv"
	"sync"
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
// without tokens, or when it is killed. It writes the instant of each token that it was given before it takes the next.
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
		_, err = fmt.Printf("took %d %t\n", d.At.UnixMicro(), d.States[0].Prefetched)
		require.NoError(t, err)
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
		took, _ := prefetchFleet(t, world.New(t), rate)
		level, last, highest := 0.0, took[0], 0.0
		for _, at := range took {
			level = max(level-float64(at-last)*rate/1e6, 0) + 1
			last, highest = at, max(highest, level)
		}
		t.Logf("%d tokens in %v, at most %.0f beyond the rate", len(took), time.Duration(last-took[0])*time.Microsecond, highest)
		require.LessOrEqual(t, highest, acrossProcesses(rate).Capacity)
	})
	t.Run("NoneIsGivenTwice", func(t *testing.T) {
		t.Parallel()
		const rate = 1e-4 // hardly any arrive
		w := world.New(t)
		took, fromMemory := prefetchFleet(t, w, rate)
		left := w.Held(t, "across", "hot")
		stranded := acrossProcesses(rate).Capacity - float64(len(took)) - left
		t.Logf("%d admitted, %d of them from memory; %.2f left, %.2f stranded", len(took), fromMemory, left, stranded)
		require.GreaterOrEqual(t, stranded, -1.0)
		require.LessOrEqual(t, stranded, 2*acrossProcesses(rate).Capacity/8, "a process keeps so much at most")
		require.Greater(t, fromMemory, len(took)/2)
	})
}

// prefetchFleet returns the instants at which eight processes were given tokens, in order, and how many were from memory.
func prefetchFleet(t *testing.T, w *world.World, rate float64) (took []int64, fromMemory int) {
	t.Helper()
	var mu sync.Mutex
	require.NoError(t, atonce.Do(8, func(n int) error {
		count, enough := 0, make(chan struct{})
		p := start(t, "prefetching", w.URL(), func(line string) bool {
			var at int64
			var memory bool
			if _, err := fmt.Sscanf(line, "took %d %t", &at, &memory); err != nil {
				return false
			}
			mu.Lock()
			defer mu.Unlock()
			took = append(took, at)
			if memory {
				fromMemory++
			}
			if count++; count == 1000 {
				close(enough)
			}
			return true
		}, fmt.Sprint(rate))
		if n >= 2 {
			return p.wait()
		}
		select {
		case <-enough:
			p.kill()
		case <-p.ended:
		}
		return nil
	}))
	slices.Sort(took)
	return took, fromMemory
}
