package ratelimit_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

// A cost of 0, in either sign, only looks: no row is written.
func TestCostOfZeroWritesNothing(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	limiter := newLimiter(t, pool, ratelimit.Config{})
	limit := ratelimit.Define("sendMessage", ratelimit.PerDay(10))
	require.NoError(t, limiter.Require(t.Context(), limit.For("a").Cost(4)))
	rows := func() (text string) {
		require.NoError(t, pool.QueryRow(t.Context(), "SELECT string_agg(format('%s %s %s', b, xmin, ctid), E'\n') FROM ratelimit.buckets b").Scan(&text))
		return text
	}
	before := rows()
	for _, zero := range []float64{0, math.Copysign(0, -1)} {
		d, err := limiter.Take(t.Context(), limit.For("a").Cost(zero), limit.For("new").Cost(zero))
		require.NoError(t, err)
		require.True(t, d.Allowed)
		require.Equal(t, 6.0, d.Remaining)
		r, err := limiter.Reserve(t.Context(), limit.For("new").Cost(zero))
		require.NoError(t, err)
		require.True(t, r.Allowed)
		require.Equal(t, at, r.ReadyAt.UTC())
	}
	require.Equal(t, before, rows())

	_, err := limiter.Reserve(t.Context(), limit.For("a").Cost(7))
	require.NoError(t, err)
	d, err := limiter.Take(t.Context(), limit.For("a").Cost(0))
	require.NoError(t, err)
	require.False(t, d.Allowed, "something is owed")
	require.Equal(t, ratelimit.Day/10, d.RetryAfter)
}

// Without Config.AsOf, only the clock of the database decides.
func TestDatabaseClockDecides(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	limiter, err := ratelimit.New(pool, ratelimit.Config{})
	require.NoError(t, err)
	databaseClock := func() (now time.Time) {
		require.NoError(t, pool.QueryRow(t.Context(), "SELECT statement_timestamp()").Scan(&now))
		return now
	}
	before := databaseClock()
	d, err := limiter.Take(t.Context(), ratelimit.Define("sendMessage", ratelimit.PerDay(10)).For("a"))
	require.NoError(t, err)
	require.False(t, d.At.Before(before), "%v before %v", d.At, before)
	require.False(t, d.At.After(databaseClock()))
}

// A call that cannot be decided is an error that says why, and shows no key.
func TestCallsThatCannotBeDecided(t *testing.T) {
	t.Parallel()
	closed := postgrestest.New(t)
	closed.Close()
	request := ratelimit.Define("sendMessage", ratelimit.PerDay(10)).For(secret)
	for says, limiter := range map[string]*ratelimit.Limiter{
		"closed pool":                         newLimiter(t, closed, ratelimit.Config{}),
		`run migrations.Up (schema "limits")`: newLimiter(t, postgrestest.NewEmpty(t), ratelimit.Config{Schema: "limits"}),
	} {
		for verb, call := range callsOf(t.Context(), limiter) {
			err := call(request)
			require.ErrorContains(t, err, says, verb)
			require.Equal(t, says != "closed pool", errors.Is(err, ratelimit.ErrNotMigrated), verb)
			require.NotContains(t, err.Error(), secret, verb)
		}
	}
	err := newLimiter(t, closed, ratelimit.Config{}).InTx(t.Context(), func(pgx.Tx) error {
		t.Error("the function ran")
		return nil
	})
	require.Error(t, err)
	require.NotErrorIs(t, err, ratelimit.ErrCommitUnknown)
}

// A call that cannot be part of a transaction fails there before any SQL.
func TestCallsThatNeedTheirOwnTransactions(t *testing.T) {
	t.Parallel()
	alone := untouchedLimiters(t, ratelimit.Config{})
	bound, ctx := alone[1], t.Context()
	require.True(t, bound.InTransaction())
	require.False(t, alone[0].InTransaction())
	limit, slots := ratelimit.Define("limit", ratelimit.PerDay(10)), ratelimit.Define("slots", ratelimit.Concurrency{Most: 1})
	never := errors.New("the function ran")
	_, waited := bound.Wait(ctx, limit.For("a"))
	_, pruned := bound.Prune(ctx, limit)
	held, release := bound.Keep(ctx, ratelimit.Lease{ID: "lease"})
	defer release()
	for name, err := range map[string]error{
		"Wait":  waited,
		"Hold":  bound.Hold(ctx, func(context.Context, ratelimit.Lease) error { return never }, slots.For("a")),
		"Keep":  context.Cause(held),
		"Prune": pruned,
		"Close": bound.Close(ctx),
		"InTx":  bound.InTx(ctx, func(pgx.Tx) error { return never }),
	} {
		require.ErrorIs(t, err, ratelimit.ErrInvalidConfig, name)
	}
}

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

// A simulation has no upstream. It uses the price of the request, if any.
func TestAdaptiveInASimulation(t *testing.T) {
	t.Parallel()
	s, err := ratelimit.NewSimulation(ratelimit.Config{})
	require.NoError(t, err)
	request := ratelimit.Define("upstream", ratelimit.Adaptive{Contract: ratelimit.PerSecond(100), Apply: true}).For("account")
	at := time.Unix(0, 0)
	d, err := s.Take(t.Context(), at, request)
	require.NoError(t, err)
	require.Equal(t, 1.0, d.States[0].Price)
	require.Equal(t, 99.0, d.Remaining)
	d, err = s.Take(t.Context(), at, request.Price(4))
	require.NoError(t, err)
	require.Equal(t, 4.0, d.States[0].Price)
	require.Equal(t, 1.0, d.States[0].Cost)
	require.Equal(t, 95.0, d.Remaining)
}

func TestAnAdaptiveLimitWorksBefore1970(t *testing.T) {
	t.Parallel()
	api := ratelimit.Define("api", ratelimit.Adaptive{Contract: ratelimit.PerDay(20), Apply: true})
	synctest.Test(t, func(t *testing.T) {
		var asked atomic.Int64
		asOf := func() time.Time { return time.Unix(-1e6+asked.Add(1), 0) }
		limiter, err := ratelimit.New(ratelimittest.NewDB(), ratelimit.Config{AsOf: asOf})
		require.NoError(t, err)
		for i := range 3 {
			d, err := limiter.Take(t.Context(), api.For("ada"))
			require.NoError(t, err)
			require.True(t, d.Allowed, "take %d: %v", i, d)
			require.NoError(t, limiter.Report(t.Context(), api.For("ada"), ratelimit.Outcome{}))
			synctest.Wait() // until an exchange of prices has ended
		}
	})
}
