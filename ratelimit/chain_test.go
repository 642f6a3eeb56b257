package ratelimit

import (
	"math"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// calling returns a call for the requests.
func calling(t testing.TB, requests ...Request) *call {
	t.Helper()
	c := &call{}
	require.NoError(t, c.plan.arrange(t.Context(), &Limiter{}, verbTake, requests))
	c.Asks = c.plan.asks
	return c
}

// refused has the Limiter remember that a call was refused now, because its buckets held these tokens.
func refused(t testing.TB, l *Limiter, tokens []float64, requests ...Request) {
	t.Helper()
	c, now := calling(t, requests...), time.Now().UnixMicro()
	for i, value := range tokens {
		c.Answers = append(c.Answers, bucket.Answer{State: bucket.State{Value: value, TS: now}, Now: now, Allowed: value >= c.Asks[i].Cost})
	}
	l.cache.Keep(l.cache.Send(c.Asks, nil), c.Asks, c.Answers)
}

// The refusal cache reports a refusal of several limits in the order of the requests.
func TestARememberedRefusalIsToldInTheOrderAsked(t *testing.T) {
	t.Parallel()
	minute, hour := Define("minute", PerMinute(10)), Define("hour", PerHour(100))
	l, err := New(&struct{ Pool }{}, Config{RefusalCache: 100})
	require.NoError(t, err)
	refused(t, l, []float64{50, 3}, minute.For("key").Cost(4), hour.For("key")) // in the order of locking
	d, err := l.Take(t.Context(), minute.For("key").Cost(4), hour.For("key"))
	require.NoError(t, err)
	require.False(t, d.Allowed)
	require.InDelta(t, 6, d.RetryAfter.Seconds(), 1)
	require.InDelta(t, 3, d.Remaining, 1)
	require.Equal(t, "minute", d.States[0].Limit.Name())
	require.False(t, d.States[0].Allowed)
	require.InDelta(t, 4, d.States[0].Cost, 0)
	require.True(t, d.States[1].Allowed)
	require.InDelta(t, 50, d.States[1].Remaining, 1)
}

func BenchmarkRefusalCache(b *testing.B) {
	request := Define("cached", TokenBucket{Rate: 1, Period: math.MaxInt32 * time.Microsecond}).For("user:4711")
	l, err := New(&struct{ Pool }{}, Config{RefusalCache: 1000})
	require.NoError(b, err)
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		if i%10_000 == 0 { // before it is too old
			refused(b, l, []float64{0}, request)
		}
		if decision, err := l.Take(b.Context(), request); err != nil || decision.Allowed {
			b.Fatal(decision, err)
		}
	}
}

// switching is a pool that changes to another one.
type switching struct{ Pool }

// The Observer receives a Failed if prefetched tokens cannot be returned.
func TestTokensThatCannotBeReturnedAreReported(t *testing.T) {
	t.Parallel()
	pool, heard := &switching{&answering{rows: oneRow{allowed: true, value: 1e12}}}, &heardEvents{}
	limiter, err := New(pool, Config{Observer: heard})
	require.NoError(t, err)
	request := Define("hot", TokenBucket{Rate: 1e6, Period: time.Second, Capacity: 1e12, Prefetch: time.Hour}).For("alice")
	for range 4 { // so that tokens are prefetched
		require.NoError(t, limiter.Require(t.Context(), request.Cost(1e10)))
	}
	pool.Pool = &nowhere{}
	_ = limiter.Close(t.Context())
	i := slices.IndexFunc(heard.events, func(e Event) bool { _, is := e.(Failed); return is })
	require.GreaterOrEqual(t, i, 0)
	failed := heard.events[i].(Failed)
	require.Equal(t, "return hot", failed.Verb+" "+failed.Limit)
	require.ErrorIs(t, failed.Err, errNowhere)
}
