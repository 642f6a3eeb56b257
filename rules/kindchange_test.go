package rules_test

import (
	"math"
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
	daily := rules.Rule{Policy: ratelimit.CalendarWindow{Rate: 1000, Resets: ratelimit.Daily, Zone: "Europe/Berlin"}, OnChange: keep}
	slots := rules.Rule{Policy: ratelimit.Concurrency{Most: 2, Lease: time.Hour}}

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

	t.Run("AWindowThatSlidesBecomesTokens", func(t *testing.T) {
		t.Parallel()
		c := changing(t, sliding, bucket)
		require.True(t, c.take(t, 50*time.Minute, 70))
		require.Equal(t, 30.0, c.value(t, time.Hour-time.Second))
		require.Equal(t, 30.0, c.value(t, time.Hour))
		require.Equal(t, 45.0, c.value(t, time.Hour+15*time.Minute))
		require.False(t, c.take(t, time.Hour+15*time.Minute, 46))
		require.True(t, c.take(t, time.Hour+15*time.Minute, 45))
	})

	t.Run("TokensBecomeWindowsOfTheCalendar", func(t *testing.T) {
		t.Parallel()
		c := changing(t, bucket, daily)
		require.True(t, c.take(t, 30*time.Minute, 60))
		require.Equal(t, 30.0, c.value(t, time.Hour), "half an hour's")
		require.True(t, c.take(t, time.Hour+time.Second, 30))
		require.False(t, c.take(t, time.Hour+2*time.Second, 1))
		v, err := c.at(t, c.from.Add(time.Hour+2*time.Second)).Value(t.Context(), kinds.For("ada"))
		require.NoError(t, err)
		wait, err := v.RetryAfter(v.AsOf, 1000)
		require.NoError(t, err)
		berlin, err := time.LoadLocation("Europe/Berlin")
		require.NoError(t, err)
		next := v.AsOf.In(berlin).AddDate(0, 0, 1)
		require.Equal(t, time.Date(next.Year(), next.Month(), next.Day(), 0, 0, 0, 0, berlin).UTC(), v.AsOf.Add(wait).UTC())
	})

	t.Run("SlotsBeginFreeAndEndAsTokens", func(t *testing.T) {
		t.Parallel()
		c := changing(t, bucket, slots, bucket)
		require.True(t, c.take(t, 59*time.Minute, 60))
		within := c.at(t, c.from.Add(90*time.Minute))
		_, err := within.Take(t.Context(), kinds.For("ada"))
		require.ErrorIs(t, err, ratelimit.ErrInvalidRequest)
		require.ErrorContains(t, err, "call Acquire", "a program that takes has to be changed first")
		lease, err := within.Acquire(t.Context(), kinds.For("ada").Cost(2))
		require.NoError(t, err)
		require.True(t, lease.Allowed, "what was taken before is not held")
		require.Equal(t, 0.0, c.value(t, 90*time.Minute))
		require.Equal(t, 30.0, c.value(t, 2*time.Hour+30*time.Minute), "what is held at the change counts as taken")
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
}

// TestRulesThatAdapt promises that a price is charged from the instant on at which a rule says so, until one says otherwise,
// around each contract.
func TestRulesThatAdapt(t *testing.T) {
	t.Parallel()
	for name, contract := range map[string]rules.Rule{
		"TokenBucket":    {Policy: ratelimit.TokenBucket{Rate: 100, Period: 1000 * ratelimit.Day}},
		"FixedWindow":    {Policy: ratelimit.FixedWindow{Rate: 100, Period: 1000 * ratelimit.Day, Start: time.Date(2020, 1, 1, 0, 0, 0, 0, time.UTC)}},
		"CalendarWindow": {Policy: ratelimit.CalendarWindow{Rate: 100, Resets: ratelimit.Yearly}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			told, charged := contract, contract
			told.Policy = ratelimit.Adaptive{Contract: contract.Policy}
			charged.Policy = ratelimit.Adaptive{Contract: contract.Policy, Floor: 0.3, Apply: true}
			c := changing(t, contract, told, charged, contract)
			c.exec(t, `INSERT INTO ratelimit.prices VALUES ('kinds', 'ada', 0, $1, $1, 0, 0, 0, 0.25, false, 0)`, c.from.UnixMicro())
			for hour, want := range []struct{ price, taken float64 }{{1, 10}, {4, 10}, {1 / 0.3, 10 / 0.3}, {1, 10}} {
				for _, minute := range []time.Duration{0, 59} { // the first instant, and near the last
					limiter := c.at(t, c.from.Add(time.Duration(hour)*time.Hour+minute*time.Minute))
					request := kinds.For("ada").Cost(10)
					require.Eventually(t, func() bool { // it asks what the price is beside its calls
						d, err := limiter.Check(t.Context(), request)
						require.NoError(t, err)
						return d.States[0].Price == want.price
					}, deadline, time.Millisecond)
					require.NoError(t, limiter.Reset(t.Context(), request))
					d, err := limiter.Take(t.Context(), request)
					require.NoError(t, err)
					require.True(t, d.Allowed)
					require.Equal(t, want.price, d.States[0].Price)
					v, err := limiter.Value(t.Context(), request)
					require.NoError(t, err)
					require.InDelta(t, 100-want.taken, v.Tokens, 1e-2, "hour %d", hour)
					require.NoError(t, limiter.Close(t.Context()))
				}
			}
		})
	}
}

// TestAdaptiveOutOfRange promises an error before any SQL, wherever a rule is stated.
func TestAdaptiveOutOfRange(t *testing.T) {
	t.Parallel()
	f := setup(t)
	for want, a := range map[string]ratelimit.Adaptive{
		"its Floor is 0.0001": {Floor: 0.0001}, "its Floor is 1.5": {Floor: 1.5}, "its Growth is -1": {Growth: -1}, "its Growth is NaN": {Growth: math.NaN()},
		"its Epoch is 99ms": {Epoch: 99 * time.Millisecond}, "its Epoch is 1h0m1s": {Epoch: time.Hour + time.Second},
	} {
		a.Contract = ratelimit.PerSecond(1)
		r := rules.Rule{Limit: "kinds", Policy: a}
		_, err := f.store.Put(t.Context(), why, r)
		require.ErrorIs(t, err, rules.ErrInvalid, want)
		require.ErrorContains(t, err, want)
		_, err = f.store.Apply(t.Context(), why, rules.Changes{Override: []rules.Override{{Limit: "kinds", Key: "ada", Policy: a}}})
		require.ErrorIs(t, err, rules.ErrInvalid, want)
		require.ErrorContains(t, err, want)
		_, err = r.AsLimit()
		require.ErrorContains(t, err, want)
	}
	list, err := f.store.List(t.Context(), rules.ListQuery{})
	require.NoError(t, err)
	require.Zero(t, list.Version)
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
