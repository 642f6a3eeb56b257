package rules_test

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// kindsSaid returns a rule of each new kind, with every field that means something for it.
func kindsSaid() []rules.Rule {
	return []rules.Rule{
		{Limit: "exports", Kind: rules.SlidingWindow, Rate: 100, Period: time.Minute, Slices: 30},
		{Limit: "daily", Kind: rules.CalendarWindow, Rate: 10, Resets: ratelimit.Daily, Zone: "Pacific/Auckland", MaxReserved: new(0.0)},
		{Limit: "weekly", Kind: rules.CalendarWindow, Rate: 10, Resets: ratelimit.Weekly, Zone: "UTC", FirstWeekday: time.Monday, MaxReserved: new(2.5)},
		{Limit: "monthly", Kind: rules.CalendarWindow, Rate: 10, Resets: ratelimit.Monthly, Zone: "Europe/Berlin", FirstDay: 31},
		{Limit: "quarterly", Kind: rules.CalendarWindow, Rate: 10, Resets: ratelimit.Quarterly, Zone: "UTC", FirstDay: 1, FirstMonth: time.February},
		{Limit: "yearly", Kind: rules.CalendarWindow, Rate: 10, Resets: ratelimit.Yearly, Zone: "UTC", FirstDay: 6, FirstMonth: time.April},
		{Limit: "jobs", Kind: rules.Concurrency, Most: 5, Lease: 30 * time.Second},
		{
			Limit: "upstream", Kind: rules.TokenBucket, Rate: 50, Period: time.Second, Capacity: new(10.0),
			Adaptive: &rules.Adaptive{Floor: 0.2, Growth: 0.05, Epoch: 3 * time.Second, Apply: true},
		},
		{
			Limit: "tried", Kind: rules.CalendarWindow, Rate: 50, Resets: ratelimit.Daily, Zone: "UTC",
			Adaptive: &rules.Adaptive{Floor: 1, Growth: 1, Epoch: time.Hour},
		},
	}
}

// TestKindsAreStored promises that what is put is what is listed, what the history tells, and what decides.
func TestKindsAreStored(t *testing.T) {
	t.Parallel()
	f := setup(t)
	said := kindsSaid()
	changes := rules.Changes{Put: said}
	for _, r := range said {
		own := r
		own.Limit = ""
		changes.Override = append(changes.Override, rules.Override{Limit: r.Limit, Key: "own", Policy: &own})
	}
	_, err := f.store.Apply(t.Context(), why, changes)
	require.NoError(t, err)
	list, err := f.store.List(t.Context())
	require.NoError(t, err)
	entries, err := f.store.History(t.Context(), rules.HistoryQuery{})
	require.NoError(t, err)
	f.load(t)
	require.Zero(t, f.events.last(t).Kept)
	limiter := f.at(t, f.now(t).Add(time.Hour))
	for _, want := range said {
		want.Shards, want.Mode = 1, ratelimit.On
		own := want
		own.Limit = ""
		stored := want
		stored.OnChange = ratelimit.KeepTokens
		found := 0
		for _, r := range list.Rules {
			if r.Limit == want.Limit {
				found++
				require.Equal(t, stored, r.Rule)
			}
		}
		for _, o := range list.Overrides {
			if o.Limit == want.Limit {
				found++
				require.Equal(t, &own, o.Policy)
			}
		}
		for _, e := range entries {
			switch {
			case e.Limit == want.Limit && e.Rule != nil:
				found++
				require.Equal(t, stored, *e.Rule)
			case e.Limit == want.Limit:
				found++
				require.Equal(t, &own, e.Override.Policy)
			}
		}
		require.Equal(t, 4, found, want.Limit)
		limit, err := want.AsLimit()
		require.NoError(t, err)
		resolved := limiter.Resolve(ratelimit.Define(want.Limit, ratelimit.PerSecond(1)).For("somebody"))
		require.Equal(t, limit.Policy(), resolved.Policy())
		require.Equal(t, strip(want), strip(rules.FromLimit(resolved)), "a limit is a rule again")
	}
}

// TestUnknownZone promises that a rule whose time zone this program does not know is not stored, and that the caller's
// transaction goes on.
func TestUnknownZone(t *testing.T) {
	t.Parallel()
	f := setup(t)
	tx, err := f.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(t.Context()) }()
	store := f.store.WithTx(tx)
	r := rules.Rule{Limit: "quota", Kind: rules.CalendarWindow, Rate: 10, Resets: ratelimit.Daily, Zone: "Europe/Atlantis"}
	_, err = store.Put(t.Context(), why, r)
	require.ErrorIs(t, err, rules.ErrInvalid)
	require.ErrorContains(t, err, `this program knows no time zone "Europe/Atlantis"`)
	own := r
	own.Limit = ""
	_, err = store.Override(t.Context(), why, rules.Override{Limit: "quota", Key: "ana", Policy: &own})
	require.ErrorContains(t, err, `this program knows no time zone "Europe/Atlantis"`)
	r.Zone = "europe/berlin"
	_, err = store.Put(t.Context(), why, r)
	require.ErrorContains(t, err, `this program knows no time zone "europe/berlin"`)
	r.Zone = "Europe/Berlin"
	_, err = store.Put(t.Context(), why, r)
	require.NoError(t, err)
	require.NoError(t, tx.Commit(t.Context()))
}

