package rules_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

func TestPause(t *testing.T) {
	t.Parallel()
	now := time.Now().Truncate(time.Microsecond)
	hour, day := now.Add(time.Hour), now.Add(24*time.Hour)
	of := func(key string, until time.Time) rules.Pause {
		return rules.Pause{Limit: "messages", Key: key, Until: until}
	}
	// rule returns the rule as it would be with another pause, to compare with.
	rule := func(t *testing.T, name string, until time.Time, reason string) *ratelimit.Ruling {
		t.Helper()
		r, err := ratelimit.NewRuling(messages, ratelimit.RulingConfig{Name: name, PausedUntil: until, PauseReason: reason})
		require.NoError(t, err)
		return r
	}

	t.Run("OfAKeyOrALimitTheLaterEndCounts", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		_, err := f.store.Pause(t.Context(), rules.Edit{Author: "ana", Reason: "an hour"}, of("", hour), of("short", now.Add(30*time.Minute)))
		require.NoError(t, err)
		_, err = f.store.Pause(t.Context(), rules.Edit{Author: "ana", Reason: "a day"}, of("long", day))
		require.NoError(t, err)
		f.load(t)
		require.Equal(t, rule(t, "messages", hour, "an hour"), f.set.RulingFor(messages, "", "ana"))
		require.Equal(t, rule(t, "messages", hour, "an hour"), f.set.RulingFor(messages, "pro", ""), "of the bucket everybody shares too")
		require.Equal(t, rule(t, "messages", hour, "an hour"), f.set.RulingFor(messages, "", "short"))
		require.Equal(t, rule(t, "messages", day, "a day"), f.set.RulingFor(messages, "", "long"))

		_, err = f.store.Resume(t.Context(), why, "messages", "")
		require.NoError(t, err)
		f.load(t)
		require.Nil(t, f.set.RulingFor(messages, "", "ana"))
		require.Equal(t, rule(t, "messages", day, "a day"), f.set.RulingFor(messages, "", "long"))
	})

	t.Run("LeavesThePolicyAsItIs", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		applied, err := f.store.Put(t.Context(), why, perMinute("messages", "", 50))
		require.NoError(t, err)
		_, err = f.store.Override(t.Context(), why, rules.Override{Limit: "messages", Key: "ana", Multiplier: 2})
		require.NoError(t, err)
		f.load(t)
		unpaused := f.set.RulingFor(messages, "", "ana")
		_, err = f.store.Pause(t.Context(), why, of("ana", hour))
		require.NoError(t, err)
		f.load(t)
		require.Equal(t, unpaused.Paused(hour, "a test"), f.set.RulingFor(messages, "", "ana"))
		require.Equal(t, 50.0, f.capacity(t, applied.From, messages.For("bob")))
	})

	t.Run("TakesThePlaceOfTheOneBefore", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		for _, until := range []time.Time{day, hour} {
			_, err := f.store.Pause(t.Context(), why, of("", until))
			require.NoError(t, err)
		}
		f.load(t)
		require.Equal(t, rule(t, "messages", hour, "a test"), f.set.RulingFor(messages, "", "ana"))
	})

	t.Run("EndsNoSoonerThanTheOneBeforeWhereItSaysSo", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		put := func(reason string, from, until time.Time) {
			t.Helper()
			p := of("ana", until)
			p.NoSooner = true
			_, err := f.store.Pause(t.Context(), rules.Edit{Author: "ana", Reason: reason, From: from}, p)
			require.NoError(t, err)
		}
		put("first", time.Time{}, hour)
		put("later", time.Time{}, day)
		put("sooner", time.Time{}, hour)
		put("inside", hour, day)
		list, err := f.store.List(t.Context(), rules.ListQuery{})
		require.NoError(t, err)
		require.Len(t, list.Pauses, 1)
		require.True(t, list.Pauses[0].Until.Equal(day))
		require.Equal(t, "later", list.Pauses[0].Reason)
		began := list.Pauses[0].From
		entries, err := f.store.History(t.Context(), rules.HistoryQuery{Of: rules.OfPause})
		require.NoError(t, err)
		require.Len(t, entries, 2, "what changes nothing is not told")
		require.Equal(t, list.Pauses[0].Pause, entries[0].Pause)
		require.Equal(t, "later", entries[0].Reason)

		put("from then on", hour, day.Add(time.Hour))
		list, err = f.store.List(t.Context(), rules.ListQuery{})
		require.NoError(t, err)
		require.True(t, list.Pauses[0].Until.Equal(day.Add(time.Hour)))
		require.Equal(t, began, list.Pauses[0].From, "it goes on until then")

		f.exec(t, `UPDATE ratelimit.rules SET from_us = 1, until_us = 2, replaced_us = NULL`)
		put("anew", hour, day)
		list, err = f.store.List(t.Context(), rules.ListQuery{})
		require.NoError(t, err)
		require.True(t, list.Pauses[0].From.Equal(hour), "one that is over counts no more")
		require.True(t, list.Pauses[0].Until.Equal(day))
	})

	// listed returns from when until when each pause of the key "ana" is.
	listed := func(t *testing.T, f *fixture) (spans [][2]time.Time) {
		t.Helper()
		list, err := f.store.List(t.Context(), rules.ListQuery{})
		require.NoError(t, err)
		for _, p := range list.Pauses {
			spans = append(spans, [2]time.Time{p.From.Local(), p.Until.Local()})
		}
		return spans
	}
	put := func(t *testing.T, f *fixture, from, until time.Time, noSooner bool) rules.Applied {
		t.Helper()
		p := of("ana", until)
		p.NoSooner = noSooner
		applied, err := f.store.Pause(t.Context(), rules.Edit{Author: "ana", Reason: "a test", From: from}, p)
		require.NoError(t, err)
		return applied
	}
	week := now.Add(7 * 24 * time.Hour)

	for _, noSooner := range []bool{false, true} {
		t.Run(fmt.Sprintf("OfAWeekAheadLeavesTheOneOfNow/NoSooner=%t", noSooner), func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			put(t, f, time.Time{}, hour, noSooner)
			put(t, f, week, week.Add(time.Hour), noSooner)
			f.load(t)
			require.Equal(t, rule(t, "messages", hour, "a test"), f.set.RulingFor(messages, "", "ana"))
			put(t, f, time.Time{}, day, noSooner)
			f.load(t)
			require.Equal(t, rule(t, "messages", day, "a test"), f.set.RulingFor(messages, "", "ana"))
			spans := listed(t, f)
			require.Len(t, spans, 2)
			require.Equal(t, [2]time.Time{week, week.Add(time.Hour)}, spans[1])
			entries, err := f.store.History(t.Context(), rules.HistoryQuery{Of: rules.OfPause})
			require.NoError(t, err)
			require.Len(t, entries, 3)

			_, err = f.store.Resume(t.Context(), why, "messages", "ana")
			require.NoError(t, err)
			require.Empty(t, listed(t, f), "the one that lies ahead is taken back, too")
		})
	}

	t.Run("TakesThePlaceOfWhatItOverlaps", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		in := func(hours int) time.Time { return now.Add(time.Duration(hours) * time.Hour) }
		put(t, f, in(1), in(4), false)
		put(t, f, in(6), in(8), false)
		put(t, f, in(10), in(11), false)
		put(t, f, in(3), in(7), false)
		require.Equal(t, [][2]time.Time{{in(1), in(3)}, {in(3), in(7)}, {in(10), in(11)}}, listed(t, f))

		put(t, f, in(7), in(10), true)
		require.Equal(t, [][2]time.Time{{in(1), in(3)}, {in(3), in(11)}}, listed(t, f), "one pause of those that it touches")
	})

	t.Run("GoesOnWhereAnotherBeginsAsItEnds", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		put(t, f, time.Time{}, hour, false)
		put(t, f, now.Add(30*time.Minute), day, false)
		put(t, f, week, week.Add(time.Hour), false)
		f.load(t)
		require.Equal(t, rule(t, "messages", day, "a test"), f.set.RulingFor(messages, "", "ana"))
	})

	t.Run("BeginsWhenItSays", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		edit := why
		edit.From = now.Add(30 * time.Minute)
		_, err := f.store.Pause(t.Context(), edit, of("", hour))
		require.NoError(t, err)
		f.load(t)
		require.Nil(t, f.set.RulingFor(messages, "", "ana"), "it lies ahead")

		f.run(t, rules.Config{Poll: time.Hour})
		f.listening(t, 1)
		f.exec(t, `WITH moved AS (UPDATE ratelimit.rules SET from_us = (extract(epoch FROM clock_timestamp()) * 1000000)::bigint + 200000)
			UPDATE ratelimit.rules_version SET version = version + 1 RETURNING pg_notify('ratelimit_rules', '')`)
		f.eventually(t, func() bool { return f.set.RulingFor(messages, "", "ana") != nil })
	})

	t.Run("IsOverInTime", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		_, err := f.store.Pause(t.Context(), why, of("", hour))
		require.NoError(t, err)
		f.exec(t, `UPDATE ratelimit.rules SET from_us = 1, until_us = 2, replaced_us = NULL`)
		f.load(t)
		require.Nil(t, f.set.RulingFor(messages, "", "ana"), "there is nothing left to say")
	})
}
