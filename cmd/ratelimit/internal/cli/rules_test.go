package cli_test

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

const firstFile = `
match: all
rules:
  - {limit: search, plan: free, rate: 5, period: minute}
  - {limit: search, plan: pro, rate: 300, period: minute}
  - {limit: site, rate: 1000, period: 1s, capacity: 2000, unit: requests}
tiers:
  - {limit: search, key: "{user}", route: GET /search, when: {user: "*"}}
  - {limit: site}
overrides:
  - {limit: search, key: ada, multiplier: 10}
`

const secondFile = `
match: all
rules:
  - {limit: search, plan: free, rate: 5, period: minute}
  - {limit: search, plan: pro, rate: 600, period: minute, capacity: 50, on_change: scale, description: more for those who pay}
  - {limit: mail, rate: 10, period: day, kind: fixed window, shards: 4, max_reserved: 7, mode: shadow, start: 2026-01-01T00:00:00Z}
overrides:
  - {limit: search, key: ada, on_plan: pro, until: 2099-01-01T00:00:00Z}
  - {limit: search, key: bob, policy: {rate: 1, period: hour}}
  - {limit: search, key: gone, multiplier: 2, until: 2020-01-01T00:00:00Z}
`

const everyKind = `
rules:
  - {limit: bucket, rate: 10, period: minute, capacity: 0, max_reserved: 5, shards: 4}
  - {limit: unreserved, rate: 10, period: minute, max_reserved: forbidden}
  - {limit: window, kind: fixed window, rate: 10, period: 90s, start: 2026-01-01T00:00:00Z, max_reserved: 0}
  - {limit: sliding, kind: sliding window, rate: 100, period: minute, slices: 30}
  - {limit: month, kind: calendar window, rate: 1000, resets: month, zone: Europe/Berlin, first_day: 15}
  - {limit: year, kind: calendar window, rate: 1000, resets: year, first_month: april, first_day: 6}
  - {limit: slots, kind: concurrency, most: 5, lease: 30s}
  - {limit: upstream, rate: 50, period: second, adaptive: {floor: 0.2, growth: 0.05, epoch: 3s, apply: true}}
overrides:
  - {limit: month, key: ada, policy: {kind: calendar window, rate: 9, resets: week, first_weekday: monday}, mode: off}
`

// change is a change that diff, apply and history print.
type change struct {
	Of, Change, Limit, Plan, Key string
	Old, New                     json.RawMessage
}

// brief returns changes as +rule search/free and the like.
func brief(changes []change) (lines []string) {
	for _, c := range changes {
		lines = append(lines, strings.TrimSpace(c.Change+" "+c.Of+" "+c.Limit+" "+c.Plan+c.Key))
	}
	return lines
}

// applied is what apply prints.
type applied struct {
	Applied bool
	Version int64
	From    time.Time
	Changes []change
}

