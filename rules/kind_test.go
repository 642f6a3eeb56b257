package rules_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// kindsSaid returns a rule of each new kind, with every field that means something for it.
func kindsSaid() []rules.Rule {
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

// TestKindsAreStored promises that what is put is what is listed, what the history tells, and what decides.
func TestKindsAreStored(t *testing.T) {
	t.Parallel()
	f := setup(t)
	said := kindsSaid()
	changes := rules.Changes{Put: said}
	for _, r := range said {
		changes.Override = append(changes.Override, rules.Override{Limit: r.Limit, Key: "own", Policy: r.Policy, Mode: ratelimit.On})
	}
	_, err := f.store.Apply(t.Context(), why, changes)
	require.NoError(t, err)
	list, err := f.store.List(t.Context(), rules.ListQuery{})
	require.NoError(t, err)
	entries, err := f.store.History(t.Context(), rules.HistoryQuery{})
	require.NoError(t, err)
	f.load(t)
	require.Zero(t, f.events.last(t).Kept)
	limiter := f.at(t, f.now(t).Add(time.Hour))
	for _, want := range said {
		stored := want
		stored.Policy = asWritten(t, want.Policy)
		found := 0
		for _, r := range list.Rules {
			if r.Limit == want.Limit {
				found++
				require.Equal(t, stored, *r.Rule)
			}
		}
		for _, o := range list.Overrides {
			if o.Limit == want.Limit {
				found++
				require.Equal(t, stored.Policy, o.Override.Policy)
			}
		}
		for _, e := range entries {
			switch {
			case e.Limit == want.Limit && e.Rule != nil:
				found++
				require.Equal(t, stored, *e.Rule)
			case e.Limit == want.Limit:
				found++
				require.Equal(t, stored.Policy, e.Override.Policy)
			}
		}
		require.Equal(t, 4, found, want.Limit)
		limit, err := want.AsLimit()
		require.NoError(t, err)
		resolved := limiter.Resolve(ratelimit.Define(want.Limit, ratelimit.PerSecond(1)).For("somebody"))
		require.Equal(t, limit.Numbers(), resolved.Numbers())
		require.Equal(t, stored.Policy, resolved.Policy())
	}
}

// asWritten returns the policy without the fields that have their default.
func asWritten(t *testing.T, policy ratelimit.Policy) ratelimit.Policy {
	t.Helper()
	data, err := ratelimit.MarshalPolicy(policy)
	require.NoError(t, err)
	policy, err = ratelimit.UnmarshalPolicy(data)
	require.NoError(t, err)
	return policy
}

// TestKindsInFiles promises that a file says all kinds, and is written as it is read.
func TestKindsInFiles(t *testing.T) {
	t.Parallel()
	requireRoundTrip(t, &rules.Document{
		Rules: kindsSaid(), Overrides: []rules.Override{{Limit: "monthly", Key: "ada", Policy: kindsSaid()[3].Policy, Mode: ratelimit.Off}},
	})
}
