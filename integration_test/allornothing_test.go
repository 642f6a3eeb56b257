package integration_test

import (
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

var levels = []struct {
	name  string
	level pgx.TxIsoLevel
}{
	{"ReadCommitted", pgx.ReadCommitted},
	{"RepeatableRead", pgx.RepeatableRead},
	{"Serializable", pgx.Serializable},
}

// mixed requests a bucket with enough tokens, a bucket without a row, and an empty bucket. The empty bucket is last in the order of
// the requests, and in the middle of the order of locking.
func mixed(key string) []ratelimit.Request {
	return []ratelimit.Request{roomy.For(key), other.For(key + " without a row"), pinch.For(key).Cost(2)}
}

// setupWork is setup with a table of the application's own.
func setupWork(t *testing.T) *bundle {
	t.Helper()
	b := setup(t)
	b.exec(t, "CREATE TABLE work (key text)")
	return b
}

// makeMixed makes the rows that mixed asks for, and returns them.
func makeMixed(t *testing.T, b *bundle, key string) []row {
	t.Helper()
	require.NoError(t, b.limiter.Reset(t.Context(), roomy.For(key)))
	takeAll(t, b.limiter, pinch.For(key))
	return b.rows(t, key)
}

func TestTakeChangesNoRowWhenTheLastLimitRefuses(t *testing.T) {
	t.Parallel()
	b := setupWork(t)
	key := t.Name() + " "
	before := makeMixed(t, b, key)
	requireRefused(t, b.limiter, mixed(key))
	for _, level := range levels {
		tx := b.begin(t, level.level)
		requireRefused(t, b.limiter.WithTx(tx), mixed(key))
		_, err := tx.Exec(t.Context(), "INSERT INTO work VALUES ($1)", level.name)
		require.NoError(t, err)
		savepoint, err := tx.Begin(t.Context())
		require.NoError(t, err)
		requireRefused(t, b.limiter.WithTx(savepoint), mixed(key))
		require.NoError(t, savepoint.Commit(t.Context()))
		require.NoError(t, tx.Commit(t.Context()))
		requireWork(t, b, level.name)
	}
	require.Equal(t, before, b.rows(t, key))
}

// requireWork checks that the work for key was committed once.
func requireWork(t *testing.T, b *bundle, key string) {
	t.Helper()
	require.Equal(t, 1, b.count(t, "SELECT count(*) FROM work WHERE key = $1", key))
}

func requireRefused(t *testing.T, limiter *ratelimit.Limiter, requests []ratelimit.Request) {
	t.Helper()
	d, err := limiter.Take(t.Context(), requests...)
	require.NoError(t, err)
	require.False(t, d.Allowed)
	require.Positive(t, d.RetryAfter)
	for i, s := range d.States {
		refused := i == len(d.States)-1
		require.Equal(t, refused, !s.Allowed, "%s", s.Limit)
		if refused {
			require.Equal(t, d.RetryAfter, s.RetryAfter)
		} else {
			require.Zero(t, s.RetryAfter)
			require.InDelta(t, s.Limit.Capacity(), s.Remaining, 1e-3, "nothing was taken from %s", s.Limit)
		}
	}
}

// A row inserted for a lock is marked by an empty array of leases. If the mark stays in a row, the row's value still counts: it is
// not mistaken for a new, full row.
func TestARowThatKeptTheMarkOfItsMakingHoldsWhatItHolds(t *testing.T) {
	t.Parallel()
	b := setup(t)
	reserved, err := b.limiter.Reserve(t.Context(), roomy.For("key").Cost(10))
	require.NoError(t, err)
	requireAllowed(t, taking(roomy.For("key").Cost(20)), b.limiter)
	b.exec(t, `UPDATE ratelimit.buckets SET leases = '{}'`)
	err = pgx.BeginFunc(t.Context(), b.pool, func(tx pgx.Tx) error { return b.limiter.WithTx(tx).Cancel(t.Context(), reserved.ID) })
	require.NoError(t, err)
	require.InDelta(t, roomy.Capacity()-20, b.held(t, "roomy", "key"), 1e-3)
}

func requireAllowed(t *testing.T, call verb, limiter *ratelimit.Limiter) {
	t.Helper()
	allowed, err := call(t.Context(), limiter)
	require.NoError(t, err)
	require.True(t, allowed)
}