func TestRulesApply(t *testing.T) {
	t.Parallel()

	t.Run("MakesTheTablesSayWhatTheFileSays", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		first, second := file(t, "first.yaml", firstFile), file(t, "second.yaml", secondFile)
		all := []string{"add rule search free", "add rule search pro", "add rule site", "add override search ada", "replace tiers"}
		require.Equal(t, all, brief(read[[]change](t, f, 4, "rules", "diff", "-f", first)))
		require.Equal(t, all, brief(read[applied](t, f, 4, "rules", "apply", "-f", first, "--dry-run").Changes))
		require.Empty(t, read[[]change](t, f, 0, "rules", "history"), "nothing was changed")

		a := read[applied](t, f, 0, "rules", "apply", "-f", first, "--reason", "the first", "--yes")
		require.True(t, a.Applied)
		require.Equal(t, int64(1), a.Version)
		require.Equal(t, all, brief(a.Changes))
		require.Empty(t, read[[]change](t, f, 0, "rules", "diff", "-f", first))
		require.Empty(t, f.ok(t, "rules", "diff", "-f", first))
		require.Contains(t, f.ok(t, "rules", "apply", "-f", first, "--reason", "again", "--yes"), "nothing to change")
		require.Equal(t, int64(1), read[applied](t, f, 0, "rules", "apply", "-f", first, "--reason", "again", "-y").Version)

		r := f.run(t, "rules", "diff", "--file", second)
		require.Equal(t, 4, r.code)
		require.Contains(t, r.out, "~ rule search, plan pro        300 per minute -> 600 per minute, capacity 50, on change scale, description \"more for those who pay\"\n")
		require.Contains(t, r.out, "+ rule mail                    10 per day (fixed window, one starts at 2026-01-01T00:00:00Z), up to 7 owed, 4 shards, mode shadow\n")
		require.Contains(t, r.out, "~ override of search, key ada  10 times -> as on plan pro, until 2099-01-01 00:00:00Z\n")
		require.Contains(t, r.out, "+ override of search, key bob  1 per hour\n")
		require.NotContains(t, r.out, "gone")
		require.NotContains(t, r.out, "site")
		require.Contains(t, r.err, "rule site is only in the tables, and stays; --delete-missing deletes it")

		some := []string{"replace rule search pro", "add rule mail", "replace override search ada", "add override search bob"}
		a = read[applied](t, f, 0, "rules", "apply", "-f", second, "--reason", "the second", "--author", "bob", "--yes")
		require.Equal(t, some, brief(a.Changes))
		require.Empty(t, read[[]change](t, f, 0, "rules", "diff", "-f", second))
	})

	t.Run("NotesTiersOfLimitsWithoutARule", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.ok(t, "rules", "apply", "-f", file(t, "rules.yaml", firstFile), "--reason", "the first", "--yes")
		path := file(t, "rules.yaml", "match: all\nrules: [{limit: site, rate: 1000, period: 1s, capacity: 2000, unit: requests}]\ntiers: [{limit: site}, {limit: search}, {limit: serch}]")
		require.Contains(t, f.run(t, "rules", "diff", "-f", path).err, "tiers name limits that have no rule: serch;")
		require.Contains(t, f.run(t, "rules", "diff", "-f", path, "--delete-missing").err, "tiers name limits that have no rule: search, serch;")
	})

	t.Run("DeletesWhatIsMissingOnlyWhenTold", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.ok(t, "rules", "apply", "-f", file(t, "rules.yaml", firstFile), "--reason", "the first", "--yes")
		path := file(t, "rules.yaml", "rules: [{limit: site, rate: 1000, period: 1s, capacity: 2000, unit: requests}]")
		require.Empty(t, read[[]change](t, f, 0, "rules", "diff", "-f", path))
		r := f.run(t, "rules", "apply", "-f", path, "--dry-run", "--delete-missing")
		require.Equal(t, 4, r.code)
		require.Contains(t, r.out, "- rule search, plan free  5 per minute")
		require.Contains(t, r.err, "override of search, key ada is only in the tables, and stays; --delete-missing-overrides deletes it")
		require.Equal(t, []string{"delete rule search free", "delete rule search pro", "replace tiers"}, brief(read[[]change](t, f, 4, "rules", "diff", "-f", path, "--delete-missing")))
		require.Equal(t, []string{"delete override search ada"}, brief(read[[]change](t, f, 4, "rules", "diff", "-f", path, "--delete-missing-overrides")))
		a := read[applied](t, f, 0, "rules", "apply", "-f", path, "--delete-missing", "--delete-missing-overrides", "--reason", "less", "--yes")
		require.Len(t, a.Changes, 4)
		t.Run("AndListsTheRestWhenThatHolds", func(t *testing.T) {
			testsize.Long(t, "waits two seconds until the change holds")
			f.wait(t)
			out := f.ok(t, "rules", "list")
			require.NotContains(t, out, "free")
			require.NotContains(t, out, "TIER")
		})
	})

	t.Run("IsRefusedBeforeAnythingIsDone", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		good, bad := file(t, "good.yaml", firstFile), file(t, "bad.yaml", "rules:\n  - {limit: a, rate: 1, period: 1s, burts: 3}")
		require.Contains(t, f.fails(t, 2, "rules", "apply", "-f", good, "--reason", "x"), "give --yes")
		require.Contains(t, f.fails(t, 2, "rules", "apply", "-f", good, "--yes"), "say with --reason why")
		require.Contains(t, f.fails(t, 2, "rules", "apply", "-f", bad, "--reason", "x", "--yes"), "burts")
		require.Contains(t, f.fails(t, 2, "rules", "apply", "-f", good, "--reason", "x", "--yes", "--from", "2020-01-01T00:00:00Z"), "which is past")
		require.Contains(t, f.ok(t, "rules", "list"), "no rules, overrides, pauses or tiers")
		from := time.Now().Add(time.Hour).UTC().Truncate(time.Second)
		a := read[applied](t, f, 0, "rules", "apply", "-f", good, "--reason", "x", "--yes", "--from", from.Format(time.RFC3339))
		require.Equal(t, from, a.From)
		require.Contains(t, f.ok(t, "rules", "list"), "(in ")
	})

	t.Run("ChangesNothingWhereSomebodyElseWasFaster", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		ctx := t.Context()
		tx, err := f.pool.Begin(ctx)
		require.NoError(t, err)
		_, err = f.store.WithTx(tx).Put(ctx, rules.Edit{Author: "eve", Reason: "meanwhile"}, weekly("site", "", 7))
		require.NoError(t, err)
		path := file(t, "rules.yaml", firstFile)
		done := make(chan result, 1)
		go func() { done <- run(ctx, f.env, "", "rules", "apply", "-f", path, "--reason", "x", "--yes") }()
		require.Eventually(t, func() bool {
			var waits bool
			err := f.pool.QueryRow(ctx, `SELECT count(*) > 0 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`).Scan(&waits)
			return err == nil && waits
		}, time.Minute, time.Millisecond)
		require.NoError(t, tx.Commit(ctx))
		r := <-done
		require.Equal(t, 1, r.code, r.out)
		require.Contains(t, r.err, "somebody has changed the rules meanwhile")
		list, err := f.store.List(context.WithoutCancel(ctx), rules.ListQuery{})
		require.NoError(t, err)
		require.Equal(t, int64(1), list.Version)
		require.Len(t, list.Rules, 1)
	})

	t.Run("ARoleThatMayNotIsTold", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.env = append(f.env, "RATELIMIT_DATABASE_URL="+withParameter(f.url, "default_transaction_read_only=on"))
		require.Contains(t, f.fails(t, 1, "rules", "apply", "-f", file(t, "r.yaml", firstFile), "--reason", "x", "--yes"), "a role that may write")
	})
}

