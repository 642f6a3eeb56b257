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

// denyDesk is a cache, with what the database would answer at opening on a frozen local clock.
type denyDesk struct {
	*denials
	clock time.Time
}

func newDenyDesk(entries int) *denyDesk {
	d := &denyDesk{denials: newDenials(entries, func() *int64 { return nil }), clock: opening}
	d.now = func() time.Duration { return d.clock.Sub(opening) }
	return d
}

// asking returns the plan of a call for one bucket.
func asking(limit Limit, key string, cost float64) *plan {
	return &plan{buckets: []ask{{limit: limit, key: key, terms: limit.termsFor(key), cost: cost}}, asked: []asked{{0, cost}}}
}

// refused remembers that a bucket held tokens at opening, and refused cost.
func (d *denyDesk) refused(p *plan, tokens float64) {
	a := answer{state: bucket.State{Value: tokens, TS: opening.UnixMicro()}, now: opening.UnixMicro()}
	d.keep(p, []answer{a}, d.now(), d.epochs(p, nil))
}

func TestDenyCacheRefusesUntilTheWaitIsOver(t *testing.T) {
	t.Parallel()
	limit := Define("cached", TokenBucket{Rate: 10, Period: time.Second, Capacity: 20})
	d := newDenyDesk(10)
	d.refused(asking(limit, "key", 5), 1)
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
		d.clock = opening.Add(test.after)
		b := asking(limit, "key", test.cost).buckets[0]
		decision, known := d.refuse(&b)
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
	p := asking(limit, "key", 1)
	known := func(d *denyDesk, p *plan) bool {
		_, known := d.refuse(&p.buckets[0])
		return known
	}
	for name, change := range map[string]func(d *denyDesk){
		"WhatIsASecondOld":     func(d *denyDesk) { d.clock = d.clock.Add(denyMaxAge) },
		"WhatWasChanged":       func(d *denyDesk) { d.drop(p.buckets[0].bucketKey()) },
		"AnotherPolicysAnswer": func(d *denyDesk) { known(d, asking(Define("cached", PerMinute(2)), "key", 1)) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := newDenyDesk(10)
			require.False(t, known(d, p))
			d.refused(p, 0)
			require.True(t, known(d, p))
			require.False(t, known(d, asking(limit, "other", 1)))
			change(d)
			require.False(t, known(d, p))
		})
	}
	t.Run("ARefusalFromBeforeTokensWereGivenBack", func(t *testing.T) {
		t.Parallel()
		d := newDenyDesk(10)
		epochs := d.epochs(p, nil)
		d.drop(p.buckets[0].bucketKey()) // while the call was on its way
		d.keep(p, []answer{{state: bucket.State{Value: 0, TS: opening.UnixMicro()}, now: opening.UnixMicro()}}, d.now(), epochs)
		require.False(t, known(d, p))
	})
	t.Run("ARefusalWhoseBucketIsFilledWhileItIsStored", func(t *testing.T) {
		t.Parallel()
		d := newDenyDesk(10)
		epochs, clock := d.epochs(p, nil), d.now
		d.now = func() time.Duration { // keep asks for the time when it has the answer and has not stored it
			d.drop(p.buckets[0].bucketKey())
			return clock()
		}
		d.keep(p, []answer{{state: bucket.State{Value: 0, TS: opening.UnixMicro()}, now: opening.UnixMicro()}}, 0, epochs)
		d.now = clock
		require.False(t, known(d, p))
	})
	t.Run("NothingOfOtherBuckets", func(t *testing.T) {
		t.Parallel()
		d := newDenyDesk(10)
		epochs := d.epochs(p, nil)
		k := p.buckets[0].bucketKey()
		stranger := bucket.Key{Name: "cached"}
		for i := 0; d.stripe(stranger) != d.stripe(k) || d.slot(stranger) == d.slot(k); i++ {
			stranger.Key = fmt.Sprint("stranger", i)
		}
		d.drop(stranger)
		d.keep(p, []answer{{state: bucket.State{Value: 0, TS: opening.UnixMicro()}, now: opening.UnixMicro()}}, d.now(), epochs)
		require.True(t, known(d, p))
	})
}

// A call for several limits needs all of their states, and one that refuses.
func TestDenyCacheRefusesSeveralLimits(t *testing.T) {
	t.Parallel()
	minute, hour := Define("minute", PerMinute(10)), Define("hour", PerHour(100))
	several := func(a, b float64) *plan {
		p := asking(hour, "key", a)
		p.buckets = append(p.buckets, asking(minute, "key", b).buckets...)
		p.asked = []asked{{1, b}, {0, a}}
		return p
	}
	d := newDenyDesk(100)
	now := opening.UnixMicro()
	d.keep(several(1, 4), []answer{
		{allowed: true, state: bucket.State{Value: 50, TS: now}, now: now},
		{state: bucket.State{Value: 3, TS: now}, now: now},
	}, d.now(), d.epochs(several(1, 4), nil))
	decision, known := d.refuseAll(several(1, 4))
	require.True(t, known)
	require.False(t, decision.Allowed)
	require.Equal(t, 6*time.Second, decision.RetryAfter)
	require.Equal(t, 3.0, decision.Remaining)
	require.Equal(t, "minute", decision.States[0].Limit.Name(), "in the order asked")
	require.False(t, decision.States[0].Allowed)
	require.True(t, decision.States[1].Allowed)
	require.Equal(t, 50.0, decision.States[1].Remaining)
	_, known = d.refuseAll(several(1, 3))
	require.False(t, known, "nobody has asked the minute for so little")
	_, known = d.refuse(&asking(hour, "key", 1).buckets[0])
	require.False(t, known, "the hour allowed")
	p := several(1, 4)
	p.buckets[0].key = "stranger"
	_, known = d.refuseAll(p)
	require.False(t, known)
}

func TestDenyCacheIsBounded(t *testing.T) {
	t.Parallel()
	limit := Define("cached", PerMinute(1))
	d := newDenyDesk(1000)
	for i := range 20_000 {
		d.refused(asking(limit, fmt.Sprint("key", i), 1), 0)
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
		limit := Define("cached", PerSecond(1))
		d := newDenials(10, func() *int64 { return nil })
		p := asking(limit, "key", 1)
		asked, epochs := d.now(), d.epochs(p, nil)
		time.Sleep(50 * time.Millisecond) // the database answers: 0 tokens, so 1 s to wait
		answered := time.Now()
		a := answer{state: bucket.State{Value: 0, TS: answered.UnixMicro()}, now: answered.UnixMicro()}
		time.Sleep(50 * time.Millisecond) // the answer travels
		d.keep(p, []answer{a}, asked, epochs)
		for {
			decision, known := d.refuse(&p.buckets[0])
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
	limit := Define("cached", TokenBucket{Rate: 1, Period: math.MaxInt32 * time.Microsecond})
	d := newDenials(1000, func() *int64 { return nil })
	l := &Limiter{denials: d, pool: &recorder{}, queues: newQueues(), batcher: newBatcher(&Limiter{})}
	l.db = l.pool
	now := time.Now().UnixMicro()
	p := asking(limit, "user:4711", 1)
	requests := []Request{limit.For("user:4711")}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		if i%100_000 == 0 { // before it is too old
			d.keep(p, []answer{{state: bucket.State{Value: 0, TS: now}, now: now}}, d.now(), d.epochs(p, nil))
		}
		if decision, err := l.Take(b.Context(), requests...); err != nil || decision.Allowed {
			b.Fatal(decision, err)
		}
	}
}
