package rules_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

func TestListFilters(t *testing.T) {
	t.Parallel()
	f := setup(t)
	until := f.now(t).Add(time.Hour)
	changes := rules.Changes{Put: []rules.Rule{perMinute("a", "", 1), perMinute("b", "", 2), perMinute("b", "pro", 3)}}
	for _, key := range []string{"ada", "bob", "cy"} {
		changes.Override = append(changes.Override, rules.Override{Limit: "b", Key: key, Multiplier: 2})
		changes.Pause = append(changes.Pause, rules.Pause{Limit: "b", Key: key, Until: until})
	}
	changes.Pause = append(changes.Pause, rules.Pause{Limit: "b", Until: until})
	made(t)(f.store.Apply(t.Context(), why, changes))

	list := f.list(t, rules.ListQuery{Limit: "b", Key: new("bob")})
	require.Len(t, list.Rules, 2)
	require.Equal(t, []string{"bob"}, overridden(list))
	require.Equal(t, []string{"", "bob"}, paused(list), "the pause of the limit counts for the key, too")

	list = f.list(t, rules.ListQuery{Most: 2})
	require.Len(t, list.Rules, 2)
	require.Equal(t, []string{"ada", "bob"}, overridden(list))
	list = f.list(t, rules.ListQuery{Most: 2, After: rules.Bucket{Limit: "b", Key: "bob"}})
	require.Equal(t, []string{"cy"}, overridden(list))
	require.Equal(t, []string{"cy"}, paused(list))

	list = f.list(t, rules.ListQuery{Limit: "nobody"})
	require.Empty(t, append(overridden(list), paused(list)...))
	require.ErrorIs(t, errorOf(f.store.List(t.Context(), rules.ListQuery{Most: -1})), rules.ErrInvalid)
	for _, text := range []string{"a\x00", "\xff", strings.Repeat("k", 257)} {
		for _, query := range []rules.ListQuery{{Limit: text}, {Key: &text}, {After: rules.Bucket{Limit: text}}, {After: rules.Bucket{Limit: "a", Key: text}}} {
			require.ErrorIs(t, errorOf(f.store.List(t.Context(), query)), rules.ErrInvalid, "%+v", query)
		}
		for _, query := range []rules.HistoryQuery{{Limit: text}, {Plan: &text}, {Key: &text}} {
			require.ErrorIs(t, errorOf(f.store.History(t.Context(), query)), rules.ErrInvalid, "%+v", query)
		}
	}
}

// TestListHasCurrentAndFutureRules promises a line for each statement that holds or will, with its end.
func TestListHasCurrentAndFutureRules(t *testing.T) {
	t.Parallel()
	f := setup(t)
	store, now := f.immediate(t), f.now(t).Truncate(time.Second)
	tomorrow, later := now.Add(day), now.Add(7*day)
	put := func(edit rules.Edit, limit string, rate float64) {
		made(t)(store.Put(t.Context(), edit, perMinute(limit, "", rate)))
	}
	remove := func(limit string) {
		made(t)(store.Delete(t.Context(), from(tomorrow), limit, ""))
	}
	for limit, rate := range map[string]float64{"sends": 10, "goes": 7, "steady": 8, "stays": 9} {
		put(why, limit, rate)
	}
	put(from(later), "sends", 99) // which the next takes the place of
	put(from(tomorrow), "sends", 5)
	put(from(tomorrow), "new", 6)
	put(from(later), "sends", 20)
	remove("goes")
	remove("stays")
	put(why, "stays", 11)
	list, err := store.List(t.Context(), rules.ListQuery{})
	require.NoError(t, err)
	var lines []string
	for _, r := range list.Rules {
		line := r.Limit + ": " + r.String()
		if r.From.After(list.Now) {
			line += fmt.Sprintf(", in %.0f days", r.From.Sub(now).Hours()/24)
		}
		if !r.Until.IsZero() {
			line += fmt.Sprintf(", until in %.0f days", r.Until.Sub(now).Hours()/24)
		}
		lines = append(lines, line)
	}
	require.Equal(t, []string{
		"goes: 7 per minute, until in 1 days", "new: 6 per minute, in 1 days", "sends: 10 per minute, until in 1 days",
		"sends: 5 per minute, in 1 days, until in 7 days", "sends: 20 per minute, in 7 days", "stays: 11 per minute", "steady: 8 per minute",
	}, lines)
}

