package rules_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// tables returns all that is stored, in a form that can be compared.
func (f *fixture) tables(t testing.TB) string {
	t.Helper()
	var all []string
	for _, table := range []string{"rules", "rules_version"} {
		rows, err := f.pool.Query(t.Context(), fmt.Sprintf("SELECT '%s ' || x::text FROM ratelimit.%[1]s x ORDER BY 1", table))
		require.NoError(t, err)
		lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(t, err)
		all = append(all, lines...)
	}
	return strings.Join(all, "\n")
}

func TestApply(t *testing.T) {
	t.Parallel()

	t.Run("WorksInEveryQueryMode", func(t *testing.T) {
		t.Parallel()
		for _, mode := range []pgx.QueryExecMode{
			pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec,
			pgx.QueryExecModeSimpleProtocol,
		} {
			f := setupOn(t, postgrestest.New(t, func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = mode }))
			made(t)(f.store.Apply(t.Context(), why, rules.Changes{Tiers: &rules.TierSet{Tiers: make([]rules.Tier, 0)}}))
			tiers := rules.TierSet{Match: rules.MatchFirst, Tiers: []rules.Tier{
				{Limit: "messages", Key: "{user}", Route: "POST /m", When: map[string]string{"user": "*"}, CostSource: "header:X-Cost", DefaultCost: 2},
				{Limit: "logins", FixedCost: 2},
			}}
			_, err := f.store.Apply(t.Context(), why, rules.Changes{
				Put:      []rules.Rule{perMinute("messages", "", 5), perMinute("messages", "pro", 50)},
				Override: []rules.Override{{Limit: "messages", Key: "ana", Policy: ratelimit.TokenBucket{Rate: 2, Period: time.Hour}}},
				Pause:    []rules.Pause{{Limit: "logins", Until: time.Now().Add(time.Hour)}},
				Tiers:    &tiers,
			})
			require.NoError(t, err, mode)
			require.NoError(t, f.set.Load(t.Context()), mode)
			require.Equal(t, tiers, f.set.Tiers(), mode)
			_, err = f.store.Apply(t.Context(), why, rules.Changes{
				Delete: []rules.RuleID{{Limit: "messages", Plan: "pro"}}, RemoveOverride: []rules.Bucket{{Limit: "messages", Key: "ana"}},
				Resume: []rules.Bucket{{Limit: "logins"}},
			})
			require.NoError(t, err, mode)
			list, err := f.store.List(t.Context(), rules.ListQuery{})
			require.NoError(t, err, mode)
			require.Equal(t, tiers, list.Tiers, mode)
			require.Len(t, list.Rules, 2, mode)
			require.Zero(t, list.Rules[0].Until, mode)
			require.NotZero(t, list.Rules[1].Until, "it holds until the deletion does")
			require.Empty(t, list.Pauses, mode)
			entries, err := f.store.History(t.Context(), rules.HistoryQuery{})
			require.NoError(t, err, mode)
			require.Len(t, entries, 9, mode)
		}
	})

	t.Run("MakesAllChangesOrNone", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		changes := rules.Changes{
			Put:      []rules.Rule{perMinute("messages", "", 5), perMinute("messages", "pro", 50)},
			Override: []rules.Override{{Limit: "messages", Key: "ana", Multiplier: 2}},
			Pause:    []rules.Pause{{Limit: "logins", Until: time.Now().Add(time.Hour)}},
			Tiers:    &rules.TierSet{Tiers: []rules.Tier{{Limit: "messages", Key: "{user}", FixedCost: 1}}},
		}
		applied := made(t)(f.store.Apply(t.Context(), why, changes))
		require.Equal(t, int64(1), applied.Version)
		list := f.list(t, rules.ListQuery{})
		require.Len(t, list.Rules, 2)
		require.Len(t, list.Overrides, 1)
		require.Len(t, list.Pauses, 1)
		require.Equal(t, rules.TierSet{Match: rules.MatchAll, Tiers: []rules.Tier{{Limit: "messages", Key: "{user}"}}}, list.Tiers)
		require.Equal(t, applied.From, list.Rules[0].From)
		require.Equal(t, int64(1), list.Rules[0].Version)
		require.Equal(t, "ana", list.Overrides[0].Author)
		require.Equal(t, "a test", list.Pauses[0].Reason)

		before := f.tables(t)
		for _, missing := range []rules.Changes{
			{Delete: []rules.RuleID{{Limit: "messages", Plan: "none"}}},
			{RemoveOverride: []rules.Bucket{{Limit: "messages", Key: "bob"}}},
			{Resume: []rules.Bucket{{Limit: "messages"}}},
		} {
			missing.Put = changes.Put
			require.ErrorIs(t, errorOf(f.store.Apply(t.Context(), why, missing)), rules.ErrNotFound)
			require.Equal(t, before, f.tables(t))
		}
	})

	t.Run("HoldsFromALittleAheadOnTheDatabasesClock", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		lead := func(config rules.StoreConfig) time.Duration {
			store, err := rules.NewStore(f.pool, config)
			require.NoError(t, err)
			applied := made(t)(store.Put(t.Context(), why, perMinute("messages", "", 5)))
			history, err := store.History(t.Context(), rules.HistoryQuery{Most: 1})
			require.NoError(t, err)
			return applied.From.Sub(history[0].Made)
		}
		require.Equal(t, 2*time.Second, lead(rules.StoreConfig{}))
		require.Equal(t, time.Minute, lead(rules.StoreConfig{Lead: time.Minute}))
		require.Equal(t, time.Duration(0), lead(rules.StoreConfig{Lead: -1}))
	})

	t.Run("RejectsInvalidChanges", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		good := perMinute("messages", "", 5)
		soon := time.Now().Add(time.Hour)
		override := func(o rules.Override) rules.Changes { return rules.Changes{Override: []rules.Override{o}} }
		for want, changes := range map[string]rules.Changes{
			"there is no change":           {},
			"Rate is 0":                    {Put: []rules.Rule{good, perMinute("messages", "pro", 0)}},
			"name \"no name\"":             {Put: []rules.Rule{perMinute("no name", "", 5)}},
			"Plan is \"a b\"":              {Put: []rules.Rule{perMinute("messages", "a b", 5)}},
			"Mode is \"of\"":               {Put: []rules.Rule{{Limit: "messages", Policy: ratelimit.TokenBucket{Rate: 1, Period: 1e9}, Mode: "of"}}},
			"OnChange is \"half\"":         {Put: []rules.Rule{{Limit: "messages", Policy: ratelimit.TokenBucket{Rate: 1, Period: 1e9}, OnChange: "half"}}},
			"Unit has 65 bytes":            {Put: []rules.Rule{{Limit: "messages", Policy: ratelimit.TokenBucket{Rate: 1, Period: 1e9}, Unit: strings.Repeat("u", 65)}}},
			"Description has":              {Put: []rules.Rule{{Limit: "messages", Policy: ratelimit.TokenBucket{Rate: 1, Period: 1e9}, Description: "a\x00"}}},
			"changed twice":                {Put: []rules.Rule{good}, Delete: []rules.RuleID{{Limit: "messages"}}},
			"rule \"\"":                    {Delete: []rules.RuleID{{}}},
			"it has 0 of":                  override(rules.Override{Limit: "messages", Key: "ana"}),
			"it has 2 of":                  override(rules.Override{Limit: "messages", Key: "ana", Multiplier: 2, OnPlan: "pro"}),
			"Multiplier is NaN":            override(rules.Override{Limit: "messages", Key: "ana", Multiplier: math.NaN()}),
			"OnPlan is":                    override(rules.Override{Limit: "messages", Key: "ana", OnPlan: "a b"}),
			"Key has 257 bytes":            override(rules.Override{Limit: "messages", Key: strings.Repeat("k", 257), Multiplier: 2}),
			"it has a Mode and no Policy":  override(rules.Override{Limit: "messages", Key: "ana", Multiplier: 2, Mode: ratelimit.Off}),
			"ends at":                      override(rules.Override{Limit: "messages", Key: "ana", Multiplier: 2, Until: soon.Add(-2 * time.Hour)}),
			"pause of \"messages\": it en": {Pause: []rules.Pause{{Limit: "messages", Until: soon.Add(-2 * time.Hour)}}},
			"it has no Until":              {Pause: []rules.Pause{{Limit: "messages"}}},
			"pause of \"no name\"":         {Resume: []rules.Bucket{{Limit: "no name"}}},
			"tier 0":                       {Tiers: &rules.TierSet{Tiers: []rules.Tier{{Limit: "messages", CostSource: "cookie:x"}}}},
			"it has a brace":               {Tiers: &rules.TierSet{Tiers: []rules.Tier{{Limit: "messages", Key: "{user"}}}},
			"Match is":                     {Tiers: &rules.TierSet{Match: "some"}},
			"10001 changes":                {Delete: make([]rules.RuleID, 10_001)},
		} {
			_, err := f.store.Apply(t.Context(), why, changes)
			require.ErrorIs(t, err, rules.ErrInvalid, want)
			require.ErrorContains(t, err, want)
		}
		for want, edit := range map[string]rules.Edit{
			"no Author":       {Reason: "why"},
			"no Reason":       {Author: "ana", Reason: " \t"},
			"Author has":      {Author: strings.Repeat("a", 257), Reason: "why"},
			"which is past":   {Author: "ana", Reason: "why", From: time.Now().Add(-time.Hour)},
			"use a time from": {Author: "ana", Reason: "why", From: time.Date(10_000, 1, 1, 0, 0, 0, 0, time.UTC)},
		} {
			_, err := f.store.Put(t.Context(), edit, good)
			require.ErrorIs(t, err, rules.ErrInvalid, want)
			require.ErrorContains(t, err, want)
		}
		_, err := f.store.Apply(t.Context(), rules.Edit{Author: "ana", Reason: "why", From: soon}, rules.Changes{Resume: []rules.Bucket{{Limit: "messages"}}})
		require.ErrorContains(t, err, "Resume with a From")
		require.Empty(t, f.tables(t))
	})

	t.Run("LosesNoChangeOfConcurrentWriters", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		group, ctx := errgroup.WithContext(t.Context())
		writers, each := 8, testkit.Sized(8, 25)
		for w := range writers {
			group.Go(func() error {
				for i := range each {
					if _, err := f.store.Put(ctx, why, perMinute("messages", fmt.Sprint(i%3), float64(w*each+i+1))); err != nil {
						return err
					}
				}
				return nil
			})
		}
		require.NoError(t, group.Wait())
		history := f.history(t, rules.HistoryQuery{Most: 1000})
		require.Len(t, history, writers*each)
		rates := make(map[float64]bool)
		for i, entry := range history {
			require.Equal(t, int64(writers*each-i), entry.Version)
			rates[entry.Rule.Policy.(ratelimit.TokenBucket).Rate] = true
			if i > 0 {
				require.False(t, entry.From.After(history[i-1].From), "they hold in the order of their versions")
			}
		}
		require.Len(t, rates, writers*each)
		f.load(t)
		require.Equal(t, int64(writers*each), f.set.Version())
	})

	t.Run("WorksInTheGivenSchema", func(t *testing.T) {
		t.Parallel()
		pool := postgrestest.NewEmpty(t)
		schema := strings.Repeat("s", 63)
		require.NoError(t, migrations.Up(t.Context(), pool, migrations.Config{Schema: schema}))
		store, err := rules.NewStore(pool, rules.StoreConfig{Schema: schema})
		require.NoError(t, err)
		made(t)(store.Put(t.Context(), why, perMinute("messages", "", 5)))
		set, err := rules.NewSet(pool, rules.Config{Schema: schema})
		require.NoError(t, err)
		require.NoError(t, set.Load(t.Context()))
		require.NotNil(t, set.RulingFor(messages, "", "ana"))
	})

	t.Run("SaysThatTheTablesAreMissing", func(t *testing.T) {
		t.Parallel()
		f := setupOn(t, postgrestest.NewEmpty(t))
		_, err := f.store.Put(t.Context(), why, perMinute("messages", "", 5))
		require.ErrorIs(t, err, ratelimit.ErrNotMigrated)
		require.ErrorIs(t, f.set.Load(t.Context()), ratelimit.ErrNotMigrated)
		require.ErrorIs(t, errorOf(f.store.List(t.Context(), rules.ListQuery{})), ratelimit.ErrNotMigrated)
	})
}

