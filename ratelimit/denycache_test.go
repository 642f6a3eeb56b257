package ratelimit

import (
	"fmt"
	"math"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// cacheMade is when the caches of these tests are made.
var cacheMade = time.Date(2026, time.March, 2, 0, 0, 0, 0, time.UTC)

// cacheStand is a cache on a local clock that stands still, and the database's clock, which is the same.
type cacheStand struct {
	*denyCache
	clock time.Time
}

func newCacheStand(entries int) *cacheStand {
	d := &cacheStand{denyCache: newDenyCache(entries, nil), clock: cacheMade}
	d.now = func() time.Duration { return d.clock.Sub(cacheMade) }
	return d
}

// calling returns a call for the requests.
func calling(t testing.TB, requests ...Request) *call {
	t.Helper()
	c := &call{}
	require.NoError(t, c.plan.arrange(t.Context(), &Limiter{}, verbTake, requests))
	c.Asks = c.plan.asks
	return c
}

// refusedAt returns the answer that a bucket held tokens at an instant and refuses.
func refusedAt(instant time.Time, tokens float64) bucket.Answer {
	return bucket.Answer{State: bucket.State{Value: tokens, TS: instant.UnixMicro()}, Now: instant.UnixMicro()}
}

// knows returns the decision on a request if the cache knows that it is a refusal.
func (d *denyCache) knows(r Request) (Decision, bool) {
	return d.refuse(&bucket.Ask{Key: bucket.Key{Name: r.limit.Name(), Key: r.key}, Cost: r.cost}, &subject{limit: r.limit, mode: On})
}

// refused remembers that a bucket held tokens when the cache was made, and refused the request.
func (d *cacheStand) refused(t *testing.T, r Request, tokens float64) {
	t.Helper()
	c := calling(t, r)
	c.Answers = []bucket.Answer{refusedAt(cacheMade, tokens)}
	d.keep(c, d.now(), d.epochs(c.Asks, nil))
}

func TestDenyCacheRefusesUntilTheWaitIsOver(t *testing.T) {
	t.Parallel()
	limit := Define("cached", TokenBucket{Rate: 10, Period: time.Second, Capacity: 20})
	d := newCacheStand(10)
	d.refused(t, limit.For("key").Cost(5), 1)
	for _, test := range []struct {
		after time.Duration
		cost  float64
		wait  time.Duration // 0: it has to be asked
	}{
		{0, 5, 400 * time.Millisecond},
		{0, 20, 1900 * time.Millisecond},
		{0, 4, 0}, // nobody has asked for so little
		{100 * time.Millisecond, 5, 300 * time.Millisecond},
		{100 * time.Millisecond, 6, 400 * time.Millisecond},
		{400*time.Millisecond - time.Microsecond, 5, time.Microsecond},
		{400 * time.Millisecond, 5, 0},
		{400 * time.Millisecond, 20, 0},
	} {
		d.clock = cacheMade.Add(test.after)
		decision, known := d.knows(limit.For("key").Cost(test.cost))
		require.Equal(t, test.wait > 0, known, "%+v", test)
		if !known {
			continue
		}
		require.False(t, decision.Allowed)
		require.Equal(t, test.wait, decision.RetryAfter, "%+v", test)
		require.Equal(t, d.clock.UnixMicro(), decision.At.UnixMicro())
		require.InDelta(t, 1+test.after.Seconds()*10, decision.Remaining, 1e-6)
		require.Equal(t, 1900*time.Millisecond-test.after, decision.ResetAfter)
		require.Len(t, decision.States, 1)
		require.Equal(t, test.cost, decision.States[0].Cost)
		require.Equal(t, limit.Name(), decision.States[0].Limit.Name())
	}
}

func TestDenyCacheForgets(t *testing.T) {
	t.Parallel()
	limit := Define("cached", PerMinute(1))
	request, key := limit.For("key"), bucket.Key{Name: "cached", Key: "key"}
	known := func(d *cacheStand, r Request) bool {
		_, known := d.knows(r)
		return known
	}
	for name, change := range map[string]func(d *cacheStand){
		"WhatIsASecondOld":     func(d *cacheStand) { d.clock = d.clock.Add(denyMaxAge) },
		"WhatWasChanged":       func(d *cacheStand) { d.invalidate(key) },
		"AnotherPolicysAnswer": func(d *cacheStand) { known(d, Define("cached", PerMinute(2)).For("key")) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := newCacheStand(10)
			require.False(t, known(d, request))
			d.refused(t, request, 0)
			require.True(t, known(d, request))
			require.False(t, known(d, limit.For("other")))
			change(d)
			require.False(t, known(d, request))
		})
	}
	refused := func(t *testing.T) *call {
		t.Helper()
		c := calling(t, request)
		c.Answers = []bucket.Answer{refusedAt(cacheMade, 0)}
		return c
	}
	t.Run("ARefusalFromBeforeTokensWereGivenBack", func(t *testing.T) {
		t.Parallel()
		d, c := newCacheStand(10), refused(t)
		epochs := d.epochs(c.Asks, nil)
		d.invalidate(key) // while the call was on its way
		d.keep(c, d.now(), epochs)
		require.False(t, known(d, request))
	})
	t.Run("ARefusalWhoseBucketIsFilledWhileItIsStored", func(t *testing.T) {
		t.Parallel()
		d, c := newCacheStand(10), refused(t)
		epochs, clock := d.epochs(c.Asks, nil), d.now
		d.now = func() time.Duration { // keep asks for the time when it has the answer and has not stored it
			d.invalidate(key)
			return clock()
		}
		d.keep(c, 0, epochs)
		d.now = clock
		require.False(t, known(d, request))
	})
	t.Run("NothingOfOtherBuckets", func(t *testing.T) {
		t.Parallel()
		d, c := newCacheStand(10), refused(t)
		epochs := d.epochs(c.Asks, nil)
		stranger := bucket.Key{Name: "cached"}
		for i := 0; d.stripe(stranger) != d.stripe(key) || d.slot(stranger) == d.slot(key); i++ {
			stranger.Key = fmt.Sprint("stranger", i)
		}
		d.invalidate(stranger)
		d.keep(c, d.now(), epochs)
		require.True(t, known(d, request))
	})
}

