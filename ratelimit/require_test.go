package ratelimit_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// TestRequireIsNilOnlyWhenItHasTaken tells of one bucket, outside of transactions and in one.
func TestRequireIsNilOnlyWhenItHasTaken(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	limiter := newLimiter(t, pool, ratelimit.Config{})
	sends, all := ratelimit.Define("sends", ratelimit.PerMinute(2)), ratelimit.Define("all", ratelimit.PerHour(100))

	require.NoError(t, limiter.Require(t.Context(), sends.For("ada"), all.Global()))
	err := limiter.InTx(t.Context(), func(tx pgx.Tx) error {
		return limiter.WithTx(tx).Require(t.Context(), sends.For("ada"), all.Global())
	})
	require.NoError(t, err)
	require.Zero(t, held(t, limiter, sends.For("ada")))

	refused := fmt.Errorf("send: %w", limiter.Require(t.Context(), sends.For("ada"), all.Global()))
	require.EqualError(t, refused, "send: ratelimit: limited by sends: retry after 30s")
	inTx := limiter.InTx(t.Context(), func(tx pgx.Tx) error {
		return limiter.WithTx(tx).Require(t.Context(), sends.For("ada"), all.Global())
	})
	for _, err := range []error{refused, inTx} {
		var limited *ratelimit.LimitedError
		require.ErrorAs(t, err, &limited)
		require.Equal(t, 30*time.Second, limited.Decision.RetryAfter)
		require.Len(t, limited.Decision.States, 2)
		require.ErrorIs(t, err, ratelimit.ErrLimited)
		require.False(t, ratelimit.IsUndecided(err))
	}
	require.Equal(t, 98.0, held(t, limiter, all.Global()), "of what was refused nothing is taken")
}

// TestRequireFailsClosed promises that a call without a decision returns neither nil nor a refusal.
func TestRequireFailsClosed(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	limiter := newLimiter(t, pool, ratelimit.Config{})
	sends := ratelimit.Define("sends", ratelimit.PerMinute(2))
	gone, leave := context.WithCancel(t.Context())
	leave()
	closed := postgrestest.New(t)
	closed.Close()
	var none *ratelimit.Limiter
	for name, err := range map[string]error{
		"NoLimiter": none.Require(t.Context(), sends.For("ada")),
		"NoRequest": limiter.Require(t.Context()),
		"NoKey":     limiter.Require(t.Context(), sends.For("")),
		"TooMuch":   limiter.Require(t.Context(), sends.For("ada").Cost(3)),
		"NoServer":  newLimiter(t, closed, ratelimit.Config{}).Require(t.Context(), sends.For("ada")),
		"InTx":      newLimiter(t, closed, ratelimit.Config{}).InTx(t.Context(), func(pgx.Tx) error { return nil }),
	} {
		require.Error(t, err, name)
		require.NotErrorIs(t, err, ratelimit.ErrLimited, name)
		require.True(t, ratelimit.IsUndecided(fmt.Errorf("send: %w", err)), "%s: %v", name, err)
	}
	require.ErrorIs(t, limiter.Require(gone, sends.For("ada")), context.Canceled)
	require.Equal(t, 2.0, held(t, limiter, sends.For("ada")))

	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	require.NoError(t, tx.Rollback(t.Context()))
	err = limiter.WithTx(tx).Require(t.Context(), sends.For("ada"))
	require.ErrorIs(t, err, pgx.ErrTxClosed)
	require.True(t, ratelimit.IsUndecided(err))
}

// TestIsUndecidedLeavesTheCallersErrorsAlone promises false for errors of the caller's own code, and for errors that belong to a
// decision.
func TestIsUndecidedLeavesTheCallersErrorsAlone(t *testing.T) {
	t.Parallel()
	own := errors.New("the recipient does not exist")
	limiter := newLimiter(t, postgrestest.New(t), ratelimit.Config{})
	require.False(t, ratelimit.IsUndecided(limiter.InTx(t.Context(), func(pgx.Tx) error { return own })))
	_, err := limiter.Start(t.Context(), "00000000-0000-4000-8000-000000000001")
	require.ErrorIs(t, err, ratelimit.ErrNotReserved)
	for _, err := range []error{
		nil, own, context.Canceled, err, ratelimit.ErrCommitUnknown, ratelimit.ErrLeaseLost, ratelimit.Decision{}.Err(),
		fmt.Errorf("ratelimit: by chance: %w", own),
	} {
		require.False(t, ratelimit.IsUndecided(err), "%v", err)
	}
	require.True(t, ratelimit.IsUndecided(fmt.Errorf("%w: gave up", ratelimit.ErrContended)))
}

// TestRequireGoesOnInShadow promises nil if only a limit in Shadow refuses.
func TestRequireGoesOnInShadow(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	tried, kept := ratelimit.Define("tried", ratelimit.PerMinute(1)), ratelimit.Define("real", ratelimit.PerMinute(2))
	limiter := newLimiter(t, pool, ratelimit.Config{Policies: ratelimit.ShadowLimits(tried)})

	require.NoError(t, limiter.Require(t.Context(), tried.For("ada"), kept.For("ada")))
	require.NoError(t, limiter.Require(t.Context(), tried.For("ada"), kept.For("ada")), "only the trial refuses")
	require.Zero(t, held(t, limiter, kept.For("ada")), "and the other one has given")
	require.ErrorIs(t, limiter.Require(t.Context(), tried.For("ada"), kept.For("ada")), ratelimit.ErrLimited)
}
