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
		{Limit: "jobs", Policy: ratelimit.Concurrency{Slots: 5, Lease: 30 * time.Second}},
	}
}

// TestKindsAreStored promises that rules and overrides of each kind are listed, and decide, as they were put, and that
// a file keeps them.
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

// TestAChangeOfTheKindNeedsAReset promises that a change of the kind that the tables show is an error that says what to
// write, unless it is a reset, and that it changes nothing.
func TestAChangeOfTheKindNeedsAReset(t *testing.T) {
	t.Parallel()
	f := setup(t)
	window := ratelimit.FixedWindow{Rate: 10, Period: time.Hour}
	put := func(rule rules.Rule) rules.Changes { return rules.Changes{Put: []rules.Rule{rule}} }
	override := func(o rules.Override) rules.Changes {
		o.Limit, o.Key = "messages", "ada"
		return rules.Changes{Override: []rules.Override{o}}
	}
	later := f.now(t).Add(time.Hour)
	for _, step := range []struct {
		edit    rules.Edit
		changes rules.Changes
		want    string // in the error
	}{
		{why, put(perMinute("messages", "", 5)), ""},
		{from(later), put(rules.Rule{Limit: "messages", Policy: window}), `rule "messages", plan "": it changes the kind from token bucket to fixed window; set its OnChange (on_change in a file) to reset`},
		{from(later), put(rules.Rule{Limit: "messages", Policy: window, OnChange: ratelimit.CarryUsage}), "to reset"},
		{why, put(rules.Rule{Limit: "messages", Plan: "pro", Policy: window}), `plan "pro": it changes the kind`},
		{why, put(rules.Rule{Limit: "messages", Plan: "pro", Policy: window, OnChange: ratelimit.ResetTokens}), ""},
		{from(later), override(rules.Override{Policy: ratelimit.Concurrency{Slots: 2}}), `override of a key of "messages": it changes the kind`},
		{from(later), override(rules.Override{OnPlan: "pro"}), "from token bucket to fixed window"},
		{from(later), override(rules.Override{OnPlan: "pro", OnChange: ratelimit.ResetTokens}), ""},
		{from(later), override(rules.Override{Multiplier: 2}), ""},
		{from(later), put(rules.Rule{Limit: "messages", Policy: window, OnChange: ratelimit.ResetTokens}), ""},
		{from(later.Add(time.Minute)), put(rules.Rule{Limit: "messages", Policy: ratelimit.FixedWindow{Rate: 9, Period: time.Minute}}), ""},
		{from(later.Add(time.Minute)), put(perMinute("messages", "", 5)), "from fixed window to token bucket"},
		{from(later.Add(-time.Minute)), put(rules.Rule{Limit: "messages", Policy: window}), "from token bucket to fixed window"},
		{from(later), rules.Changes{Delete: []rules.RuleID{{Limit: "messages", Plan: "pro"}}}, ""},
	} {
		before := f.tables(t)
		_, err := f.store.Apply(t.Context(), step.edit, step.changes)
		if step.want == "" {
			require.NoError(t, err)
			continue
		}
		require.ErrorIs(t, err, rules.ErrInvalid)
		require.ErrorContains(t, err, step.want)
		require.Equal(t, before, f.tables(t))
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
		"slots":      {ratelimit.Concurrency{Slots: 5}, 1.5, ratelimit.Concurrency{Slots: 7}},
		"leastSlots": {ratelimit.Concurrency{Slots: 5}, 0.1, ratelimit.Concurrency{Slots: 1}},
		"oneToken":   {ratelimit.PerMinute(5), 0.1, ratelimit.TokenBucket{Rate: 0.5, Period: time.Minute, Capacity: 1}},
		"mostSlots":  {ratelimit.Concurrency{Slots: 5}, 1e6, ratelimit.Concurrency{Slots: 1000}},
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

// TestPruneOfKinds promises that no row is deleted before its bucket is full by the rules, and that it is some time
// after.
func TestPruneOfKinds(t *testing.T) {
	t.Parallel()
	f := setup(t)
	for name, policy := range map[string]ratelimit.Policy{
		"sliding": ratelimit.SlidingWindow{Rate: 100, Period: time.Minute, Slices: 6},
		"daily":   ratelimit.CalendarWindow{Rate: 100, Resets: ratelimit.Daily, Zone: "America/Santiago"},
		"monthly": ratelimit.CalendarWindow{Rate: 100, Resets: ratelimit.Monthly, Zone: "Europe/Berlin", FirstDay: 31},
		"slots":   ratelimit.Concurrency{Slots: 100, Lease: time.Hour},
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