func TestWithTx(t *testing.T) {
	t.Parallel()

	t.Run("ARollbackLeavesNothing", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		undo := errors.New("undo")
		err := pgx.BeginFunc(t.Context(), f.pool, func(tx pgx.Tx) error {
			store := f.store.WithTx(tx)
			made(t)(store.Put(t.Context(), why, perMinute("messages", "", 5)))
			made(t)(store.Override(t.Context(), why, rules.Override{Limit: "messages", Key: "ana", Multiplier: 2}))
			list, err := store.List(t.Context(), rules.ListQuery{})
			require.NoError(t, err)
			require.Len(t, list.Rules, 1, "the transaction sees its own changes")
			history, err := store.History(t.Context(), rules.HistoryQuery{})
			require.NoError(t, err)
			require.Len(t, history, 2)
			return undo
		})
		require.ErrorIs(t, err, undo)
		require.Empty(t, f.tables(t))
	})

	t.Run("AnErrorLeavesTheTransactionUsable", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		err := pgx.BeginFunc(t.Context(), f.pool, func(tx pgx.Tx) error {
			store := f.store.WithTx(tx)
			_, err := store.Apply(t.Context(), why, rules.Changes{
				Put: []rules.Rule{perMinute("messages", "", 5)}, Resume: []rules.Bucket{{Limit: "messages"}},
			})
			require.ErrorIs(t, err, rules.ErrNotFound)
			_, err = store.Put(t.Context(), rules.Edit{Author: "ana", Reason: "why", From: time.Now().Add(-time.Hour)}, perMinute("messages", "", 5))
			require.ErrorIs(t, err, rules.ErrInvalid)
			_, err = store.Put(t.Context(), why, perMinute("messages", "pro", 5))
			return err
		})
		require.NoError(t, err)
		list := f.list(t, rules.ListQuery{})
		require.Len(t, list.Rules, 1)
		require.Equal(t, "pro", list.Rules[0].Plan)
		require.Equal(t, int64(1), list.Version)
	})
}

