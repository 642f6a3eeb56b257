package integration_test

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// The environment of TestPrefetchProcess.
const (
	prefetchProcessURL  = "RATELIMIT_TEST_PREFETCH_URL"  // makes it a process of TestPrefetchAcrossProcesses
	prefetchProcessRate = "RATELIMIT_TEST_PREFETCH_RATE" // of its limit, in tokens a second
)

// acrossProcesses is the limit that the processes share.
func acrossProcesses(rate float64) ratelimit.TokenBucket {
	return ratelimit.TokenBucket{Rate: rate, Period: time.Second, Capacity: 20_000, Prefetch: 500 * time.Millisecond}
}

// TestPrefetchProcess is not a test but a process: it takes as fast as it can until it has asked often enough, or there is
// nothing to be had any more, or it is killed. It writes the instant of each token that it was given before it asks for the next.
func TestPrefetchProcess(t *testing.T) { //nolint:paralleltest // alone in its process
	url := os.Getenv(prefetchProcessURL)
	if url == "" {
		t.Skip("a process of another test")
	}
	rate, err := strconv.ParseFloat(os.Getenv(prefetchProcessRate), 64)
	require.NoError(t, err)
	pool, err := pgxpool.New(t.Context(), url)
	require.NoError(t, err)
	defer pool.Close()
	limiter, err := ratelimit.New(pool, ratelimit.Config{Timeout: time.Minute})
	require.NoError(t, err)
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

// Processes share a key at full speed, and two of them are killed. By the instants that their callers were told, no span
// has more than the capacity and what arrives in it.
func TestPrefetchAcrossProcesses(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("eight processes")
	}
	t.Run("NoSpanHasMore", func(t *testing.T) {
		t.Parallel()
		const rate = 2000
		took, _ := prefetchFleet(t, setup(t), rate)
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
		b := setup(t)
		took, fromMemory := prefetchFleet(t, b, rate)
		left := b.held(t, "across", "hot")
		stranded := acrossProcesses(rate).Capacity - float64(len(took)) - left
		t.Logf("%d admitted, %d of them from memory; %.2f left, %.2f stranded", len(took), fromMemory, left, stranded)
		require.GreaterOrEqual(t, stranded, -1.0)
		require.LessOrEqual(t, stranded, 2*acrossProcesses(rate).Capacity/8, "a process keeps so much at most")
		require.Greater(t, fromMemory, len(took)/2)
	})
}

// prefetchFleet returns the instants at which eight processes were given tokens, in order, and how many were from memory.
func prefetchFleet(t *testing.T, b *bundle, rate float64) (took []int64, fromMemory int) {
	t.Helper()
	var mu sync.Mutex
	require.NoError(t, atonce.Do(8, func(n int) error {
		ctx, kill := context.WithCancel(t.Context())
		defer kill()
		process := exec.CommandContext(ctx, os.Args[0], "-test.run=^TestPrefetchProcess$")
		process.Env = append(os.Environ(), prefetchProcessURL+"="+b.pool.Config().ConnString(), fmt.Sprint(prefetchProcessRate, "=", rate))
		out, err := process.StdoutPipe()
		if err != nil {
			return err
		}
		if err := process.Start(); err != nil {
			return err
		}
		count := 0
		for lines := bufio.NewScanner(out); lines.Scan(); {
			var at int64
			var memory bool
			if _, err := fmt.Sscanf(lines.Text(), "took %d %t", &at, &memory); err != nil {
				continue // what a test says at its end
			}
			mu.Lock()
			took = append(took, at)
			if memory {
				fromMemory++
			}
			mu.Unlock()
			if count++; n < 2 && count == 1000 {
				kill()
			}
		}
		if err := process.Wait(); n >= 2 {
			return err
		}
		return nil
	}))
	slices.Sort(took)
	return took, fromMemory
}
