package refusalcache

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
)

// cacheMade is when the tests make their caches.
var cacheMade = time.Date(2026, time.March, 2, 0, 0, 0, 0, time.UTC)

// stand is a cache on a local clock that stands still, and the database's clock, which is the same.
type stand struct {
	*Cache
	clock time.Time
}

func newStand(entries int) *stand {
	c := &stand{Cache: New(entries, nil), clock: cacheMade}
	c.now = func() time.Duration { return c.clock.Sub(cacheMade) }
	return c
}

// ask returns an ask for a bucket with that capacity and rate a second.
func ask(name, key string, rate, capacity, cost float64) bucket.Ask {
	terms := bucket.Terms{Kind: bucket.Steps{}, Capacity: capacity, Rate: rate, Steps: 1e6, Step: 1}
	return bucket.Ask{Key: bucket.Key{Name: name, Key: key}, Terms: terms, Policy: terms, Cost: cost}
}

// refusedAt returns the answer that a bucket held tokens at an instant and refuses.
func refusedAt(instant time.Time, tokens float64) bucket.Answer {
	return bucket.Answer{State: bucket.State{Value: tokens, TS: instant.UnixMicro()}, Now: instant.UnixMicro()}
}

// knows returns the answer for an ask if the cache refuses it.
func (c *Cache) knows(a bucket.Ask) (bucket.Outcome, bool) {
	told, refused := c.Refuse([]bucket.Ask{a}, nil)
	if !refused {
		return bucket.Outcome{}, false
	}
	return told[0], true
}

// sent notes a call before it is sent.
func (c *Cache) sent(asks ...bucket.Ask) Sent { return c.Send(asks, nil) }

// refused remembers that a bucket held tokens when the cache was made, and refused the ask.
func (c *stand) refused(a bucket.Ask, tokens float64) {
	c.Keep(c.sent(a), []bucket.Ask{a}, []bucket.Answer{refusedAt(cacheMade, tokens)})
}

func TestRefusalCacheRefusesUntilTheWaitIsOver(t *testing.T) {
	t.Parallel()
	of := func(cost float64) bucket.Ask { return ask("cached", "key", 10, 20, cost) }
	c := newStand(10)
	c.refused(of(5), 1)
	for _, test := range []struct {
		after time.Duration
		cost  float64
		wait  time.Duration // 0: the call goes to the database
	}{
		{0, 5, 400 * time.Millisecond},
		{0, 20, 1900 * time.Millisecond},
		{0, 4, 0}, // no call has requested so little
		{100 * time.Millisecond, 5, 300 * time.Millisecond},
		{100 * time.Millisecond, 6, 400 * time.Millisecond},
		{400*time.Millisecond - time.Microsecond, 5, time.Microsecond},
		{400 * time.Millisecond, 5, 0},
		{400 * time.Millisecond, 20, 0},
	} {
		c.clock = cacheMade.Add(test.after)
		told, known := c.knows(of(test.cost))
		require.Equal(t, test.wait > 0, known, "%+v", test)
		if !known {
			continue
		}
		require.False(t, told.Allowed)
		require.Equal(t, test.wait, told.RetryAfter, "%+v", test)
		require.Equal(t, c.clock.UnixMicro(), told.Now)
		require.InDelta(t, 1+test.after.Seconds()*10, told.Tokens, 1e-6)
		require.Equal(t, 1900*time.Millisecond-test.after, told.FullAfter)
	}
}

