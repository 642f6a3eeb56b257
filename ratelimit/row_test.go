package ratelimit_test

import (
	"context"
	"errors"
	"math"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// row is a bucket's row, with the transaction that wrote it.
type row struct {
	Name, Key string
	Value     float64
	TS        int64
	XMin, ID  string
}

// table returns every row there is.
func table(t *testing.T, pool *pgxpool.Pool) []row {
	t.Helper()
	rows, err := pool.Query(t.Context(), "SELECT name, key, value, ts, xmin::text, ctid::text FROM ratelimit.buckets ORDER BY name, key")
	require.NoError(t, err)
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[row])
	require.NoError(t, err)
	return all
}

// fourOfTenTaken returns a limiter and a limit of ten, from whose bucket of "a" four were taken.
func fourOfTenTaken(t *testing.T) (*pgxpool.Pool, *ratelimit.Limiter, ratelimit.Limit) {
	t.Helper()
	pool := postgrestest.New(t)
	limiter := newLimiter(t, pool, ratelimit.Config{})
	limit := ratelimit.Define("sendMessage", ratelimit.PerDay(10))
	d, err := limiter.Take(t.Context(), limit.For("a").Cost(4))
	require.NoError(t, err)
	require.True(t, d.Allowed)
	return pool, limiter, limit
}

// TestInvalidCallsLeaveTheRowUntouched promises that a call that is an error changes nothing, and that the
// transaction it was made in goes on.
func TestInvalidCallsLeaveTheRowUntouched(t *testing.T) {
	t.Parallel()
	pool, limiter, limit := fourOfTenTaken(t)
	before := table(t, pool)

	costs := []float64{math.NaN(), math.Inf(1), math.Inf(-1), -1, -0.5, 1e308, math.MaxInt64, math.MaxFloat64, 100, 10.5, 5e-324}
	for _, cost := range costs {
		d, err := limiter.Take(t.Context(), limit.For("a").Cost(cost))
		require.Error(t, err, "%v", cost)
		require.False(t, d.Allowed, "%v", cost)
	}
	require.Equal(t, before, table(t, pool))

	err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		bound := limiter.WithTx(tx)
		require.True(t, bound.InTransaction())
		require.False(t, limiter.InTransaction())
		for _, cost := range costs {
			_, err := bound.Take(t.Context(), limit.For("a").Cost(cost))
			require.Error(t, err, "%v", cost)
		}
		d, err := bound.Take(t.Context(), limit.For("a").Cost(6))
		require.NoError(t, err, "the transaction is still usable")
		require.True(t, d.Allowed, "all that was left is left")
		return nil
	})
	require.NoError(t, err)
	require.Zero(t, held(t, limiter, limit.For("a")))
}

// TestCostOfZeroWritesNothing promises that asking for nothing, in either sign, only looks.
func TestCostOfZeroWritesNothing(t *testing.T) {
	t.Parallel()
	pool, limiter, limit := fourOfTenTaken(t)
	before := table(t, pool)

	for _, zero := range []float64{0, math.Copysign(0, -1)} {
		d, err := limiter.Take(t.Context(), limit.For("a").Cost(zero))
		require.NoError(t, err)
		require.True(t, d.Allowed)
		require.Equal(t, 6.0, d.Remaining)
		d, err = limiter.Take(t.Context(), limit.For("new").Cost(zero), limit.For("a").Cost(zero))
		require.NoError(t, err)
		require.True(t, d.Allowed)
		r, err := limiter.Reserve(t.Context(), limit.For("new").Cost(zero))
		require.NoError(t, err)
		require.True(t, r.Allowed)
		require.Equal(t, at, r.ReadyAt.UTC())
	}
	require.Equal(t, before, table(t, pool))

	_, err := limiter.Reserve(t.Context(), limit.For("a").Cost(7))
	require.NoError(t, err)
	d, err := limiter.Take(t.Context(), limit.For("a").Cost(0))
	require.NoError(t, err)
	require.False(t, d.Allowed, "something is owed")
	require.Equal(t, ratelimit.Day/10, d.RetryAfter)
}

// TestRefusalLeavesWhatIsThere promises that a refused request costs nothing.
func TestRefusalLeavesWhatIsThere(t *testing.T) {
	t.Parallel()
	pool, limiter, limit := fourOfTenTaken(t)
	for range 5 {
		d, err := limiter.Take(t.Context(), limit.For("a").Cost(8))
		require.NoError(t, err)
		require.False(t, d.Allowed)
		require.Equal(t, 6.0, d.Remaining)
		require.Equal(t, ratelimit.Day/5, d.RetryAfter)
		require.ErrorIs(t, d.Err(), ratelimit.ErrLimited)
	}
	_, err := limiter.Take(t.Context(), limit.For("a").Cost(100))
	require.ErrorIs(t, err, ratelimit.ErrCostExceedsCapacity)
	require.Equal(t, 6.0, held(t, limiter, limit.For("a")))
	require.Equal(t, 6.0, table(t, pool)[0].Value)
}

// TestDatabaseClockDecides promises that no clock but the database's has a say.
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
	require.Equal(t, d.At.UnixMicro(), table(t, pool)[0].TS)
}

