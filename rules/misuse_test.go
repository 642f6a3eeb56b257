package rules_test

import (
	"context"
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
