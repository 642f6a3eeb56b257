package rules_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// ruleOfEachKind returns a rule of each kind, with every field that means something for it.
func ruleOfEachKind() []rules.Rule {
	return []rules.Rule{
		{Limit: "unreserved", Policy: ratelimit.TokenBucket{Rate: 10, Period: time.Minute, MaxReserved: ratelimit.NoReservations}},
		{Limit: "exports", Policy: ratelimit.SlidingWindow{Rate: 100, Period: time.Minute, Slices: 30}},
		{Limit: "daily", Policy: ratelimit.CalendarWindow{Rate: 10, Resets: ratelimit.Daily, Zone: "Pacific/Auckland", MaxReserved: ratelimit.None}},
		{Limit: "weekly", Policy: ratelimit.CalendarWindow{Rate: 10, Resets: ratelimit.Weekly, Zone: "UTC", FirstWeekday: time.Monday, MaxReserved: 2.5}},
		{Limit: "monthly", Policy: ratelimit.CalendarWindow{Rate: 10, Resets: ratelimit.Monthly, Zone: "Europe/Berlin", FirstDay: 31}},
		{Limit: "quarterly", Policy: ratelimit.CalendarWindow{Rate: 10, Resets: ratelimit.Quarterly, Zone: "UTC", FirstDay: 1, FirstMonth: time.February}},
		{Limit: "yearly", Policy: ratelimit.CalendarWindow{Rate: 10, Resets: ratelimit.Yearly, Zone: "UTC", FirstDay: 6, FirstMonth: time.April}},
		{Limit: "jobs", Policy: ratelimit.Concurrency{Most: 5, Lease: 30 * time.Second}},
		{Limit: "upstream", Policy: ratelimit.Adaptive{Contract: ratelimit.TokenBucket{Rate: 50, Period: time.Second, Capacity: 10, Shards: 1}, Floor: 0.2, Growth: 0.05, Epoch: 3 * time.Second, Apply: true}},
		{Limit: "tried", Policy: ratelimit.Adaptive{Contract: ratelimit.CalendarWindow{Rate: 50, Resets: ratelimit.Daily, Zone: "UTC"}, Floor: 1, Growth: 1, Epoch: time.Hour}},
	}
}

// TestKindsAreStored promises that rules and overrides of each kind are listed, and decide, as they were put, and that a file keeps them.
func TestKindsAreStored(t *testing.T) {
	t.Parallel()
	f := setup(t)
	changes := rules.Changes{Put: ruleOfEachKind()}
	want := make(map[string]ratelimit.Policy) // without the fields that have their default
	for _, r := range changes.Put {
		data, err := ratelimit.MarshalPolicy(r.Policy)
		require.NoError(t, err)
		want[r.Limit], err = ratelimit.UnmarshalPolicy(data)
		require.NoError(t, err)
		changes.Override = append(changes.Override, rules.Override{Limit: r.Limit, Key: "own", Policy: r.Policy, Mode: ratelimit.On})
	}
	made(t)(f.store.Apply(t.Context(), why, changes))
	list := f.list(t, rules.ListQuery{})
	require.Len(t, list.Rules, len(want))
	require.Len(t, list.Overrides, len(want))
	requireRoundTrip(t, &rules.Document{Rules: changes.Put, Overrides: changes.Override})
	for i := range list.Rules {
		require.Equal(t, want[list.Rules[i].Limit], list.Rules[i].Rule.Policy)
		require.Equal(t, want[list.Overrides[i].Limit], list.Overrides[i].Override.Policy)
	}
	f.load(t)
	require.Zero(t, f.events.last(t).Kept)
	limiter := f.at(t, f.now(t).Add(time.Hour))
	for name, policy := range want {
		for _, key := range []string{"somebody", "own"} {
			require.Equal(t, policy, limiter.Resolve(ratelimit.Define(name, ratelimit.PerSecond(1)).For(key)).Policy())
		}
	}
}