func overridden(list rules.Listing) (keys []string) {
	for _, o := range list.Overrides {
		keys = append(keys, o.Key)
	}
	return keys
}

func paused(list rules.Listing) (keys []string) {
	for _, p := range list.Pauses {
		keys = append(keys, p.Key)
	}
	return keys
}

func TestRuleAsLimit(t *testing.T) {
	t.Parallel()
	limit, err := rules.Rule{Limit: "messages", Policy: ratelimit.TokenBucket{Rate: 60, Period: time.Minute, Capacity: ratelimit.None}}.AsLimit()
	require.NoError(t, err)
	require.Equal(t, ratelimit.TokenBucket{Rate: 60, Period: time.Minute, Capacity: ratelimit.None}, limit.Policy())
	_, err = rules.Rule{Limit: "messages", Policy: ratelimit.TokenBucket{Rate: -1, Period: time.Minute}}.AsLimit()
	require.ErrorIs(t, err, rules.ErrInvalid)
}

// TestOldEntriesAreForgotten promises that an entry is forgotten 30 days after it ended, and not 30 days after it was
// made.
func TestOldEntriesAreForgotten(t *testing.T) {
	t.Parallel()
	f := setup(t)
	for _, plan := range []string{"", "pro"} {
		made(t)(f.store.Put(t.Context(), why, perMinute("messages", plan, 50)))
	}
	made(t)(f.store.Override(t.Context(), why,
		rules.Override{Limit: "messages", Key: "ana", Multiplier: 2}, rules.Override{Limit: "messages", Key: "bob", Multiplier: 2}))
	made(t)(f.store.Delete(t.Context(), why, "messages", "pro"))

	logins := ratelimit.Define("logins", ratelimit.PerMinute(10))
	made(t)(f.store.Put(t.Context(), why, perMinute("logins", "", 50)))
	made(t)(f.store.Delete(t.Context(), from(f.now(t).Add(45*24*time.Hour)), "logins", ""))

	const day = `86400000000`
	f.exec(t, `UPDATE ratelimit.rules SET from_us = from_us - CASE of WHEN 'override' THEN 40 ELSE 31 END * `+day+`, made_us = made_us - 31 * `+day+`,
		until_us = CASE of WHEN 'override' THEN from_us - CASE key WHEN 'ana' THEN 29 ELSE 31 END * `+day+` END`)
	f.load(t)
	require.Equal(t, 1, f.events.last(t).Overrides, "that which ended 31 days ago is not loaded")
	require.Equal(t, 1, f.events.last(t).Rules)
	require.Equal(t, 50.0, f.capacity(t, time.Now(), logins.For("ana")))
	require.Equal(t, 10.0, f.capacity(t, time.Now().Add(15*24*time.Hour), logins.For("ana")))
	long := time.Now().Add(-30 * 24 * time.Hour)
	require.Equal(t, 100.0, f.capacity(t, long, messages.For("ana")), "it held until 29 days ago, and is known")
	require.Equal(t, 50.0, f.capacity(t, time.Now().Add(time.Hour), messages.For("ana")))

	made(t)(f.store.Override(t.Context(), why, rules.Override{Limit: "messages", Key: "bob", Multiplier: 3}))
	list := f.list(t, rules.ListQuery{})
	require.Len(t, list.Overrides, 1, "the others have ended")
}

const day = 24 * time.Hour

// immediate returns a Store whose changes begin at once.
func (f *fixture) immediate(t *testing.T) *rules.Store {
	t.Helper()
	store, err := rules.NewStore(f.pool, rules.StoreConfig{Lead: -1})
	require.NoError(t, err)
	return store
}