func TestHistory(t *testing.T) {
	t.Parallel()
	f := setup(t)
	until := time.Now().Add(time.Hour).Truncate(time.Microsecond).UTC()
	entries := []string{}
	note := func(_ rules.Applied, err error) {
		require.NoError(t, err)
		rows, err := f.pool.Query(t.Context(), "SELECT (to_jsonb(x) - 'replaced_us' - 'end_us')::text FROM ratelimit.rules x ORDER BY version, position")
		require.NoError(t, err)
		now, err := pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(t, err)
		require.Greater(t, len(now), len(entries))
		require.Equal(t, entries, now[:len(entries)], "what is there stays as it is")
		entries = now
	}
	ctx := context.WithoutCancel(t.Context())
	note(f.store.Put(ctx, rules.Edit{Author: "ana", Reason: "first"}, perMinute("messages", "", 5)))
	note(f.store.Put(ctx, rules.Edit{Author: "bob", Reason: "second"}, perMinute("messages", "", 6), perMinute("messages", "pro", 60)))
	note(f.store.Override(ctx, why, rules.Override{Limit: "messages", Key: "ana", OnPlan: "pro", Until: until}))
	note(f.store.Override(ctx, why, rules.Override{Limit: "messages", Key: "ana", Policy: ratelimit.FixedWindow{Rate: 1, Period: 1e9}, OnChange: ratelimit.ResetTokens}))
	note(f.store.RemoveOverride(ctx, why, "messages", "ana"))
	note(f.store.Pause(ctx, why, rules.Pause{Limit: "messages", Until: until}))
	note(f.store.Resume(ctx, why, "messages", ""))
	note(f.store.Apply(ctx, why, rules.Changes{Tiers: &rules.TierSet{Match: rules.MatchFirst, Tiers: []rules.Tier{{Limit: "messages", When: map[string]string{"plan": "pro"}}}}}))
	note(f.store.Delete(ctx, why, "messages", "pro"))

	history, err := f.store.History(ctx, rules.HistoryQuery{})
	require.NoError(t, err)
	require.Len(t, history, 10)
	require.Equal(t, "pro", history[0].Plan)
	require.Nil(t, history[0].Rule, "it was deleted")
	require.Equal(t, rules.MatchFirst, history[1].Tiers.Match)
	require.Equal(t, map[string]string{"plan": "pro"}, history[1].Tiers.Tiers[0].When)
	require.Nil(t, history[2].Pause)
	require.Equal(t, until, history[3].Pause.Until)
	require.Nil(t, history[4].Override)
	require.Equal(t, ratelimit.FixedWindow{Rate: 1, Period: time.Second}, history[5].Override.Policy)
	require.Equal(t, until, history[6].Override.Until)
	require.Equal(t, perMinute("messages", "", 60).Policy.String(), history[7].Rule.Policy.String())
	require.Equal(t, "bob", history[8].Author)
	require.Equal(t, "first", history[9].Reason)
	require.Equal(t, perMinute("messages", "", 5).Policy.String(), history[9].Rule.Policy.String())

	var old []string
	for _, s := range history {
		if s.Old == nil {
			old = append(old, "-")
			continue
		}
		old = append(old, s.Old.String())
	}
	second := until.Format("2006-01-02 15:04:05Z")
	require.Equal(t, []string{
		"60 per minute", "-", "-", "-", "1 per second (fixed window), on change reset", "as on plan pro, until " + second, "-", "-", "5 per minute", "-",
	}, old)

	some := func(query rules.HistoryQuery) int {
		found, err := f.store.History(ctx, query)
		require.NoError(t, err)
		return len(found)
	}
	require.Equal(t, 4, some(rules.HistoryQuery{Of: rules.OfRule}))
	require.Equal(t, 2, some(rules.HistoryQuery{Of: rules.OfRule, Plan: new("")}))
	require.Equal(t, 3, some(rules.HistoryQuery{Limit: "messages", Key: new("ana")}))
	require.Equal(t, 3, some(rules.HistoryQuery{Before: 3}))
	require.Equal(t, 2, some(rules.HistoryQuery{Most: 2}))
	require.Equal(t, 0, some(rules.HistoryQuery{Limit: "other"}))
	for _, query := range []rules.HistoryQuery{{Most: -1}, {Of: "rules"}} {
		require.ErrorIs(t, errorOf(f.store.History(ctx, query)), rules.ErrInvalid)
	}
}

