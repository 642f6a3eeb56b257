package integration_test

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// BenchmarkSlidingWindowHot has 32 callers take from one key at once, of a token bucket and of a sliding window in turns. It
// reports the duration of a decision in the median turn of 3200 decisions.
//
//	go test ./integration_test -run '^$' -bench SlidingWindowHot -benchtime 10x
func BenchmarkSlidingWindowHot(b *testing.B) {
	const callers, each = 32, 100
	pool := postgrestest.New(b, func(p *pgxpool.Config) { p.MaxConns = 8 })
	limiter, err := ratelimit.New(pool, ratelimit.Config{})
	require.NoError(b, err)
	ways := []struct {
		name  string
		limit ratelimit.Limit
		took  []float64
	}{
		{"bucket", ratelimit.Define("bucket", ratelimit.TokenBucket{Rate: 1e9, Period: time.Hour}), nil},
		{"window", ratelimit.Define("window", ratelimit.SlidingWindow{Rate: 1e9, Period: time.Hour}), nil},
	}
	var allowed atomic.Int64
	for range b.N {
		for i := range ways {
			w := &ways[i]
			began := time.Now()
			require.NoError(b, atonce.Do(callers, func(int) error {
				for range each {
					d, err := limiter.Take(b.Context(), w.limit.Global())
					if err != nil {
						return err
					}
					if d.Allowed {
						allowed.Add(1)
					}
				}
				return nil
			}))
			w.took = append(w.took, float64(time.Since(began).Microseconds())/(callers*each))
		}
	}
	require.EqualValues(b, b.N*len(ways)*callers*each, allowed.Load())
	b.ReportMetric(0, "ns/op")
	for _, w := range ways {
		b.ReportMetric(median(w.took), w.name+"-us")
	}
}
