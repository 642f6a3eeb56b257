package integration_test

import (
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// BenchmarkLeases has goroutines acquire and release a slot beside others that take a token, all under keys of their own.
func BenchmarkLeases(b *testing.B) {
	pool := postgrestest.New(b)
	limiter, err := ratelimit.New(pool, ratelimit.Config{})
	require.NoError(b, err)
	jobs, tokens := daylong("jobs", 4), ratelimit.Define("tokens", hoard(1e12))
	for _, bench := range []struct {
		name string
		call func(key string) error
	}{
		{"Take", func(key string) error {
			_, err := limiter.Take(b.Context(), tokens.For(key))
			return err
		}},
		{"AcquireAndRelease", func(key string) error {
			lease, err := limiter.Acquire(b.Context(), jobs.For(key))
			if err != nil {
				return err
			}
			return limiter.Release(b.Context(), lease.ID)
		}},
	} {
		for _, callers := range []int{1, 8} {
			b.Run(fmt.Sprintf("%s/%d", bench.name, callers), func(b *testing.B) {
				var left atomic.Int64
				left.Store(int64(b.N))
				require.NoError(b, atonce.Do(callers, func(caller int) error {
					for left.Add(-1) >= 0 {
						if err := bench.call(fmt.Sprint("key ", caller)); err != nil {
							return err
						}
					}
					return nil
				}))
				b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "calls/s")
			})
		}
	}
}
