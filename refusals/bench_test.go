package refusals

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"

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
