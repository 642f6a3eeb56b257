package cli_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/rules"
)

// TestRulesApplyChangesNothingWhereSomebodyElseWasFaster changes the rules between the comparison and the change.
func TestRulesApplyChangesNothingWhereSomebodyElseWasFaster(t *testing.T) {
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
}
