package contender_test

import (
	"testing"
	"time"

	"github.com/go-redis/redis_rate/v10"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/bench/internal/contender"
)

func TestWhatPGBenchWrites(t *testing.T) {
	t.Parallel()
	t.Run("ItsThroughput", func(t *testing.T) {
		t.Parallel()
		const output = "number of clients: 16\nlatency average = 1.234 ms\ninitial connection time = 7.080 ms\ntps = 12345.678901 (without initial connection time)\n"
		got, err := contender.ParseThroughput(output)
		require.NoError(t, err)
		require.InDelta(t, 12345.678901, got, 1e-6)
	})
	t.Run("NothingIsAnError", func(t *testing.T) {
		t.Parallel()
		_, err := contender.ParseThroughput("pgbench: error: connection failed")
		require.ErrorContains(t, err, "connection failed")
	})
	t.Run("ItsLog", func(t *testing.T) {
		t.Parallel()
		got, err := contender.ParseLog(nil, "0 1 279 0 1741689600 123456\n1 1 3105 0 1741689600 123999\n")
		require.NoError(t, err)
		require.Equal(t, []time.Duration{279 * time.Microsecond, 3105 * time.Microsecond}, got)
	})
	t.Run("ALogThatIsNoneIsAnError", func(t *testing.T) {
		t.Parallel()
		_, err := contender.ParseLog(nil, "0 1 skipped 0 1741689600 123456\n")
		require.Error(t, err)
		_, err = contender.ParseLog(nil, "0 1\n")
		require.Error(t, err)
	})
}

// A contender that is fast because it does not do its work fails its scenario.
func TestExactness(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		admitted, gone float64
		exact          bool
	}{
		"AdmittedTokensAreGone":       {1000, 1000, true},
		"SomeHaveArrivedAgain":        {1000, 991, true},
		"MoreWereAdmittedThanAreGone": {1000, 980, false},
		"MoreAreGoneThanWereAdmitted": {1000, 1010, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			// Ten keys gain ten tokens in an hour.
			err := contender.CompareAfter(time.Hour, 10, test.admitted, test.gone)
			require.Equal(t, test.exact, err == nil, "%v", err)
		})
	}
}

// What other clients send to Redis is what redis_rate sends.
func TestTheScriptOfRedisRate(t *testing.T) {
	t.Parallel()
	script, err := contender.RedisScript(t.Context())
	require.NoError(t, err)
	require.Contains(t, script, "emission_interval")
	require.Contains(t, script, `redis.call("TIME")`)
}

// Redis knows the limits that the buckets have.
func TestTheLimitInRedisIsTheSame(t *testing.T) {
	t.Parallel()
	many, hot := contender.RedisLimit(100_000), contender.RedisLimit(1)
	require.Equal(t, redis_rate.Limit{Rate: 1, Burst: 800_000, Period: time.Hour}, many)
	require.Equal(t, redis_rate.Limit{Rate: 1, Burst: 3_000_000_000, Period: time.Second}, hot)
}
