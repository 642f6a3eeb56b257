package preflight

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

// unreachable is a connection path that cannot be examined, because its port is closed.
func unreachable(t *testing.T) (way, route) {
	t.Helper()
	c, err := pgx.ParseConfig("postgres://app@127.0.0.1:1/nothing")
	require.NoError(t, err)
	return way{config: c}, route{c.Host, c.Database, c.User, c.Port, c.DefaultQueryExecMode}
}

// A connection path that refuses calls is examined again after a while, because its pooler may be fixed by then.
func TestARefusedPoolIsTestedAgain(t *testing.T) {
	t.Parallel()
	way, of := unreachable(t)
	known := errors.New("known")
	p := newPath(nil)
	p.lost[of] = loss{known, time.Now()}
	require.ErrorIs(t, p.judge(t.Context(), false, way), known)
	require.ErrorIs(t, p.judge(t.Context(), true, way), known)
	p.lost[of] = loss{known, time.Now().Add(-examineAgain)}
	require.NoError(t, p.judge(t.Context(), false, way))
	require.Empty(t, p.lost)
}

// A path that cannot be examined refuses no call, and the examination is not retried for ever.
func TestAPoolerTestThatFailsRefusesNothing(t *testing.T) {
	t.Parallel()
	way, _ := unreachable(t)
	p := newPath(nil)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, p.judge(ended, false, way), context.Canceled, "which says nothing of the way")
	for range maxExamined {
		require.False(t, p.isUsable(false))
		require.NoError(t, p.judge(t.Context(), false, way))
	}
	require.True(t, p.isUsable(false))
}

// A transaction may be of another pool than the Limiter's, and says nothing of that.
func TestAnErrorInATransactionDoesNotMarkThePool(t *testing.T) {
	t.Parallel()
	way, _ := unreachable(t)
	way.direct = true
	p := newPath(nil)
	require.NoError(t, p.judge(t.Context(), true, way))
	require.True(t, p.isUsable(true))
	require.False(t, p.isUsable(false))
	require.NoError(t, p.judge(t.Context(), false, way))
	require.True(t, p.isUsable(false))
	p = newPath(nil)
	require.NoError(t, p.judge(t.Context(), false, way))
	require.True(t, p.isUsable(true), "transactions mostly are of the pool")
}

// Who prepares nothing is right behind any pooler, and of other drivers nothing is known.
func TestConnectionsThatNeedNoPoolerTest(t *testing.T) {
	t.Parallel()
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		way, _ := unreachable(t)
		way.config.DefaultQueryExecMode = mode
		p := newPath(nil)
		require.NoError(t, p.judge(t.Context(), false, way))
		require.True(t, p.isUsable(false))
	}
	p := newPath(nil)
	require.NoError(t, p.judge(t.Context(), false, way{}))
	require.True(t, p.isUsable(false))
}

// A limiter whose secret differs from the stored one is refused.
func TestAnotherFingerprintIsRefused(t *testing.T) {
	t.Parallel()
	mismatch := errors.New("mismatch")
	g := New(Options{Secret: []byte("a secret of thirty-two characters"), Schema: "ratelimit", ErrMismatch: mismatch})
	require.NoError(t, g.judge(g.own, nil))
	require.NoError(t, g.judge("", nil), "none is stored yet")
	require.ErrorIs(t, g.judge("another", nil), mismatch)
}
