package rules_test

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// change is a change as the model of TestErasAreThoseOfTheHistory knows it.
type change struct {
	from, until time.Time // the zero time: for ever
	rate        float64   // 0: it was deleted
	times       float64
	plan        string
}

// history are changes of one thing in the order in which they were made.
type history []change

// at returns the change that holds at an instant: of those that have begun by then, the one that was made last. It is nil
// when there is none, or it was a deletion or has ended.
func (h history) at(now time.Time) *change {
	for i := len(h) - 1; i >= 0; i-- {
		if c := &h[i]; !c.from.After(now) {
			if c.rate == 0 && c.times == 0 && c.plan == "" || !c.until.IsZero() && !now.Before(c.until) {
				return nil
			}
			return c
		}
	}
	return nil
}

// model says what a capacity has to be, from the changes alone.
type model struct {
	rules, overrides map[string]history // by plan, by key
}

func (m *model) capacity(plan, key string, now time.Time) float64 {
	ofPlan := func(plan string) float64 {
		for _, p := range []string{plan, ""} {
			if c := m.rules[p].at(now); c != nil {
				return c.rate
			}
		}
		return messages.Capacity()
	}
	switch o := m.overrides[key].at(now); {
	case o == nil:
		return ofPlan(plan)
	case o.plan != "":
		return ofPlan(o.plan)
	case o.times != 0:
		return o.times * ofPlan(plan)
	default:
		return o.rate
	}
}

// TestErasAreThoseOfTheHistory makes random changes that begin in any order, and compares what decides at each instant with
// a model that knows no chain.
func TestErasAreThoseOfTheHistory(t *testing.T) {
	t.Parallel()
	testsize.EachSeed(t, func(t *testing.T, seed uint64) {
		t.Helper()
		f, random := setup(t), rand.New(rand.NewPCG(seed, 5))
		hour := time.Now().Add(time.Hour).Truncate(time.Second)
		m := model{rules: make(map[string]history), overrides: make(map[string]history)}
		for range 24 {
			makeChange(t, f, &m, random, hour)
		}
		f.load(t)
		for now := hour.Add(-time.Second); now.Before(hour.Add(40 * time.Second)); now = now.Add(time.Second / 2) {
			limiter := f.at(t, now)
			for _, plan := range []string{"", "pro", "team"} {
				for _, key := range []string{"ana", "bob", "eve"} {
					require.InEpsilon(t, m.capacity(plan, key, now), limiter.Resolve(messages.For(key).Plan(plan)).Capacity(), 1e-12,
						"plan %q, key %q, %v after", plan, key, now.Sub(hour))
				}
			}
		}
	})
}

// makeChange makes a random change that begins up to half a minute after hour.
func makeChange(t *testing.T, f *fixture, m *model, random *rand.Rand, hour time.Time) {
	t.Helper()
	edit := rules.Edit{Author: "ana", Reason: "a test", From: hour.Add(time.Duration(random.IntN(30)) * time.Second)}
	c := change{from: edit.From}
	rate := float64(1 + random.IntN(1000))
	if random.IntN(2) == 0 {
		plan := []string{"", "pro", "team"}[random.IntN(3)]
		var err error
		if h := m.rules[plan]; len(h) > 0 && h[len(h)-1].rate != 0 && random.IntN(3) == 0 {
			_, err = f.store.Delete(t.Context(), edit, "messages", plan)
		} else {
			c.rate = rate
			_, err = f.store.Put(t.Context(), edit, perMinute("messages", plan, rate))
		}
		require.NoError(t, err)
		m.rules[plan] = append(m.rules[plan], c)
		return
	}
	key := []string{"ana", "bob"}[random.IntN(2)]
	if random.IntN(5) == 0 && m.overrides[key].at(edit.From) != nil {
		_, err := f.store.RemoveOverride(t.Context(), edit, "messages", key)
		require.NoError(t, err)
		m.overrides[key] = append(m.overrides[key], c)
		return
	}
	o := rules.Override{Limit: "messages", Key: key}
	switch random.IntN(3) {
	case 0:
		c.times = 1 + float64(random.IntN(5))
		o.Multiplier = c.times
	case 1:
		c.plan = "pro"
		o.OnPlan = c.plan
	case 2:
		c.rate = rate
		o.Policy = ratelimit.TokenBucket{Rate: rate, Period: time.Minute}
	}
	if random.IntN(2) == 0 {
		c.until = edit.From.Add(time.Duration(1+random.IntN(10)) * time.Second)
		o.Until = c.until
	}
	_, err := f.store.Override(t.Context(), edit, o)
	require.NoError(t, err)
	m.overrides[key] = append(m.overrides[key], c)
}

func TestOldEntriesAreForgotten(t *testing.T) {
	t.Parallel()
	f := setup(t)
	for _, plan := range []string{"", "pro"} {
		_, err := f.store.Put(t.Context(), why, perMinute("messages", plan, 50))
		require.NoError(t, err)
	}
	_, err := f.store.Override(t.Context(), why,
		rules.Override{Limit: "messages", Key: "ana", Multiplier: 2}, rules.Override{Limit: "messages", Key: "bob", Multiplier: 2})
	require.NoError(t, err)
	_, err = f.store.Delete(t.Context(), why, "messages", "pro")
	require.NoError(t, err)

	const day = `86400000000`
	f.exec(t, `UPDATE ratelimit.rules SET from_us = from_us - CASE of WHEN 'override' THEN 40 ELSE 31 END * `+day+`, made_us = made_us - 31 * `+day+`,
		until_us = CASE of WHEN 'override' THEN from_us - CASE key WHEN 'ana' THEN 29 ELSE 31 END * `+day+` END`)
	f.load(t)
	require.Equal(t, 1, f.events.last(t).Overrides, "that which ended 31 days ago is not loaded")
	require.Equal(t, 1, f.events.last(t).Rules)
	long := time.Now().Add(-30 * 24 * time.Hour)
	require.Equal(t, 100.0, f.capacity(t, long, messages.For("ana")), "it held until 29 days ago, and is known")
	require.Equal(t, 50.0, f.capacity(t, time.Now().Add(time.Hour), messages.For("ana")))

	_, err = f.store.Override(t.Context(), why, rules.Override{Limit: "messages", Key: "bob", Multiplier: 3})
	require.NoError(t, err)
	list, err := f.store.List(t.Context(), rules.ListQuery{})
	require.NoError(t, err)
	require.Len(t, list.Overrides, 1, "the others have ended")
}
