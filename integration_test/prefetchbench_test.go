package integration_test

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// BenchmarkHotKey is a Take of one of the keys that 64 callers want, by the row and with tokens that are taken ahead.
func BenchmarkHotKey(b *testing.B) {
	pool, err := pgxpool.New(b.Context(), postgrestest.New(b).Config().ConnString())
	require.NoError(b, err)
	defer pool.Close()
	for _, prefetch := range []time.Duration{0, time.Second} {
		for _, keys := range []int{1, 1000} {
			b.Run(fmt.Sprintf("prefetch=%v/keys=%d", prefetch, keys), func(b *testing.B) {
				limiter, err := ratelimit.New(pool, ratelimit.Config{})
				require.NoError(b, err)
				name := fmt.Sprintf("hot.%v.%d", prefetch.Milliseconds(), keys)
				limit := ratelimit.Define(name, ratelimit.TokenBucket{Rate: 1e9, Period: time.Second, Capacity: 1e12, Prefetch: prefetch})
				var callers atomic.Int64
				b.SetParallelism(32)
				b.RunParallel(func(pb *testing.PB) {
					for i := int(callers.Add(1)) * 37; pb.Next(); i++ {
						if d, err := limiter.Take(b.Context(), limit.For(fmt.Sprint(i%keys))); err != nil || !d.Allowed {
							b.Error(d, err)
							return
						}
					}
				})
				require.NoError(b, limiter.Close(b.Context()))
			})
		}
	}
}