// putAgain adds n entries to the history of the rules, as if the last one had been put so many times more.
func (f *fixture) putAgain(t *testing.T, n int) {
	t.Helper()
	now := f.now(t).UnixMicro()
	f.exec(t, `INSERT INTO ratelimit.rules (version, of, name, says, from_us, author, reason)
		SELECT version + i, of, name, says, $2::bigint + i, author, reason
		FROM ratelimit.rules, generate_series(1, $1::integer) AS i
		WHERE version = (SELECT max(version) FROM ratelimit.rules)`, n, now)
}

// An unused bucket holds no more after any number of changes of its rule, with any policy in the code.
func TestChangesFillNoUnusedBucket(t *testing.T) {
	t.Parallel()
	for name, code := range map[string]ratelimit.Policy{
		"Smaller":    ratelimit.PerDay(10),
		"WithShards": ratelimit.TokenBucket{Rate: 500, Period: day, Capacity: 1000, Shards: 8},
		"Slots":      ratelimit.Concurrency{Slots: 5, Lease: day},
		"ACalendars": ratelimit.CalendarWindow{Rate: 10, Resets: ratelimit.Daily},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f, limit := setup(t), ratelimit.Define("messages", code)
			made(t)(f.immediate(t).Put(t.Context(), why, rules.Rule{Limit: "messages", Policy: ratelimit.TokenBucket{Rate: 1000, Period: day}}))
			f.load(t)
			d, err := f.at(t, f.now(t)).Take(t.Context(), limit.For("ana").Cost(900))
			require.NoError(t, err)
			require.True(t, d.Allowed)
			for _, more := range []int{8, 10, 100} {
				f.putAgain(t, more)
				f.load(t)
				v, err := f.at(t, f.now(t)).Check(t.Context(), limit.For("ana").Cost(101))
				require.NoError(t, err)
				require.InDelta(t, 100, v.Remaining, 0.5, "after %d more", more)
			}
		})
	}
}

// from returns an edit of a change that begins then.
func from(at time.Time) rules.Edit { return rules.Edit{Author: "ana", Reason: "a test", From: at} }

// What lies ahead is bounded when it is put, as each process keeps all of it.
func TestFutureChangesAreBounded(t *testing.T) {
	t.Parallel()
	f := setup(t)
	now := f.now(t)
	for name, put := range map[string]func(edit rules.Edit) error{
		"Put": func(edit rules.Edit) error {
			return errorOf(f.store.Put(t.Context(), edit, perMinute("messages", "", 5)))
		},
		"Override": func(edit rules.Edit) error {
			return errorOf(f.store.Override(t.Context(), edit, rules.Override{Limit: "messages", Key: "ana", Multiplier: 2}))
		},
	} {
		for i := range 32 {
			require.NoError(t, put(from(now.Add(time.Duration(i+1)*day))), name)
		}
		err := put(from(now.Add(33 * day)))
		require.ErrorIs(t, err, rules.ErrInvalid, name)
		require.ErrorContains(t, err, "32 changes lie ahead", name)
		require.NoError(t, put(from(now.Add(day))), "it takes the place of all of them")
		require.NoError(t, put(from(now.Add(33*day))), "replaced changes do not count")
		require.NoError(t, put(why), name)
	}
	slow, err := rules.NewStore(f.pool, rules.StoreConfig{Lead: time.Hour})
	require.NoError(t, err)
	for i := range 34 { // changes within the Lead, and pauses, are not bounded
		made(t)(slow.Put(t.Context(), why, perMinute("others", "", 5)))
		at := now.Add(time.Duration(i+1) * day)
		made(t)(f.store.Pause(t.Context(), from(at), rules.Pause{Limit: "messages", Key: "ana", Until: at.Add(time.Hour)}))
	}
}