// strip leaves out what no policy says.
func strip(r rules.Rule) rules.Rule {
	r.Mode, r.OnChange, r.Shards = "", "", max(r.Shards, 1)
	return r
}

// TestKindsInFiles promises that a file says all kinds, and is written as it is read.
func TestKindsInFiles(t *testing.T) {
	t.Parallel()
	d := &rules.Document{Rules: kindsSaid()}
	requireRoundTrip(t, d)
	own := kindsSaid()[3]
	own.Limit = ""
	d.Overrides = []rules.Override{{Limit: "monthly", Key: "ada", Policy: &own}}
	requireRoundTrip(t, d)
	require.Equal(t, []rules.Rule{
		{Limit: "a", Kind: rules.SlidingWindow, Rate: 3, Period: time.Second},
		{Limit: "b", Kind: rules.CalendarWindow, Rate: 3, Resets: ratelimit.Weekly, FirstWeekday: time.Wednesday},
		{Limit: "c", Kind: rules.Concurrency, Most: 2},
		{Limit: "d", Rate: 3, Period: time.Second, Adaptive: &rules.Adaptive{}},
	}, read(t, `
- {limit: a, algorithm: sliding_window, rps: 3}
- {limit: b, kind: calendar_window, rate: 3, resets: week, first_weekday: wednesday}
- {limit: c, kind: concurrency, most: 2}
- {limit: d, rps: 3, adaptive: {}}
`).Rules)
	for text, want := range map[string]string{
		"{limit: a, kind: sliding window, rps: 1, burst: 2}":                             "its Capacity means nothing for a sliding window",
		"{limit: a, kind: sliding window, period: 1m}":                                   "give it rate and period",
		"{limit: a, kind: sliding window, rate: 1, period: 1m, slices: 7000}":            "its Slices is 7000",
		"{limit: a, rps: 1, slices: 5}":                                                  "its Slices means nothing for a token bucket",
		"{limit: a, kind: calendar window, rate: 1}":                                     "it has no resets",
		"{limit: a, kind: calendar window, resets: day}":                                 "say how many tokens a window gives",
		"{limit: a, kind: calendar window, rate: 1, resets: hour}":                       "use day or week or month or quarter or year",
		"{limit: a, kind: calendar window, rate: 1, resets: day, period: 1d}":            "its Period means nothing for a calendar window",
		"{limit: a, kind: calendar window, rate: 1, resets: day, first_day: 2}":          "its FirstDay means nothing for a calendar window of a day",
		"{limit: a, kind: calendar window, rate: 1, resets: week, first_weekday: tuesd}": "use sunday or monday",
		"{limit: a, kind: concurrency, lease: 1m}":                                       "it has no most",
		"{limit: a, kind: concurrency, most: 2, rate: 1, period: 1s}":                    "its Rate means nothing for a concurrency",
		"{limit: a, kind: concurrency, most: 1001}":                                      "its Most is 1001",
		"{limit: a, kind: concurrency, most: 5, adaptive: {floor: 0.5}}":                 "its Adaptive means nothing for a concurrency",
		"{limit: a, rps: 1, adaptive: {floor: 0.0001}}":                                  "its Floor is 0.0001",
		"{limit: a, rps: 1, adaptive: {growth: 1.5}}":                                    "its Growth is 1.5",
		"{limit: a, rps: 1, adaptive: {epoch: 2h}}":                                      "its Epoch is 2h0m0s",
		"{limit: a, rps: 1, adaptive: {epoch: 1ms}}":                                     "its Epoch is 1ms",
		"{limit: a, kind: sliding window, rps: 1, adaptive: {}}":                         "its Adaptive means nothing for a sliding window",
		"{limit: a, rps: 1, adaptive: {floor: 0.5, ceiling: 2}}":                         `there is no field "ceiling"`,
		"{limit: a, kind: leaky bucket, rps: 1}":                                         "use token bucket or token_bucket or fixed window",
	} {
		_, err := rules.Read(strings.NewReader("[" + text + "]"))
		require.ErrorIs(t, err, rules.ErrInvalid, text)
		require.ErrorContains(t, err, want, text)
	}
}
