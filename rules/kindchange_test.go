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