// TestMisuse promises an error that says which constructor to call, or what to pass it.
func TestMisuse(t *testing.T) {
	t.Parallel()
	pool := &pgxpool.Pool{}
	store, err := rules.NewStore(pool, rules.StoreConfig{})
	require.NoError(t, err)
	var noTx *pgxpool.Tx
	for want, stores := range map[string][]*rules.Store{
		"use the one that NewStore returned": {nil, {}, (*rules.Store)(nil).WithTx(nil), new(rules.Store).WithTx(nil)},
		"pass WithTx what Begin returned":    {store.WithTx(nil), store.WithTx(noTx)},
	} {
		for _, store := range stores {
			for _, err := range []error{
				errorOf(store.Put(t.Context(), why, perMinute("messages", "", 5))), errorOf(store.List(t.Context(), rules.ListQuery{})),
				errorOf(store.History(t.Context(), rules.HistoryQuery{})),
			} {
				require.ErrorIs(t, err, rules.ErrInvalidConfig)
				require.ErrorContains(t, err, want)
			}
		}
	}
	for _, set := range []*rules.Set{nil, {}} { // the zero Set has no rules
		for _, err := range []error{set.Load(t.Context()), set.Run(t.Context())} {
			require.ErrorIs(t, err, rules.ErrInvalidConfig)
			require.ErrorContains(t, err, "use the one that NewSet returned")
		}
		require.Nil(t, set.RulingFor(messages, "", "ana"))
		require.Nil(t, set.RulingsOf("messages"))
		require.Zero(t, set.Version())
		require.Empty(t, set.Tiers().Tiers)
		require.Greater(t, set.Age(), 24*365*time.Hour)
	}
	for _, site := range []*rules.Site{nil, {}} {
		err := errorOf(site.Requests(ada, nil))
		require.ErrorIs(t, err, rules.ErrInvalidConfig)
		require.ErrorContains(t, err, "use the one that NewSite returned")
	}
	for _, err := range []error{
		errorOf(rules.NewStore(nil, rules.StoreConfig{})), errorOf(rules.NewStore(pool, rules.StoreConfig{Schema: "a b"})),
		errorOf(rules.NewSet(nil, rules.Config{})), errorOf(rules.NewSet(pool, rules.Config{Poll: -1})),
		errorOf(rules.NewSet(pool, rules.Config{Schema: "A"})), errorOf(rules.NewSite(nil, rules.SiteConfig{})),
	} {
		require.ErrorIs(t, err, rules.ErrInvalidConfig)
	}
	set, err := rules.NewSet(pool, rules.Config{})
	require.NoError(t, err)
	for _, config := range []rules.SiteConfig{{Tiers: rules.TierSet{Tiers: []rules.Tier{{Limit: "messages"}}}}, {Attributes: []string{"user"}}} {
		require.ErrorIs(t, errorOf(rules.NewSite(set, config)), rules.ErrInvalid)
	}
}

