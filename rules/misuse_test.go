package rules_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/rules"
)

// What nobody made answers with what to do.
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
			_, err = store.List(t.Context())
			require.ErrorIs(t, err, rules.ErrInvalidConfig)
			_, err = store.History(t.Context(), rules.HistoryQuery{})
			require.ErrorIs(t, err, rules.ErrInvalidConfig)
		}
	}
}

// A Set that nobody made leaves everything to the definitions in the code, and says so when it is to load.
func TestSetThatCannotWork(t *testing.T) {
	t.Parallel()
	for _, set := range []*rules.Set{nil, {}} {
		for _, err := range []error{set.Load(t.Context()), set.Run(t.Context())} {
			require.ErrorIs(t, err, rules.ErrInvalidConfig)
			require.ErrorContains(t, err, "use the one that NewSet returned")
		}
		require.Nil(t, set.RuleFor(messages, "", "ana"))
		require.Nil(t, set.RulesOf("messages"))
		require.Zero(t, set.Version())
		require.Empty(t, set.Tiers().Tiers)
		require.Greater(t, set.Age(), 24*365*time.Hour)
		require.NoError(t, set.Validate())
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