// A call for several limits needs all of their states, and one that refuses.
func TestDenyCacheRefusesSeveralLimits(t *testing.T) {
	t.Parallel()
	minute, hour := Define("minute", PerMinute(10)), Define("hour", PerHour(100))
	several := func(a, b float64) *call { return calling(t, minute.For("key").Cost(b), hour.For("key").Cost(a)) }
	d := newCacheStand(100)
	c := several(1, 4)
	c.Answers = []bucket.Answer{refusedAt(cacheMade, 50), refusedAt(cacheMade, 3)} // in the order of locking
	c.Answers[0].Allowed = true
	d.keep(c, d.now(), d.epochs(c.Asks, nil))
	decision, known := d.refuseAll(&several(1, 4).plan)
	require.True(t, known)
	require.False(t, decision.Allowed)
	require.Equal(t, 6*time.Second, decision.RetryAfter)
	require.Equal(t, 3.0, decision.Remaining)
	require.Equal(t, "minute", decision.States[0].Limit.Name(), "in the order asked")
	require.False(t, decision.States[0].Allowed)
	require.True(t, decision.States[1].Allowed)
	require.Equal(t, 50.0, decision.States[1].Remaining)
	_, known = d.refuseAll(&several(1, 3).plan)
	require.False(t, known, "nobody has asked the minute for so little")
	_, known = d.knows(hour.For("key"))
	require.False(t, known, "the hour allowed")
	_, known = d.refuseAll(&calling(t, minute.For("key").Cost(4), hour.For("stranger")).plan)
	require.False(t, known)
}

func TestDenyCacheIsBounded(t *testing.T) {
	t.Parallel()
	limit := Define("cached", PerMinute(1))
	d := newCacheStand(1000)
	for i := range 20_000 {
		d.refused(t, limit.For(fmt.Sprint("key", i)), 0)
	}
	entries := 0
	for i := range d.stripes {
		entries += len(d.stripes[i].of)
	}
	require.LessOrEqual(t, entries, 1000+denyStripes)
	require.Greater(t, entries, 900)
}

// A wait that is counted from the cache is never too short, and the entry is gone when it is over, however
// slow the answer was.
func TestDenyCacheKnowsNoMoreThanTheDatabaseSaid(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		request := Define("cached", PerSecond(1)).For("key")
		d, c := newDenyCache(10, nil), calling(t, request)
		asked, epochs := d.now(), d.epochs(c.Asks, nil)
		time.Sleep(50 * time.Millisecond) // the database answers: 0 tokens, so 1 s to wait
		answered := time.Now()
		c.Answers = []bucket.Answer{refusedAt(answered, 0)}
		time.Sleep(50 * time.Millisecond) // the answer travels
		d.keep(c, asked, epochs)
		for {
			decision, known := d.knows(request)
			if !known {
				break
			}
			require.False(t, time.Now().Add(decision.RetryAfter).Before(answered.Add(time.Second)), "it would come back too early")
			time.Sleep(time.Millisecond)
		}
		require.False(t, time.Now().After(answered.Add(time.Second)), "it refused for too long")
	})
}

func BenchmarkDenyCache(b *testing.B) {
	request := Define("cached", TokenBucket{Rate: 1, Period: math.MaxInt32 * time.Microsecond}).For("user:4711")
	l, err := New(&struct{ Pool }{}, Config{DenyCache: 1000})
	require.NoError(b, err)
	c := calling(b, request)
	c.Answers = []bucket.Answer{refusedAt(time.Now(), 0)}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		if i%10_000 == 0 { // before it is too old
			l.cache.keep(c, l.cache.now(), l.cache.epochs(c.Asks, nil))
		}
		if decision, err := l.Take(b.Context(), request); err != nil || decision.Allowed {
			b.Fatal(decision, err)
		}
	}
}