func TestRulesShow(t *testing.T) {
	t.Parallel()

	t.Run("ListAndGet", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.ok(t, "rules", "apply", "-f", file(t, "rules.yaml", firstFile), "--reason", "the first\nline", "--yes")
		f.ok(t, "pause", "search", "ada", "--for", "1h", "--reason", "a leak")
		out := f.ok(t, "rules", "list")
		for _, want := range []string{"search  free  5 per minute", "1000 per second, capacity 2000, unit requests", "OVERRIDE OF", "10 times", `"the first\nline"`, "PAUSE OF", "a leak", "TIER (match all)", `search by {user}, at GET /search, when user is "*"`} {
			require.Contains(t, out, want)
		}
		for _, format := range []string{"json", "yaml"} {
			all, one := f.ok(t, "rules", "list", "-o", format), f.ok(t, "rules", "get", "site", "-o", format)
			require.Contains(t, f.ok(t, "rules", "validate", "-f", file(t, "all", all)), "has 3 rules, 2 tiers and 1 override")
			require.Contains(t, f.ok(t, "rules", "validate", "-f", file(t, "one", one)), "has 1 rule, 1 tier and 0 overrides")
		}
		require.NotContains(t, f.ok(t, "rules", "get", "site"), "search")
		require.Contains(t, f.fails(t, 6, "rules", "get", "sight"), `the tables have nothing about a limit "sight"; the limits with rules are search, site`)
		require.Equal(t, 2, f.run(t, "rules", "get", "not a name").code)
	})

	t.Run("WhatAListPrintsChangesNothingWhenItIsApplied", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.ok(t, "rules", "apply", "-f", file(t, "rules.yaml", secondFile), "--reason", "x", "--yes")
		f.ok(t, "rules", "apply", "-f", file(t, "kinds.yaml", everyKind), "--reason", "x", "--yes")
		for _, format := range []string{"json", "yaml"} {
			list := file(t, "again", f.ok(t, "rules", "list", "-o", format))
			require.Empty(t, f.ok(t, "rules", "diff", "--delete-missing", "--delete-missing-overrides", "-f", list))
			require.Contains(t, f.ok(t, "rules", "apply", "-f", list, "--reason", "again", "--yes"), "nothing to change")
		}
	})

	t.Run("Validate", func(t *testing.T) {
		t.Parallel()
		f := &fixture{}
		require.Contains(t, f.ok(t, "rules", "validate", "-f", file(t, "rules.yaml", firstFile)), "has 3 rules, 2 tiers and 1 override")
		require.Contains(t, f.fails(t, 5, "rules", "validate", "--file", file(t, "rules.yaml", "rules:\n  - {limit: a, rate: 1, period: 1s, burts: 3}")), "line 2")
		f.fails(t, 5, "rules", "validate", "-f", file(t, "rules.yaml", "rules: [{limit: a, rps: -1}]"))
		require.Contains(t, f.fails(t, 2, "rules", "validate", "-f", "none.yaml"), "no such file")
		type validity struct {
			File, Says              string
			Valid                   bool
			Rules, Tiers, Overrides int
		}
		good, bad := file(t, "good.yaml", firstFile), file(t, "bad.yaml", "rules:\n  - {limit: a, rate: 1, period: 1s, burts: 3}")
		require.Equal(t, validity{good, "", true, 3, 2, 1}, read[validity](t, f, 0, "rules", "validate", "-f", good))
		v := read[validity](t, f, 5, "rules", "validate", "-f", bad)
		require.False(t, v.Valid)
		require.Contains(t, v.Says, "line 2")
	})

	t.Run("ValidateFindsUnknownZonesAndNotesMistakes", func(t *testing.T) {
		t.Parallel()
		f := &fixture{}
		for _, text := range []string{
			"rules: [{limit: calls, kind: calendar window, rate: 3, resets: day, zone: Europe/Berlim}]",
			"overrides: [{limit: calls, key: ada, policy: {kind: calendar window, rate: 3, resets: day, zone: Europe/Berlim}}]",
		} {
			require.Contains(t, f.fails(t, 5, "rules", "validate", "-f", file(t, "rules.yaml", text)), `"calls"`)
			require.Contains(t, f.fails(t, 5, "rules", "validate", "-f", file(t, "rules.yaml", text)), `knows no time zone "Europe/Berlim"`)
		}
		r := f.run(t, "rules", "validate", "-f", file(t, "rules.yaml", `
rules:
  - {limit: calls, rate: 3, period: week}
  - {limit: Calls, rate: 0.5, period: week}
  - {limit: slow, plan: pro, rate: 3, period: week, capacity: 0.5}
  - {limit: slots, kind: concurrency, most: 3}
  - {limit: zone, kind: calendar window, rate: 3, resets: day, zone: Europe/Berlin}
match: all
tiers:
  - {limit: calls, key: "{ip}"}
  - {limit: cals}
`))
		require.Equal(t, 0, r.code, r.err)
		require.Equal(t, `note: rule "Calls", plan "": its capacity is 0.5, so a request with the default cost of 1 is an error
note: rule "slow", plan "pro": its capacity is 0.5, so a request with the default cost of 1 is an error
note: the limits "Calls" and "calls" differ only in case, and are two limits
note: tiers name limits that have no rule: cals; correct the names, add rules, or name the limits in rules.SiteConfig of each program
note: tiers name attributes that a program must declare in rules.SiteConfig: ip
`, r.err)
	})

	t.Run("ShowsWhatHoldsNowBesideWhatLiesAhead", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		now := time.Now().UTC().Truncate(time.Second)
		change := func(from time.Time, changes rules.Changes) {
			_, err := f.store.Apply(t.Context(), rules.Edit{Author: "eve", Reason: "x", From: from}, changes)
			require.NoError(t, err)
		}
		put := func(from time.Time, stated ...rules.Rule) { change(from, rules.Changes{Put: stated}) }
		day, week := now.Add(ratelimit.Day), now.Add(ratelimit.Week)
		hourly := func(limit string, rate float64) rules.Rule {
			return rules.Rule{Limit: limit, Policy: ratelimit.TokenBucket{Rate: rate, Period: time.Hour}}
		}
		put(time.Time{}, hourly("sends", 10), hourly("goes", 7))
		put(day, hourly("sends", 5), hourly("new", 6))
		put(week, hourly("sends", 20))
		change(day, rules.Changes{Delete: []rules.RuleID{{Limit: "goes"}}})
		require.Contains(t, f.ok(t, "rules", "get", "goes"), "7 per hour, until "+day.Format("2006-01-02 15:04:05Z"))
		out := f.ok(t, "rules", "get", "sends")
		require.Contains(t, out, "10 per hour, until "+day.Format("2006-01-02 15:04:05Z"))
		require.Contains(t, out, "(in 7 days)", "how far away it is")
		require.Contains(t, f.ok(t, "rules", "history", "sends"), "20 per hour, from "+week.Format("2006-01-02 15:04:05Z"))
		file := f.ok(t, "rules", "list", "-o", "yaml")
		require.NotContains(t, file, "goes", "it is to be deleted")
		require.Equal(t, 1, strings.Count(file, "limit: sends"), "what was stated last")
		require.Contains(t, f.fails(t, 2, "take", "new", "ada"), "a rule in the tables holds from "+day.Format(time.DateOnly))
		put(time.Date(9000, 1, 1, 0, 0, 0, 0, time.UTC), hourly("far", 1))
		require.Contains(t, f.ok(t, "rules", "get", "far"), "9000-01-01 00:00:00Z (in more than 100 years)")
	})

	t.Run("History", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		require.NotContains(t, f.ok(t, "rules", "history"), "1")
		f.ok(t, "rules", "apply", "-f", file(t, "rules.yaml", firstFile), "--reason", "the first", "--yes")
		f.ok(t, "rules", "apply", "-f", file(t, "rules.yaml", secondFile), "--reason", "the second", "--author", "bob", "--yes", "--delete-missing")
		f.ok(t, "pause", "search", "ada", "--for", "1h", "--reason", "a leak")
		f.ok(t, "resume", "search", "ada", "--reason", "mended")
		out := f.ok(t, "rules", "history")
		require.Contains(t, out, "the second  rule search, plan pro        600 per minute, capacity 50")
		require.Contains(t, out, "rule site                    removed")
		require.Contains(t, out, "pause of search, key ada")
		type entry struct {
			Version        int64
			Author, Reason string
			Made, From     time.Time
			Says           json.RawMessage
		}
		entries := read[[]entry](t, f, 0, "rules", "history", "search", "--of", "rule", "--plan", "pro")
		require.Len(t, entries, 2)
		require.Equal(t, "bob", entries[0].Author)
		require.Contains(t, string(entries[0].Says), "600")
		entries = read[[]entry](t, f, 0, "rules", "history", "search", "--key", "ada", "--of", "pause")
		require.Equal(t, "null", string(entries[0].Says))
		require.Equal(t, "mended", entries[0].Reason)
		require.Len(t, read[[]entry](t, f, 0, "rules", "history", "--most", "1", "--of", "rule"), 1)
		entries = read[[]entry](t, f, 0, "rules", "history", "--before", "2", "-n", "100")
		require.Equal(t, int64(1), entries[0].Version)
		require.Contains(t, f.fails(t, 2, "rules", "history", "--of", "weather"), "--of is")
		require.Contains(t, f.fails(t, 2, "rules", "history", "--most", "0"), "--most is 0")
		require.Contains(t, f.fails(t, 2, "rules", "history", "two words"), "invalid limit")
		require.Contains(t, f.fails(t, 2, "rules", "history", "a", "b"), "there are 2 arguments")
		require.Contains(t, f.ok(t, "rules", "history", "none"), "there are no changes")
	})
}