func TestRefusalCacheForgets(t *testing.T) {
	t.Parallel()
	of, key := ask("cached", "key", 1, 60, 1), bucket.Key{Name: "cached", Key: "key"}
	known := func(c *stand, a bucket.Ask) bool {
		_, known := c.knows(a)
		return known
	}
	for name, change := range map[string]func(c *stand){
		"WhatIsASecondOld":     func(c *stand) { c.clock = c.clock.Add(maxAge) },
		"WhatWasChanged":       func(c *stand) { c.Forget(&key) },
		"AnotherPolicysAnswer": func(c *stand) { known(c, ask("cached", "key", 2, 60, 1)) },
	} {
		c := newStand(10)
		require.False(t, known(c, of), name)
		c.refused(of, -1)
		require.True(t, known(c, of), name)
		require.False(t, known(c, ask("cached", "other", 1, 60, 1)), name)
		change(c)
		require.False(t, known(c, of), name)
	}
	stranger := bucket.Key{Name: "cached"} // in the same stripe
	c := newStand(10)
	stripe, slot := c.place(&key)
	for i, found := 0, false; !found; i++ {
		stranger.Key = fmt.Sprint("stranger", i)
		other, its := c.place(&stranger)
		found = other == stripe && its != slot
	}
	for name, test := range map[string]struct {
		changed      bucket.Key // while the call is on its way
		whileStoring bool       // or while the answer is stored
		known        bool
	}{
		"ARefusalFromBeforeTokensWereGivenBack":           {key, false, false},
		"ARefusalWhoseBucketIsFilledWhileItIsStored":      {key, true, false},
		"NoRefusalIfOnlyAnotherBucketOfTheStripeIsFilled": {stranger, false, true},
	} {
		c := newStand(10)
		sent, clock := c.sent(of), c.now
		if test.whileStoring {
			c.now = func() time.Duration { // Keep reads the clock when it has the answer and has not stored it
				c.Forget(&test.changed)
				return clock()
			}
		} else {
			c.Forget(&test.changed)
		}
		c.Keep(sent, []bucket.Ask{of}, []bucket.Answer{refusedAt(cacheMade, 0)})
		c.now = clock
		require.Equal(t, test.known, known(c, of), name)
	}
}

// The cache refuses a call over several limits only if it knows all of their states, and one of them refuses.
func TestRefusalCacheRefusesSeveralLimits(t *testing.T) {
	t.Parallel()
	several := func(a, b float64) []bucket.Ask {
		return []bucket.Ask{ask("hour", "key", 0.1, 100, a), ask("minute", "key", 1.0/6, 10, b)}
	}
	c := newStand(100)
	answers := []bucket.Answer{refusedAt(cacheMade, 50), refusedAt(cacheMade, 3)}
	answers[0].Allowed = true
	c.Keep(c.sent(several(1, 4)...), several(1, 4), answers)
	told, refused := c.Refuse(several(1, 4), nil)
	require.True(t, refused)
	require.True(t, told[0].Allowed)
	require.Equal(t, 50.0, told[0].Tokens)
	require.False(t, told[1].Allowed)
	require.Equal(t, 6*time.Second, told[1].RetryAfter)
	require.Equal(t, 3.0, told[1].Tokens)
	_, refused = c.Refuse(several(1, 3), nil)
	require.False(t, refused, "nobody has asked the minute for so little")
	_, refused = c.knows(several(1, 4)[0])
	require.False(t, refused, "the hour allowed")
	_, refused = c.Refuse([]bucket.Ask{several(1, 4)[1], ask("hour", "stranger", 0.1, 100, 1)}, nil)
	require.False(t, refused)

	answers[0].Allowed, answers[1].Allowed = false, true
	c.Keep(c.sent(several(60, 1)...), several(60, 1), answers)
	_, refused = c.knows(several(1, 4)[1])
	require.True(t, refused, "an allowed state does not replace a refusal")
}

func TestRefusalCacheIsBounded(t *testing.T) {
	t.Parallel()
	c := newStand(1000)
	for i := range 20_000 {
		c.refused(ask("cached", fmt.Sprint("key", i), 1, 60, 1), 0)
	}
	entries := 0
	for i := range c.stripes {
		entries += len(c.stripes[i].of)
	}
	require.LessOrEqual(t, entries, 1000+stripes)
	require.Greater(t, entries, 900)
}

// A wait that is counted from the cache is never too short, and the entry is gone when it is over, however
// slow the answer was.
func TestACachedWaitIsNeverTooShort(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c, of := New(10, nil), ask("cached", "key", 1, 1, 1)
		sent := c.sent(of)
		time.Sleep(50 * time.Millisecond) // the database answers: 0 tokens, so 1 s to wait
		answered := time.Now()
		time.Sleep(50 * time.Millisecond) // the answer travels
		c.Keep(sent, []bucket.Ask{of}, []bucket.Answer{refusedAt(answered, 0)})
		for {
			told, known := c.knows(of)
			if !known {
				break
			}
			require.False(t, time.Now().Add(told.RetryAfter).Before(answered.Add(time.Second)), "it would come back too early")
			time.Sleep(time.Millisecond)
		}
		require.False(t, time.Now().After(answered.Add(time.Second)), "it refused for too long")
	})
}