// TestResetFillsWhateverTheCost promises that Reset is about buckets and not about tokens.
func TestResetFillsWhateverTheCost(t *testing.T) {
	t.Parallel()
	limiter := newLimiter(t, postgrestest.New(t), ratelimit.Config{})
	spaced := ratelimit.Define("spaced", ratelimit.TokenBucket{Rate: 1, Period: time.Hour, Capacity: ratelimit.None})
	limit := ratelimit.Define("sendMessage", ratelimit.PerDay(10))
	_, err := limiter.Reserve(t.Context(), spaced.For("a").Cost(3), limit.For("a").Cost(13), limit.For("b").Cost(13))
	require.NoError(t, err)
	require.NoError(t, limiter.Reset(t.Context(), spaced.For("a"), limit.For("a").Cost(100)))
	require.Zero(t, held(t, limiter, spaced.For("a")), "owed tokens are forgotten")
	require.Equal(t, 10.0, held(t, limiter, limit.For("a")))
	require.Equal(t, -3.0, held(t, limiter, limit.For("b")), "who was not asked for is left alone")
}

// TestReserveIsReadyWhenAllItsLimitsAre promises the latest ReadyAt of the limits, in any order of the requests.
func TestReserveIsReadyWhenAllItsLimitsAre(t *testing.T) {
	t.Parallel()
	limiter := newLimiter(t, postgrestest.New(t), ratelimit.Config{})
	slow, fast := ratelimit.Define("slow", ratelimit.PerHour(10)), ratelimit.Define("fast", ratelimit.PerSecond(10))
	for i, key := range []string{"a", "b"} {
		requests := []ratelimit.Request{slow.For(key).Cost(15), fast.For(key).Cost(15)}
		r, err := limiter.Reserve(t.Context(), requests[i], requests[1-i])
		require.NoError(t, err)
		require.True(t, r.Allowed)
		require.Equal(t, at.Add(30*time.Minute), r.ReadyAt.UTC())
		require.Equal(t, 30*time.Minute, r.Delay())
	}
}

// TestClosedPoolIsAnError promises that a call that cannot be decided is never allowed.
func TestClosedPoolIsAnError(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	limiter := newLimiter(t, pool, ratelimit.Config{})
	pool.Close()
	request := ratelimit.Define("sendMessage", ratelimit.PerDay(10)).For(secret)
	d, err := limiter.Take(t.Context(), request)
	require.ErrorContains(t, err, `take "sendMessage": closed pool`)
	require.NotContains(t, err.Error(), secret)
	require.Zero(t, d)
	for verb, call := range callsOf(t.Context(), limiter) {
		require.Error(t, call(request), verb)
	}
	called := false
	err = limiter.InTx(t.Context(), func(pgx.Tx) error { called = true; return nil })
	require.Error(t, err)
	require.False(t, called)
	require.NotErrorIs(t, err, ratelimit.ErrCommitUnknown)
}

// TestMissingTableSaysWhatToRun names the step that was forgotten.
func TestMissingTableSaysWhatToRun(t *testing.T) {
	t.Parallel()
	limiter := newLimiter(t, postgrestest.NewEmpty(t), ratelimit.Config{Schema: "limits"})
	request := ratelimit.Define("sendMessage", ratelimit.PerDay(10)).For(secret)
	for verb, call := range callsOf(t.Context(), limiter) {
		err := call(request)
		require.ErrorIs(t, err, ratelimit.ErrNotMigrated, verb)
		require.ErrorContains(t, err, "run migrations.Up", verb)
		require.ErrorContains(t, err, `schema "limits"`, verb)
		require.NotContains(t, err.Error(), secret, verb)
	}
}

// TestCallsThatNeedTheirOwnTransactions promises one kind of error for each call that cannot be part of a transaction, before any SQL.
func TestCallsThatNeedTheirOwnTransactions(t *testing.T) {
	t.Parallel()
	pool, limiter, limit := fourOfTenTaken(t)
	slots := ratelimit.Define("slots", ratelimit.Concurrency{Most: 1})
	err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		bound := limiter.WithTx(tx)
		never := func() error { return errors.New("the function ran") }
		for name, call := range map[string]func() error{
			"Wait": func() error {
				_, err := bound.Wait(t.Context(), limit.For("a"))
				return err
			},
			"Hold": func() error {
				return bound.Hold(t.Context(), func(context.Context, ratelimit.Lease) error { return never() }, slots.For("a"))
			},
			"Keep": func() error {
				held, release := bound.Keep(t.Context(), ratelimit.Lease{ID: "lease"})
				defer release()
				return context.Cause(held)
			},
			"Prune": func() error {
				_, err := bound.Prune(t.Context(), limit)
				return err
			},
			"Close": func() error { return bound.Close(t.Context()) },
			"InTx":  func() error { return bound.InTx(t.Context(), func(pgx.Tx) error { return never() }) },
		} {
			require.ErrorIs(t, call(), ratelimit.ErrInvalidConfig, name)
		}
		return bound.Require(t.Context(), limit.For("a").Cost(6)) // the transaction can be used
	})
	require.NoError(t, err)
}
