package rules_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

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
		"Slots":      ratelimit.Concurrency{Most: 5, Lease: day},
		"ACalendars": ratelimit.CalendarWindow{Rate: 10, Resets: ratelimit.Daily},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f, limit := setup(t), ratelimit.Define("messages", code)
			_, err := f.immediate(t).Put(t.Context(), why, rules.Rule{Limit: "messages", Policy: ratelimit.TokenBucket{Rate: 1000, Period: day}})
			require.NoError(t, err)
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
func TestChangesAheadAreBounded(t *testing.T) {
	t.Parallel()
	f := setup(t)
	now := f.now(t)
	for name, put := range map[string]func(edit rules.Edit) error{
		"Put": func(edit rules.Edit) error {
			_, err := f.store.Put(t.Context(), edit, perMinute("messages", "", 5))
			return err
		},
		"Override": func(edit rules.Edit) error {
			_, err := f.store.Override(t.Context(), edit, rules.Override{Limit: "messages", Key: "ana", Multiplier: 2})
			return err
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
		_, err := slow.Put(t.Context(), why, perMinute("others", "", 5))
		require.NoError(t, err)
		at := now.Add(time.Duration(i+1) * day)
		_, err = f.store.Pause(t.Context(), from(at), rules.Pause{Limit: "messages", Key: "ana", Until: at.Add(time.Hour)})
		require.NoError(t, err)
	}
}

// A deletion is forgotten when it has been in effect for 30 days, and not 30 days after it was made.
func TestDeletionFarAhead(t *testing.T) {
	t.Parallel()
	f := setup(t)
	now := f.now(t)
	_, err := f.immediate(t).Put(t.Context(), why, perMinute("messages", "", 50))
	require.NoError(t, err)
	_, err = f.store.Delete(t.Context(), from(now.Add(45*day)), "messages", "")
	require.NoError(t, err)
	f.exec(t, `UPDATE ratelimit.rules SET from_us = from_us - 31 * 86400000000, made_us = made_us - 31 * 86400000000`)
	f.load(t)
	require.Equal(t, 50.0, f.capacity(t, now, messages.For("ana")))
	require.Equal(t, messages.Capacity(), f.capacity(t, now.Add(15*day), messages.For("ana")))
}

// A deletion that lies ahead can be brought forward, and is there once.
func TestDeletionIsBroughtForward(t *testing.T) {
	t.Parallel()
	f := setup(t)
	now, store := f.now(t), f.immediate(t)
	_, err := store.Put(t.Context(), why, perMinute("messages", "", 50))
	require.NoError(t, err)
	for _, at := range []time.Duration{2 * day, day} {
		_, err = store.Delete(t.Context(), from(now.Add(at)), "messages", "")
		require.NoError(t, err)
	}
	f.load(t)
	require.Equal(t, 50.0, f.capacity(t, now.Add(day-time.Hour), messages.For("ana")))
	require.Equal(t, messages.Capacity(), f.capacity(t, now.Add(day+time.Hour), messages.For("ana")))
	for _, at := range []time.Duration{day, 3 * day} {
		_, err = store.Delete(t.Context(), from(now.Add(at)), "messages", "")
		require.ErrorIs(t, err, rules.ErrNotFound)
	}
	_, err = store.Delete(t.Context(), why, "messages", "")
	require.NoError(t, err)
	f.load(t)
	require.Equal(t, messages.Capacity(), f.capacity(t, f.now(t), messages.For("ana")))
	_, err = store.Delete(t.Context(), why, "messages", "")
	require.ErrorIs(t, err, rules.ErrNotFound)
}
