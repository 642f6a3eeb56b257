package rules_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/rules"
)

// TestStoreThatCannotWork promises an error that says which constructor to call.
func TestStoreThatCannotWork(t *testing.T) {
	t.Parallel()
	made, err := rules.NewStore(&pgxpool.Pool{}, rules.StoreConfig{})
	require.NoError(t, err)
	var none *rules.Store
	var noTx *pgxpool.Tx
	for want, stores := range map[string][]*rules.Store{
		"use the one that NewStore returned": {none, {}, none.WithTx(nil), new(rules.Store).WithTx(nil)},
		"pass WithTx what Begin returned":    {made.WithTx(nil), made.WithTx(noTx)},
	} {
		for _, store := range stores {
			_, err := store.Put(t.Context(), why, perMinute("messages", "", 5))
			require.ErrorIs(t, err, rules.ErrInvalidConfig)
			require.ErrorContains(t, err, want)
			_, err = store.List(t.Context(), rules.ListQuery{})
			require.ErrorIs(t, err, rules.ErrInvalidConfig)
			_, err = store.History(t.Context(), rules.HistoryQuery{})
			require.ErrorIs(t, err, rules.ErrInvalidConfig)
		}
	}
}

// TestSetThatCannotWork promises that the zero Set has no rules, and that its Load says which constructor to call.
func TestSetThatCannotWork(t *testing.T) {
	t.Parallel()
	for _, set := range []*rules.Set{nil, {}} {
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
}

// TestEndsBeforeItBegins promises that the error of a change which ends before it begins says when it would begin, and why.
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

func TestSiteThatCannotWork(t *testing.T) {
	t.Parallel()
	for _, site := range []*rules.Site{nil, {}} {
		_, err := site.Requests(ada, nil)
		require.ErrorIs(t, err, rules.ErrInvalidConfig)
		require.ErrorContains(t, err, "use the one that NewSite returned")
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
		"of, name, says": {[]string{`'rule', 'a', '{}'`, `'rule', 'a', NULL`}, []string{`'rule', 'a', '[]'`, `'rule', 'a', '1'`, `'pause', 'a', '{}'`}},
		"of, name, says, from_us, until_us": {
			[]string{`'override', 'a', '{}', 1, 2`, `'pause', 'a', '{}', 1, 253402300799999999`},
			[]string{`'override', 'a', '{}', 2, 2`, `'override', 'a', '{}', 2, 1`, `'override', 'a', '{}', -62135596800000001, 2`, `'pause', 'a', '{}', 1, 253402300800000000`},
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