// TestEndsBeforeItBegins promises that the error of a change which ends before it begins says when it would begin, and
// why.
func TestEndsBeforeItBegins(t *testing.T) {
	t.Parallel()
	f := setup(t)
	now := f.now(t)
	later := why
	later.From = time.Now().Add(time.Hour)
	none, err := rules.NewStore(f.pool, rules.StoreConfig{Lead: -1})
	require.NoError(t, err)
	slow, err := rules.NewStore(f.pool, rules.StoreConfig{Lead: time.Hour})
	require.NoError(t, err)
	override := rules.Changes{Override: []rules.Override{{Limit: "messages", Key: "ana", Multiplier: 2, Until: time.Now().Add(30 * time.Minute)}}}
	past := rules.Changes{Override: []rules.Override{{Limit: "messages", Key: "ana", Multiplier: 2, Until: now.Add(-time.Minute)}}}
	pause := rules.Changes{Pause: []rules.Pause{{Limit: "messages", Until: time.Now().Add(30 * time.Minute)}}}
	for _, test := range []struct {
		store   *rules.Store
		edit    rules.Edit
		changes rules.Changes
		want    string
	}{
		{slow, why, override, "(1h0m0s after it is made, the Lead of the Store, so that every program has heard of it by then); use a later Until"},
		{none, why, past, "(as it is made then); use a later Until"},
		{slow, later, override, "(the From of the Edit); use a later Until"},
		{slow, later, pause, "(the From of the Edit); use a later Until"},
		{none, rules.Edit{Author: "ana", Reason: "why", From: time.Now().Add(-time.Hour)}, pause, "which is past"},
		{none, rules.Edit{Author: "ana", Reason: "why", From: time.Now().AddDate(20_000, 0, 0)}, pause, "its From is 2"},
	} {
		_, err := test.store.Apply(t.Context(), test.edit, test.changes)
		require.ErrorIs(t, err, rules.ErrInvalid)
		require.ErrorContains(t, err, test.want)
		require.NotContains(t, err.Error(), "m=+")
	}
}

