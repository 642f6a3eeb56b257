package rules_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

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
		_, err := f.store.Put(t.Context(), edit, r)
		require.NoError(t, err)
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
		_, err := c.store.Override(t.Context(), edit, rules.Override{Limit: "kinds", Key: "ada", Policy: sliding.Policy, Until: c.from.Add(2 * time.Hour)})
		require.NoError(t, err)
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
		_, err := c.store.Override(t.Context(), from(c.from.Add(time.Hour)),
			rules.Override{Limit: "kinds", Key: "ada", Multiplier: 2, OnChange: scale, Until: c.from.Add(2 * time.Hour)})
		require.NoError(t, err)
		c.load(t)
		require.True(t, c.take(t, 59*time.Minute, 60))
		require.Equal(t, 2.0, c.value(t, time.Hour))
		require.True(t, c.take(t, 119*time.Minute, 100))
		require.Equal(t, 11.0, c.value(t, 2*time.Hour), "half of 20 that are left, and 2 that arrived")
	})
}

// TestMultiplesOfKinds promises what an override of so many times gives of each kind.
func TestMultiplesOfKinds(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		rule  rules.Rule
		times float64
		want  ratelimit.Policy
	}{
		"sliding":     {rules.Rule{Policy: ratelimit.SlidingWindow{Rate: 100, Period: time.Minute}}, 2.5, ratelimit.SlidingWindow{Rate: 250, Period: time.Minute}},
		"calendar":    {rules.Rule{Policy: ratelimit.CalendarWindow{Rate: 100, Resets: ratelimit.Daily, MaxReserved: 10}}, 0.5, ratelimit.CalendarWindow{Rate: 50, Resets: ratelimit.Daily, MaxReserved: 5}},
		"slots":       {rules.Rule{Policy: ratelimit.Concurrency{Most: 5}}, 1.5, ratelimit.Concurrency{Most: 7}},
		"least slots": {rules.Rule{Policy: ratelimit.Concurrency{Most: 5}}, 0.1, ratelimit.Concurrency{Most: 1}},
		"most slots":  {rules.Rule{Policy: ratelimit.Concurrency{Most: 5}}, 1e6, ratelimit.Concurrency{Most: 1000}},
		"adaptive": {
			rule: rules.Rule{Policy: ratelimit.Adaptive{Contract: ratelimit.TokenBucket{Rate: 5, Period: time.Second}}}, times: 2,
			want: ratelimit.Adaptive{Contract: ratelimit.TokenBucket{Rate: 10, Period: time.Second}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			c.rule.Limit = "kinds"
			_, err := f.store.Apply(t.Context(), why, rules.Changes{
				Put: []rules.Rule{c.rule}, Override: []rules.Override{{Limit: "kinds", Key: "ada", Multiplier: c.times}},
			})
			require.NoError(t, err)
			f.load(t)
			require.Equal(t, c.want, f.at(t, f.now(t).Add(time.Hour)).Resolve(kinds.For("ada")).Policy())
		})
	}
}

// TestPruneOfKinds promises that no row is deleted before its bucket is full by the rules, and that it is some time after.
func TestPruneOfKinds(t *testing.T) {
	t.Parallel()
	for name, r := range map[string]rules.Rule{
		"sliding":  {Policy: ratelimit.SlidingWindow{Rate: 100, Period: time.Minute, Slices: 6}},
		"daily":    {Policy: ratelimit.CalendarWindow{Rate: 100, Resets: ratelimit.Daily, Zone: "America/Santiago"}},
		"monthly":  {Policy: ratelimit.CalendarWindow{Rate: 100, Resets: ratelimit.Monthly, Zone: "Europe/Berlin", FirstDay: 31}},
		"adaptive": {Policy: ratelimit.Adaptive{Contract: ratelimit.TokenBucket{Rate: 100, Period: time.Hour}}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			r.Limit = "kinds"
			_, err := f.store.Apply(t.Context(), why, rules.Changes{
				Put: []rules.Rule{r}, Override: []rules.Override{{Limit: "kinds", Key: "bob", Multiplier: 3}},
			})
			require.NoError(t, err)
			f.load(t)
			now := f.now(t).Add(time.Hour)
			for i := range 20 {
				now = now.Add(time.Duration(i) * 7919 * time.Second)
				request := kinds.For([]string{"ada", "bob"}[i%2])
				limiter := f.at(t, now)
				_, err := limiter.Take(t.Context(), request.Cost(1+float64(i*4)))
				require.NoError(t, err)
				v, err := limiter.Value(t.Context(), request)
				require.NoError(t, err)
				wait, err := v.RetryAfter(now, v.Limit.Capacity())
				require.NoError(t, err)
				require.Positive(t, wait)
				deleted, err := f.at(t, now.Add(wait+time.Minute-time.Microsecond)).Prune(t.Context(), kinds)
				require.NoError(t, err)
				require.Zero(t, deleted, "it has not been full for a minute")
				deleted, err = f.at(t, now.Add(4*wait+400*ratelimit.Day)).Prune(t.Context(), kinds)
				require.NoError(t, err)
				require.EqualValues(t, 1, deleted)
			}
		})
	}
	t.Run("slots", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		_, err := f.store.Put(t.Context(), why, rules.Rule{Limit: "kinds", Policy: ratelimit.Concurrency{Most: 5, Lease: time.Hour}})
		require.NoError(t, err)
		f.load(t)
		now := f.now(t).Add(time.Hour)
		lease, err := f.at(t, now).Acquire(t.Context(), kinds.For("ada").Cost(3))
		require.NoError(t, err)
		deleted, err := f.at(t, lease.Until.Add(time.Minute-time.Microsecond)).Prune(t.Context(), kinds)
		require.NoError(t, err)
		require.Zero(t, deleted)
		deleted, err = f.at(t, lease.Until.Add(ratelimit.Day)).Prune(t.Context(), kinds)
		require.NoError(t, err)
		require.EqualValues(t, 1, deleted)
	})
}
