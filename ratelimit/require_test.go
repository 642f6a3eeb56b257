package ratelimit_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

// Require is nil only if it has taken, outside a transaction and in one. A refusal is a LimitedError.
func TestRequireIsNilOnlyWhenItHasTaken(t *testing.T) {
	t.Parallel()
	tried := ratelimit.Define("tried", ratelimit.PerMinute(1)) // in shadow
	sends, all := ratelimit.Define("sends", ratelimit.PerMinute(2)), ratelimit.Define("all", ratelimit.PerHour(100))
	limiter := newLimiter(t, ratelimittest.NewDB(), ratelimit.Config{Policies: ratelimit.ShadowLimits(tried)})
	send := func(l *ratelimit.Limiter) error {
		return l.Require(t.Context(), sends.For("ada"), all.Global(), tried.For("ada"))
	}
	sendInTx := func() error {
		return limiter.InTx(t.Context(), func(tx pgx.Tx) error { return send(limiter.WithTx(tx)) })
	}
	require.NoError(t, send(limiter))
	require.NoError(t, sendInTx(), "only the limit in shadow refuses")
	require.Zero(t, held(t, limiter, sends.For("ada")))
	for _, err := range []error{send(limiter), sendInTx()} {
		require.EqualError(t, err, "ratelimit: limited by sends: retry after 30s")
		var limited *ratelimit.LimitedError
		require.ErrorAs(t, fmt.Errorf("send: %w", err), &limited)
		require.Equal(t, 30*time.Second, limited.Decision.RetryAfter)
		require.Len(t, limited.Decision.States, 3)
		require.ErrorIs(t, err, ratelimit.ErrLimited)
		require.False(t, ratelimit.IsUndecided(err))
	}
	require.Equal(t, 98.0, held(t, limiter, all.Global()), "a refused call takes nothing")
}

// A call without a decision returns neither nil nor a refusal.
func TestRequireFailsClosed(t *testing.T) {
	t.Parallel()
	db := ratelimittest.NewDB()
	limiter := newLimiter(t, db, ratelimit.Config{})
	sends := ratelimit.Define("sends", ratelimit.PerMinute(2))
	gone, leave := context.WithCancel(t.Context())
	leave()
	var none *ratelimit.Limiter
	tx, err := db.Begin(t.Context())
	require.NoError(t, err)
	require.NoError(t, tx.Rollback(t.Context()))
	ended := limiter.WithTx(tx).Require(t.Context(), sends.For("ada"))
	require.ErrorIs(t, ended, pgx.ErrTxClosed)
	require.ErrorContains(t, ended, "the transaction of WithTx has ended: call the Limiter before")
	for name, err := range map[string]error{
		"NoLimiter": none.Require(t.Context(), sends.For("ada")),
		"NoRequest": limiter.Require(t.Context()),
		"NoKey":     limiter.Require(t.Context(), sends.For("")),
		"TooMuch":   limiter.Require(t.Context(), sends.For("ada").Cost(3)),
		"NoServer":  newLimiter(t, unreachable{}, ratelimit.Config{}).Require(t.Context(), sends.For("ada")),
		"InTx":      newLimiter(t, unreachable{}, ratelimit.Config{}).InTx(t.Context(), func(pgx.Tx) error { return nil }),
		"Ended":     ended,
	} {
		require.Error(t, err, name)
		require.NotErrorIs(t, err, ratelimit.ErrLimited, name)
		require.True(t, ratelimit.IsUndecided(fmt.Errorf("send: %w", err)), "%s: %v", name, err)
	}
	require.ErrorIs(t, limiter.Require(gone, sends.For("ada")), context.Canceled)
	require.Equal(t, 2.0, held(t, limiter, sends.For("ada")))
}

// IsUndecided is false for errors of the caller's own code, and for errors that belong to a decision.
func TestIsUndecidedLeavesTheCallersErrorsAlone(t *testing.T) {
	t.Parallel()
	own := errors.New("the recipient does not exist")
	limiter := newLimiter(t, ratelimittest.NewDB(), ratelimit.Config{})
	_, err := limiter.Start(t.Context(), someID)
	require.ErrorIs(t, err, ratelimit.ErrNotReserved)
	for _, err := range []error{
		nil, own, limiter.InTx(t.Context(), func(pgx.Tx) error { return own }), context.Canceled, err, ratelimit.ErrCommitUnknown,
		ratelimit.ErrLeaseLost, ratelimit.Decision{}.Err(), fmt.Errorf("ratelimit: by chance: %w", own),
	} {
		require.False(t, ratelimit.IsUndecided(err), "%v", err)
	}
	require.True(t, ratelimit.IsUndecided(fmt.Errorf("%w: gave up", ratelimit.ErrContended)))
}
