package contender

import (
	"testing"
	"time"

	"github.com/go-redis/redis_rate/v10"
	"github.com/stretchr/testify/require"
)

// A contender that is fast because it does not do its work fails its scenario. Ten keys gain ten tokens in an hour.
func TestExactness(t *testing.T) {
	t.Parallel()
	for gone, exact := range map[float64]bool{1000: true, 991: true, 980: false, 1010: false} {
		of := newBuckets(Bench{}, "limit", 10)
		of.opened = of.opened.Add(-time.Hour)
		err := of.compare(1000, gone)
		require.Equal(t, exact, err == nil, "%v gone: %v", gone, err)
	}
}

// Redis knows the limits that the buckets have.
func TestTheLimitInRedisIsTheSame(t *testing.T) {
	t.Parallel()
	many, hot := redisLimit(100_000), redisLimit(1)
	require.Equal(t, redis_rate.Limit{Rate: 1, Burst: 800_000, Period: time.Hour}, many)
	require.Equal(t, redis_rate.Limit{Rate: 1, Burst: 3_000_000_000, Period: time.Second}, hot)
}
