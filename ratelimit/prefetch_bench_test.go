package ratelimit

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// BenchmarkPrefetch is what a Take costs that is answered with prefetched tokens, with the Decision, but without the database: all tokens are prefetched before.
func BenchmarkPrefetch(b *testing.B) {
	limit := Define("hot", TokenBucket{Rate: 1e6, Period: time.Second, Capacity: 1e12, Prefetch: time.Hour})
	for _, keys := range []int{1, 1000} {
		limiter, requests := prefetchedFor(b, limit, keys)
		b.Run(fmt.Sprintf("keys=%d", keys), func(b *testing.B) {
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				if d, err := limiter.Take(b.Context(), requests[i%keys]); err != nil || !d.Allowed {
					b.Fatal(d, err)
				}
			}
		})
		b.Run(fmt.Sprintf("keys=%d/parallel", keys), func(b *testing.B) {
			b.ReportAllocs()
			var workers atomic.Int64
			b.RunParallel(func(pb *testing.PB) {
				for i := int(workers.Add(1)) * 37; pb.Next(); i++ {
					if d, err := limiter.Take(b.Context(), requests[i%keys]); err != nil || !d.Allowed {
						b.Fatal(d, err)
					}
				}
			})
		})
	}
}

// prefetchedFor returns a Limiter that has prefetched tokens of each of that many keys.
func prefetchedFor(b *testing.B, limit Limit, keys int) (*Limiter, []Request) {
	b.Helper()
	limiter, err := New(&answering{rows: oneRow{allowed: true, value: 1e12}}, Config{})
	require.NoError(b, err)
	requests := make([]Request, keys)
	for i := range requests {
		requests[i] = limit.For(fmt.Sprint("key ", i))
		for range 4 { // so the prefetch holds at least as many tokens
			d, err := limiter.Take(b.Context(), requests[i].Cost(1e10))
			require.NoError(b, err)
			require.True(b, d.Allowed)
		}
	}
	return limiter, requests
}