// TestMultiplesOfKinds promises the policy of an override that multiplies the rule of each kind.
func TestMultiplesOfKinds(t *testing.T) {
	t.Parallel()
	f := setup(t)
	cases := map[string]struct {
		policy ratelimit.Policy
		times  float64
		want   ratelimit.Policy
	}{
		"sliding":    {ratelimit.SlidingWindow{Rate: 100, Period: time.Minute}, 2.5, ratelimit.SlidingWindow{Rate: 250, Period: time.Minute}},
		"calendar":   {ratelimit.CalendarWindow{Rate: 100, Resets: ratelimit.Daily, MaxReserved: 10}, 0.5, ratelimit.CalendarWindow{Rate: 50, Resets: ratelimit.Daily, MaxReserved: 5}},
		"slots":      {ratelimit.Concurrency{Most: 5}, 1.5, ratelimit.Concurrency{Most: 7}},
		"leastSlots": {ratelimit.Concurrency{Most: 5}, 0.1, ratelimit.Concurrency{Most: 1}},
		"mostSlots":  {ratelimit.Concurrency{Most: 5}, 1e6, ratelimit.Concurrency{Most: 1000}},
		"adaptive":   {ratelimit.Adaptive{Contract: ratelimit.TokenBucket{Rate: 5, Period: time.Second}}, 2, ratelimit.Adaptive{Contract: ratelimit.TokenBucket{Rate: 10, Period: time.Second}}},
	}
	var changes rules.Changes
	for name, c := range cases {
		changes.Put = append(changes.Put, rules.Rule{Limit: name, Policy: c.policy})
		changes.Override = append(changes.Override, rules.Override{Limit: name, Key: "ada", Multiplier: c.times})
	}
	made(t)(f.store.Apply(t.Context(), why, changes))
	f.load(t)
	limiter := f.at(t, f.now(t).Add(time.Hour))
	for name, c := range cases {
		require.Equal(t, c.want, limiter.Resolve(ratelimit.Define(name, ratelimit.PerMinute(10)).For("ada")).Policy(), name)
	}
}

// TestPruneOfKinds promises that no row is deleted before its bucket is full by the rules, and that it is some time after.
func TestPruneOfKinds(t *testing.T) {
	t.Parallel()
	f := setup(t)
	for name, policy := range map[string]ratelimit.Policy{
		"sliding":  ratelimit.SlidingWindow{Rate: 100, Period: time.Minute, Slices: 6},
		"daily":    ratelimit.CalendarWindow{Rate: 100, Resets: ratelimit.Daily, Zone: "America/Santiago"},
		"monthly":  ratelimit.CalendarWindow{Rate: 100, Resets: ratelimit.Monthly, Zone: "Europe/Berlin", FirstDay: 31},
		"adaptive": ratelimit.Adaptive{Contract: ratelimit.TokenBucket{Rate: 100, Period: time.Hour}},
		"slots":    ratelimit.Concurrency{Most: 100, Lease: time.Hour},
	} {
		made(t)(f.store.Apply(t.Context(), why, rules.Changes{
			Put: []rules.Rule{{Limit: name, Policy: policy}}, Override: []rules.Override{{Limit: name, Key: "bob", Multiplier: 3}},
		}))
		f.load(t)
		limit, now := ratelimit.Define(name, ratelimit.PerMinute(10)), f.now(t).Add(time.Hour)
		prune := func(at time.Time) int64 {
			deleted, err := f.at(t, at).Prune(t.Context(), limit)
			require.NoError(t, err)
			return deleted
		}
		for i := range 12 {
			now = now.Add(time.Duration(i) * 7919 * time.Second)
			request, limiter, wait := limit.For([]string{"ada", "bob"}[i%2]), f.at(t, now), time.Hour
			if name == "slots" {
				require.NoError(t, errorOf(limiter.Acquire(t.Context(), request.Cost(1+float64(i*4)))))
			} else {
				require.NoError(t, limiter.Require(t.Context(), request.Cost(1+float64(i*4))))
				v, err := limiter.Value(t.Context(), request)
				require.NoError(t, err)
				wait, err = v.RetryAfter(now, v.Limit.Capacity())
				require.NoError(t, err)
				require.Positive(t, wait)
			}
			require.Zero(t, prune(now.Add(wait+time.Minute-time.Microsecond)), "it has not been full for a minute")
			require.EqualValues(t, 1, prune(now.Add(4*wait+400*ratelimit.Day)))
		}
	}
}

// kinds is a limit whose rule changes its kind again and again. In the code it holds 10, and 10 arrive each minute.
var kinds = ratelimit.Define("kinds", ratelimit.PerMinute(10))

// kindChanges are rules of which each takes the place of the one before.
type kindChanges struct {
	*fixture
	from time.Time // when the first change holds
}

