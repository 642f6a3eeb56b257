package rules_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// pausing is a fixture whose pauses are counted in hours from an instant.
type pausing struct {
	*fixture
	noon time.Time
}

func setupPauses(t *testing.T) *pausing {
	t.Helper()
	return &pausing{setup(t), time.Now().Truncate(time.Microsecond)}
}

func (p *pausing) in(hours float64) time.Time {
	return p.noon.Add(time.Duration(hours * float64(time.Hour)))
}

// pause pauses a key from an hour to another. A from of 0 means at once.
func (p *pausing) pause(t *testing.T, key string, from, until float64, noSooner bool, reason string) {
	t.Helper()
	edit := rules.Edit{Author: "ana", Reason: reason}
	if from != 0 {
		edit.From = p.in(from)
	}
	made(t)(p.store.Pause(t.Context(), edit, rules.Pause{Limit: "messages", Key: key, Until: p.in(until), NoSooner: noSooner}))
}

// requirePaused loads the rules, and requires that a key is paused until an hour. 0 means that it is not paused.
func (p *pausing) requirePaused(t *testing.T, key string, until float64, reason string) {
	t.Helper()
	p.load(t)
	var want *ratelimit.Ruling
	if until != 0 {
		var err error
		want, err = ratelimit.NewRuling(messages, ratelimit.RulingConfig{Name: "messages", PausedUntil: p.in(until), PauseReason: reason})
		require.NoError(t, err)
	}
	require.Equal(t, want, p.set.RulingFor(messages, "", key), key)
}

// requireListed requires the pauses of the list, each from an hour to another.
func (p *pausing) requireListed(t *testing.T, want ...[2]float64) rules.Listing {
	t.Helper()
	list := p.list(t, rules.ListQuery{})
	require.Len(t, list.Pauses, len(want))
	for i, span := range want {
		require.WithinDuration(t, p.in(span[0]), list.Pauses[i].From, time.Minute)
		require.WithinDuration(t, p.in(span[1]), list.Pauses[i].Until, 0)
	}
	return list
}

func TestPause(t *testing.T) {
	t.Parallel()

	t.Run("OfAKeyOrALimitTheLaterEndCounts", func(t *testing.T) {
		t.Parallel()
		p := setupPauses(t)
		p.pause(t, "", 0, 1, false, "an hour")
		p.pause(t, "short", 0, 0.5, false, "an hour")
		p.pause(t, "long", 0, 24, false, "a day")
		for _, key := range []string{"ana", "", "short"} {
			p.requirePaused(t, key, 1, "an hour")
		}
		p.requirePaused(t, "long", 24, "a day")
		made(t)(p.store.Resume(t.Context(), why, "messages", ""))
		p.requirePaused(t, "ana", 0, "")
		p.requirePaused(t, "long", 24, "a day")
	})

	t.Run("LeavesThePolicyAsItIs", func(t *testing.T) {
		t.Parallel()
		p := setupPauses(t)
		made(t)(p.store.Apply(t.Context(), why, rules.Changes{
			Put: []rules.Rule{perMinute("messages", "", 50)}, Override: []rules.Override{{Limit: "messages", Key: "ana", Multiplier: 2}},
		}))
		p.load(t)
		unpaused := p.set.RulingFor(messages, "", "ana")
		p.pause(t, "ana", 0, 1, false, "a test")
		p.load(t)
		require.Equal(t, unpaused.Paused(p.in(1), "a test"), p.set.RulingFor(messages, "", "ana"))
	})

	t.Run("NoSoonerJoinsThePauseBefore", func(t *testing.T) {
		t.Parallel()
		p := setupPauses(t)
		p.pause(t, "ana", 0, 1, true, "first")
		p.pause(t, "ana", 0, 24, true, "later")
		p.pause(t, "ana", 0, 1, true, "sooner")
		p.pause(t, "ana", 1, 24, true, "inside")
		require.Equal(t, "later", p.requireListed(t, [2]float64{0, 24}).Pauses[0].Reason)
		entries := p.history(t, rules.HistoryQuery{Of: rules.OfPause})
		require.Len(t, entries, 2, "a call that changes nothing leaves no entry")
		require.Equal(t, "later", entries[0].Reason)
		p.pause(t, "ana", 1, 25, true, "from then on")
		p.requireListed(t, [2]float64{0, 25})
		p.exec(t, `UPDATE ratelimit.rules SET from_us = 1, until_us = 2, replaced_us = NULL`)
		p.requirePaused(t, "ana", 0, "")
		p.pause(t, "ana", 1, 24, true, "anew")
		p.requireListed(t, [2]float64{1, 24})
	})

	t.Run("APauseByHandStaysReplacedOnceTheOtherIsOver", func(t *testing.T) {
		t.Parallel()
		p := setupPauses(t)
		p.exec(t, `INSERT INTO ratelimit.rules (version, of, name, key, says, from_us, until_us, author, reason)
			SELECT v, 'pause', 'messages', 'ana', '{}', now_us - ago * 60000000::bigint, now_us + lasts * 60000000::bigint, 'ana', 'by hand'
			FROM (VALUES (1, 3, 60), (2, 2, -1)) AS p (v, ago, lasts), (SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint AS now_us) AS c`)
		p.requirePaused(t, "ana", 0, "")
	})

	t.Run("KeepsAFuturePause", func(t *testing.T) {
		t.Parallel()
		for _, noSooner := range []bool{false, true} {
			p := setupPauses(t)
			p.pause(t, "ana", 0, 1, noSooner, "a test")
			p.pause(t, "ana", 168, 169, noSooner, "a test")
			p.requirePaused(t, "ana", 1, "a test")
			p.pause(t, "ana", 0, 24, noSooner, "a test")
			p.requirePaused(t, "ana", 24, "a test")
			p.requireListed(t, [2]float64{0, 24}, [2]float64{168, 169})
			made(t)(p.store.Resume(t.Context(), why, "messages", "ana"))
			p.requireListed(t)
		}
	})

	t.Run("ReplacesOverlappingPauses", func(t *testing.T) {
		t.Parallel()
		p := setupPauses(t)
		for _, span := range [][2]float64{{1, 4}, {6, 8}, {10, 11}, {3, 7}} {
			p.pause(t, "ana", span[0], span[1], false, "a test")
		}
		p.requireListed(t, [2]float64{1, 3}, [2]float64{3, 7}, [2]float64{10, 11})
		p.pause(t, "ana", 7, 10, true, "a test")
		p.requireListed(t, [2]float64{1, 3}, [2]float64{3, 11})
	})

	t.Run("BeginsAtItsInstant", func(t *testing.T) {
		t.Parallel()
		p := setupPauses(t)
		p.pause(t, "", 0.5, 1, false, "a test")
		p.requirePaused(t, "ana", 0, "")
		p.run(t, rules.Config{Poll: time.Hour})
		p.listening(t, 1)
		p.exec(t, `WITH moved AS (UPDATE ratelimit.rules SET from_us = (extract(epoch FROM clock_timestamp()) * 1000000)::bigint + 200000)
			UPDATE ratelimit.rules_version SET version = version + 1 RETURNING pg_notify('ratelimit_rules', '')`)
		p.eventually(t, func() bool { return p.set.RulingFor(messages, "", "ana") != nil })
	})
}
