package ratelimit_test

import (
	"context"
	"errors"
	"math"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
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