// TestNamesTheGrants promises that the error of a missing privilege names the place of the GRANT statements.
func TestNamesTheGrants(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t, func(config *pgxpool.Config) {
		config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
			_, err := conn.Exec(ctx, "SET ROLE pg_monitor") // it is there, and may nothing here
			return err
		}
	})
	f := setupOn(t, pool)
	_, put := f.store.Put(t.Context(), why, perMinute("messages", "", 5))
	_, list := f.store.List(t.Context(), rules.ListQuery{})
	for _, err := range []error{put, list, f.set.Load(t.Context())} {
		require.ErrorContains(t, err, "SQLSTATE 42501")
		require.ErrorContains(t, err, "migrations.Grants has the statements")
	}
}

// TestTableRejectsRows promises that the table rejects rows written by hand that no program could place.
func TestTableRejectsRows(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	version := 0
	insert := func(columns, values string) error {
		version++
		_, err := pool.Exec(t.Context(), fmt.Sprintf(`INSERT INTO ratelimit.rules (version, author, reason, %s) VALUES (%d, 'ana', 'why', %s)`, columns, version, values))
		return err
	}
	for columns, c := range map[string]struct{ good, bad []string }{
		"of, name": {
			[]string{`'rule', 'a'`, `'tiers', ''`, `'override', repeat('a', 64)`},
			[]string{`'rules', 'a'`, `'rule', ''`, `'rule', 'ä'`, `'rule', E'a\n'`, `'rule', repeat('a', 65)`, `'rule', 'a b'`, `'rule', NULL`},
		},
		"of, name, plan": {[]string{`'rule', 'a', 'pro'`}, []string{`'rule', 'a', 'p q'`, `'rule', 'a', repeat('p', 65)`, `'override', 'a', 'pro'`, `'tiers', '', 'pro'`}},
		"of, name, key":  {[]string{`'override', 'a', repeat('k', 256)`, `'override', 'a', ''`}, []string{`'override', 'a', repeat('k', 257)`, `'rule', 'a', 'k'`, `'tiers', '', 'k'`}},
		"of, name, says": {[]string{`'rule', 'a', '{"rate": 1, "period": "1h"}'`, `'rule', 'a', NULL`}, []string{`'rule', 'a', '[]'`, `'rule', 'a', '1'`, `'rule', 'a', '{}'`, `'pause', 'a', '{}'`}},
		"of, name, says, from_us, until_us": {
			[]string{`'override', 'a', '{"multiplier": 2}', 1, 2`, `'pause', 'a', '{}', 1, 253402300799999999`},
			[]string{`'override', 'a', '{"multiplier": 2}', 2, 2`, `'override', 'a', '{"multiplier": 2}', 2, 1`, `'override', 'a', '{"multiplier": 2}', -62135596800000001, 2`, `'pause', 'a', '{}', 1, 253402300800000000`},
		},
	} {
		for _, values := range c.good {
			require.NoError(t, insert(columns, values), values)
		}
		for _, values := range c.bad {
			require.Error(t, insert(columns, values), values)
		}
	}
	for _, who := range []string{`'', 'why'`, `'ana', E' \t'`, `NULL, 'why'`, `'ana', repeat('w', 2001)`, `repeat('a', 257), 'why'`} {
		_, err := pool.Exec(t.Context(), `INSERT INTO ratelimit.rules (version, of, name, author, reason) VALUES (0, 'rule', 'a', `+who+`)`)
		require.Error(t, err, who)
	}
	_, err := pool.Exec(t.Context(), `INSERT INTO ratelimit.rules_version (version) VALUES (1)`)
	require.NoError(t, err)
	for _, values := range []string{`true, 2`, `false, 2`, `NULL, 2`} {
		_, err = pool.Exec(t.Context(), `INSERT INTO ratelimit.rules_version (id, version) VALUES (`+values+`)`)
		require.Error(t, err, "there is one row")
	}
}