// A deletion that lies ahead can be brought forward, and is there once.
func TestDeletionIsBroughtForward(t *testing.T) {
	t.Parallel()
	f := setup(t)
	now, store := f.now(t), f.immediate(t)
	made(t)(store.Put(t.Context(), why, perMinute("messages", "", 50)))
	for _, at := range []time.Duration{2 * day, day} {
		made(t)(store.Delete(t.Context(), from(now.Add(at)), "messages", ""))
	}
	f.load(t)
	require.Equal(t, 50.0, f.capacity(t, now.Add(day-time.Hour), messages.For("ana")))
	require.Equal(t, messages.Capacity(), f.capacity(t, now.Add(day+time.Hour), messages.For("ana")))
	for _, at := range []time.Duration{day, 3 * day} {
		require.ErrorIs(t, errorOf(store.Delete(t.Context(), from(now.Add(at)), "messages", "")), rules.ErrNotFound)
	}
	made(t)(store.Delete(t.Context(), why, "messages", ""))
	f.load(t)
	require.Equal(t, messages.Capacity(), f.capacity(t, f.now(t), messages.For("ana")))
	require.ErrorIs(t, errorOf(store.Delete(t.Context(), why, "messages", "")), rules.ErrNotFound)
}

// Rows that were written by hand end those before them in listings and checks, as they do in decisions.
func TestListOfRowsByHand(t *testing.T) {
	t.Parallel()
	f := setup(t)
	for version, says := range []string{`{"rate": 5, "period": "1m"}`, `{"rate": 9, "period": "1m", "kind": "fixed window", "on_change": "reset"}`} {
		f.state(t, version+1, "", says, f.now(t))
	}
	f.exec(t, `INSERT INTO ratelimit.rules (version, position, of, name, key, says, author, reason, from_us, until_us)
		SELECT 3, n, v.of, 'messages', v.key, v.says::jsonb, 'ana', 'by hand', now_us + v.begins * 60000000::bigint, now_us + v.ends * 60000000::bigint
		FROM (VALUES (1, 'override', 'ana', '{"multiplier": 2}', 0, NULL), (2, 'override', 'ana', '{"multiplier": 3}', 0, 9),
			(3, 'override', 'bob', '{"multiplier": 4}', 0, NULL), (4, 'override', 'bob', NULL, 0, NULL),
			(5, 'pause', 'eve', '{}', 0, 60), (6, 'pause', 'eve', '{}', 30, 40), (7, 'pause', 'eve', '{}', 50, 55)) AS v (n, of, key, says, begins, ends),
			(SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint AS now_us) AS c`)
	f.exec(t, `INSERT INTO ratelimit.rules_version (version) VALUES (3)`)
	list := f.list(t, rules.ListQuery{})
	require.NoError(t, list.Err)
	require.Len(t, list.Rules, 1)
	require.IsType(t, ratelimit.FixedWindow{}, list.Rules[0].Rule.Policy)
	require.Len(t, list.Overrides, 1)
	require.Equal(t, 3.0, list.Overrides[0].Override.Multiplier)
	require.Len(t, list.Pauses, 3, "a pause ends no pause that begins after it")
	require.Equal(t, list.Pauses[1].From, list.Pauses[0].Until)
	require.Equal(t, 40*time.Minute, list.Pauses[1].Until.Sub(list.Pauses[0].From))
	made(t)(f.store.Put(t.Context(), why, rules.Rule{Limit: "messages", Policy: ratelimit.FixedWindow{Rate: 8, Period: time.Minute}}))

	f.exec(t, `DELETE FROM ratelimit.rules WHERE of = 'rule' AND version > 1 OR of = 'override' AND position = 2`)
	list = f.list(t, rules.ListQuery{})
	require.Len(t, list.Rules, 1)
	require.IsType(t, ratelimit.TokenBucket{}, list.Rules[0].Rule.Policy, "a row that was deleted replaces nothing")
	require.Zero(t, list.Rules[0].Until)
	require.Equal(t, 2.0, list.Overrides[0].Override.Multiplier)
}
