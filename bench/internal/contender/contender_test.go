package contender

import (
	"testing"
	"time"

	"github.com/go-redis/redis_rate/v10"
	"github.com/stretchr/testify/require"
)

func TestTheOutputOfPGBench(t *testing.T) {
	t.Parallel()
	got, err := parseThroughput("number of clients: 16\nlatency average = 1.234 ms\ntps = 12345.678901 (without initial connection time)\n")
	require.NoError(t, err)
	require.InDelta(t, 12345.678901, got, 1e-6)
	_, err = parseThroughput("pgbench: error: connection failed")
	require.ErrorContains(t, err, "connection failed")
	took, err := parseLog(nil, "0 1 279 0 1741689600 123456\n1 1 3105 0 1741689600 123999\n")
	require.NoError(t, err)
	require.Equal(t, []time.Duration{279 * time.Microsecond, 3105 * time.Microsecond}, took)
	for _, log := range []string{"0 1 skipped 0 1741689600 123456\n", "0 1\n"} {
		_, err = parseLog(nil, log)
		require.Error(t, err, log)
	}
}

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

// What other clients send to Redis is what redis_rate sends.
func TestTheScriptOfRedisRate(t *testing.T) {
	t.Parallel()
	script, err := redisScript(t.Context())
	require.NoError(t, err)
	require.Contains(t, script, "emission_interval")
	require.Contains(t, script, `redis.call("TIME")`)
}

// Redis knows the limits that the buckets have.
func TestTheLimitInRedisIsTheSame(t *testing.T) {
	t.Parallel()
	many, hot := redisLimit(100_000), redisLimit(1)
	require.Equal(t, redis_rate.Limit{Rate: 1, Burst: 800_000, Period: time.Hour}, many)
	require.Equal(t, redis_rate.Limit{Rate: 1, Burst: 3_000_000_000, Period: time.Second}, hot)
}
