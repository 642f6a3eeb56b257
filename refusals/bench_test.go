package refusals

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// benchmarkCounter returns a Counter that writes nowhere.
func benchmarkCounter(b *testing.B, config Config) *Counter {
	b.Helper()
	c, err := New(postgrestest.NewEmpty(b), config)
	require.NoError(b, err)
	return c
}

// refusals returns refusals of n keys.
func refusals(n int) []ratelimit.Refusal {
	all := make([]ratelimit.Refusal, n)
	for i := range all {
		all[i] = ratelimit.Refusal{Limit: "logins", Route: "POST /login", Key: fmt.Sprintf("2001:db8:%x::/64", i), Cost: 1, At: noon}
	}
	return all
}

// What the hook costs a refusal.
func BenchmarkRefused(b *testing.B) {
	for name, test := range map[string]struct {
		config Config
		keys   int
	}{
		"NoKeys": {Config{}, 1000}, "OneKey": {Config{Keys: true}, 1}, "KnownKeys": {Config{Keys: true}, 5000},
		"Flood": {Config{Keys: true}, 200_000},
	} {
		all := refusals(test.keys)
		b.Run(name, func(b *testing.B) {
			c, ctx := benchmarkCounter(b, test.config), context.Background()
			for _, r := range all {
				c.Refused(ctx, r)
			}
			b.ReportAllocs()
			b.ResetTimer()
			for i := range b.N {
				c.Refused(ctx, all[i%len(all)])
			}
		})
		b.Run(name+"/Parallel", func(b *testing.B) {
			c, ctx := benchmarkCounter(b, test.config), context.Background()
			for _, r := range all {
				c.Refused(ctx, r)
			}
			b.ReportAllocs()
			b.ResetTimer()
			b.RunParallel(func(pb *testing.PB) {
				for i := rand.IntN(len(all)); pb.Next(); i++ {
					c.Refused(ctx, all[i%len(all)])
				}
			})
		})
	}
}

// What counting costs a refused Take, in turns of blocks with and without, in one process. Counting includes the flushes.
func BenchmarkTake(b *testing.B) {
	for name, test := range map[string]struct {
		config ratelimit.Config
		keys   int // few: then each key reads the database only once a second
		block  int
	}{"Database": {ratelimit.Config{}, 1000, 50}, "RefusalCache": {ratelimit.Config{RefusalCache: 1000}, 10, 2000}} {
		b.Run(name, func(b *testing.B) {
			pool, ctx := postgrestest.New(b), ratelimit.WithRoute(context.Background(), "POST /login")
			counter, err := New(pool, Config{Keys: true})
			require.NoError(b, err)
			counting := test.config
			counting.Refused = counter.Refused
			var limiters [2]*ratelimit.Limiter
			for i, config := range []ratelimit.Config{test.config, counting} {
				limiters[i], err = ratelimit.New(pool, config)
				require.NoError(b, err)
			}
			requests := make([]ratelimit.Request, test.keys)
			for i := range requests {
				requests[i] = perDay.For(fmt.Sprintf("2001:db8:%x::/64", i))
				_, err := limiters[0].Take(ctx, requests[i])
				require.NoError(b, err)
			}
			running, stop := context.WithCancel(context.Background())
			ended := make(chan error)
			go func() { ended <- counter.Run(running) }()
			var took [2]time.Duration
			b.ResetTimer()
			blocks := max(b.N/test.block/2, 1)
			for n := range 2 * blocks {
				turn := (n + n/2) % 2 // off, on, on, off
				began := time.Now()
				for i := range test.block {
					if _, err := limiters[turn].Take(ctx, requests[(n/2*test.block+i)%len(requests)]); err != nil {
						b.Fatal(err)
					}
				}
				took[turn] += time.Since(began)
			}
			b.StopTimer()
			stop()
			require.NoError(b, <-ended)
			calls := float64(blocks * test.block)
			b.ReportMetric(float64(took[0].Nanoseconds())/calls, "ns/off")
			b.ReportMetric(float64(took[1].Nanoseconds())/calls, "ns/on")
			b.ReportMetric(float64(took[1])/float64(took[0]), "on/off")
		})
	}
}