// changing has the rules hold from an hour to the next, the first from an hour from now on.
func changing(t *testing.T, stated ...rules.Rule) *kindChanges {
	t.Helper()
	f := setup(t)
	c := &kindChanges{f, f.now(t).Add(time.Hour).Truncate(time.Hour).Add(time.Hour).UTC()}
	for i, r := range stated {
		r.Limit = "kinds"
		edit := why
		edit.From = c.from.Add(time.Duration(i) * time.Hour)
		made(t)(f.store.Put(t.Context(), edit, r))
	}
	f.load(t)
	require.Zero(t, f.events.last(t).Kept)
	return c
}

// value returns what the bucket of ada holds so long after the first change.
func (c *kindChanges) value(t *testing.T, after time.Duration) float64 {
	t.Helper()
	v, err := c.at(t, c.from.Add(after)).Value(t.Context(), kinds.For("ada"))
	require.NoError(t, err)
	return v.Tokens
}

// take takes from it, and returns whether it was allowed.
func (c *kindChanges) take(t *testing.T, after time.Duration, cost float64) bool {
	t.Helper()
	d, err := c.at(t, c.from.Add(after)).Take(t.Context(), kinds.For("ada").Cost(cost))
	require.NoError(t, err)
	return d.Allowed
}

// TestKindsFollowEachOther promises that each kind begins with what the kind before has left at the instant of the change,
// and that what arrived until then has arrived by the kind before.
func TestKindsFollowEachOther(t *testing.T) {
	t.Parallel()
	const keep, scale = ratelimit.KeepTokens, ratelimit.ScaleTokens
	sliding := rules.Rule{Policy: ratelimit.SlidingWindow{Rate: 100, Period: 30 * time.Minute}, OnChange: keep}
	bucket := rules.Rule{Policy: ratelimit.TokenBucket{Rate: 60, Period: time.Hour, Capacity: 60}, OnChange: keep}

	t.Run("TokensBecomeAWindowThatSlides", func(t *testing.T) {
		t.Parallel()
		scaled := sliding
		scaled.OnChange = scale
		for want, r := range map[float64]rules.Rule{5: sliding, 50: scaled} {
			c := changing(t, r)
			require.True(t, c.take(t, -30*time.Second, 10))
			require.Equal(t, want, c.value(t, 0), "5 of 10 arrived by the definition in the code")
			require.False(t, c.take(t, time.Minute, want+1))
			require.True(t, c.take(t, 2*time.Minute, want))
			require.Equal(t, 0.0, c.value(t, 29*time.Minute), "what was missing then counts as taken then")
			require.Equal(t, 100-want, c.value(t, 31*time.Minute))
			require.Equal(t, 100.0, c.value(t, 33*time.Minute))
		}
	})

	t.Run("AnOverrideHasAKindOfItsOwn", func(t *testing.T) {
		t.Parallel()
		c := changing(t, bucket)
		edit := why
		edit.From = c.from.Add(time.Hour)
		made(t)(c.store.Override(t.Context(), edit, rules.Override{Limit: "kinds", Key: "ada", Policy: sliding.Policy, Until: c.from.Add(2 * time.Hour)}))
		c.load(t)
		require.True(t, c.take(t, 50*time.Minute, 60))
		require.Equal(t, 10.0, c.value(t, time.Hour))
		require.True(t, c.take(t, time.Hour+40*time.Minute, 90))
		require.Equal(t, 10.0, c.value(t, 2*time.Hour))
		require.Equal(t, 40.0, c.value(t, 2*time.Hour+30*time.Minute), "30 of the rule's arrived")
	})

	t.Run("AnOverrideChangesTheTokensAsItSays", func(t *testing.T) {
		t.Parallel()
		c := changing(t, bucket)
		made(t)(c.store.Override(t.Context(), from(c.from.Add(time.Hour)),
			rules.Override{Limit: "kinds", Key: "ada", Multiplier: 2, OnChange: scale, Until: c.from.Add(2 * time.Hour)}))
		c.load(t)
		require.True(t, c.take(t, 59*time.Minute, 60))
		require.Equal(t, 2.0, c.value(t, time.Hour))
		require.True(t, c.take(t, 119*time.Minute, 100))
		require.Equal(t, 11.0, c.value(t, 2*time.Hour), "half of 20 that are left, and 2 that arrived")
	})
}
