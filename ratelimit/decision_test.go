package ratelimit_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// planted is a row that is written behind the limiter's back.
type planted struct {
	name, key string
	shard     int
	value     float64
	after     time.Duration // how long after opening its ts is
}

func plant(t *testing.T, pool *pgxpool.Pool, rows ...planted) {
	t.Helper()
	for _, r := range rows {
		_, err := pool.Exec(t.Context(), "INSERT INTO ratelimit.buckets (name, key, shard, value, ts) VALUES ($1, $2, $3, $4, $5)",
			r.name, r.key, r.shard, r.value, opening.Add(r.after).UnixMicro())
		require.NoError(t, err)
	}
}

// TestDecision folds the states of several limits into one answer.
func TestDecision(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	limiter := newLimiter(t, pool, ratelimit.Config{})
	perMinute, perDay := ratelimit.Define("perMinute", ratelimit.PerMinute(10)), ratelimit.Define("perDay", ratelimit.PerDay(100))
	decide := func(t *testing.T, minute, day float64) ratelimit.Decision {
		t.Helper()
		key := t.Name()
		plant(t, pool, planted{name: "perMinute", key: key, value: minute}, planted{name: "perDay", key: key, value: day})
		d, err := limiter.Take(t.Context(), perMinute.For(key).Cost(2), perDay.For(key).Cost(3), perMinute.For(key).Cost(1))
		require.NoError(t, err)
		return d
	}

	t.Run("IsTheLeastThatIsLeftWhenAllAllow", func(t *testing.T) {
		t.Parallel()
		d := decide(t, 10, 5.5)
		require.True(t, d.Allowed)
		require.NoError(t, d.Err())
		require.Zero(t, d.RetryAfter)
		require.Equal(t, 2.5, d.Remaining)
		require.Equal(t, ratelimit.Day*975/1000, d.ResetAfter)
		require.True(t, d.At.Equal(opening))
	})
	t.Run("HasAStateForEachRequestInTheOrderAsked", func(t *testing.T) {
		t.Parallel()
		d := decide(t, 10, 5.5)
		require.Len(t, d.States, 3)
		for i, want := range []struct {
			limit     ratelimit.Limit
			cost      float64
			remaining float64
		}{{perMinute, 2, 7}, {perDay, 3, 2.5}, {perMinute, 1, 7}} {
			require.Equal(t, want.limit, d.States[i].Limit)
			require.Equal(t, want.cost, d.States[i].Cost)
			require.Equal(t, want.remaining, d.States[i].Remaining)
			require.Zero(t, d.States[i].RetryAfter)
		}
	})
	t.Run("IsTheLongestWaitOfThoseThatRefuse", func(t *testing.T) {
		t.Parallel()
		d := decide(t, 1, -1)
		require.False(t, d.Allowed)
		require.Equal(t, ratelimit.Day*4/100, d.RetryAfter)
		require.Equal(t, 12*time.Second, d.States[0].RetryAfter)
		require.Zero(t, d.Remaining, "who owes has nothing left")
		require.Equal(t, -1.0, d.States[1].Value.Tokens)
	})
	t.Run("WaitsForNoneThatAllows", func(t *testing.T) {
		t.Parallel()
		d := decide(t, 1, 50)
		require.Equal(t, 12*time.Second, d.RetryAfter)
		require.True(t, d.States[1].Allowed)
		require.Zero(t, d.States[1].RetryAfter)
		require.Equal(t, 1.0, d.Remaining)
	})
}

func TestLimitedError(t *testing.T) {
	t.Parallel()
	limiter := newLimiter(t, postgrestest.New(t), ratelimit.Config{})
	first, second := ratelimit.Define("first", ratelimit.PerMinute(10)), ratelimit.Define("second", ratelimit.PerMinute(5))
	take := func(requests ...ratelimit.Request) ratelimit.Decision {
		d, err := limiter.Take(t.Context(), requests...)
		require.NoError(t, err)
		return d
	}
	require.NoError(t, take(first.For("alice").Cost(10), second.For("alice").Cost(5)).Err())
	err := fmt.Errorf("send: %w", take(first.For("alice"), second.For("alice")).Err())

	require.ErrorIs(t, err, ratelimit.ErrLimited)
	require.NotErrorIs(t, err, ratelimit.ErrContended)
	require.EqualError(t, err, "send: ratelimit: limited by first, second: retry after 12s")
	var limited *ratelimit.LimitedError
	require.ErrorAs(t, err, &limited)
	require.Equal(t, 12*time.Second, limited.Decision.RetryAfter)

	err = take(first.For("bob"), second.For("alice")).Err()
	require.EqualError(t, err, "ratelimit: limited by second: retry after 12s", "the one that allowed is not blamed")
}

// TestValue projects a reading to other instants.
func TestValue(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	limiter, err := ratelimit.New(pool, ratelimit.Config{AsOf: func() time.Time { return opening.Add(6 * time.Second) }})
	require.NoError(t, err)
	plant(t, pool, planted{name: "projected", key: "a", value: -5})
	v, err := limiter.Value(t.Context(), ratelimit.Define("projected", ratelimit.TokenBucket{Rate: 10, Period: time.Minute, Capacity: 20}).For("a"))
	require.NoError(t, err)
	require.Equal(t, -4.0, v.Tokens)
	require.True(t, v.AsOf.Equal(opening.Add(6*time.Second)))

	t.Run("RisesWithTimeUpToTheCapacity", func(t *testing.T) {
		t.Parallel()
		require.Equal(t, -4.0, v.At(v.AsOf))
		require.Equal(t, 0.0, v.At(opening.Add(30*time.Second)))
		require.Equal(t, 5.0, v.At(opening.Add(time.Minute)))
		require.Equal(t, 20.0, v.At(opening.Add(time.Hour)))
		require.Equal(t, 20.0, v.At(time.Date(9999, 1, 1, 0, 0, 0, 0, time.UTC)))
		require.Equal(t, 20.0, v.At(time.Date(20_000, 1, 1, 0, 0, 0, 0, time.UTC)))
	})
	t.Run("IsThatOfTheLastChangeBeforeIt", func(t *testing.T) {
		t.Parallel()
		require.Equal(t, -5.0, v.At(opening))
		require.Equal(t, -5.0, v.At(opening.Add(-time.Hour)))
		require.Equal(t, -5.0, v.At(time.Time{}))
		require.Equal(t, -5.0, v.At(time.Date(-5000, 1, 1, 0, 0, 0, 0, time.UTC)))
	})
	t.Run("IsNothingWhenZero", func(t *testing.T) {
		t.Parallel()
		require.Zero(t, ratelimit.Value{}.At(opening))
	})
	t.Run("KnowsInstantsThatMicrosecondsCannotCount", func(t *testing.T) {
		t.Parallel()
		require.Equal(t, 20.0, v.At(time.Date(586_542, 1, 1, 0, 0, 0, 0, time.UTC)))
		require.Equal(t, 20.0, v.At(time.Unix(1<<58, 0)))
		require.Equal(t, -5.0, v.At(time.Unix(-1<<58, 0)))
	})
	t.Run("SaysWhenACostCanBeTaken", func(t *testing.T) {
		t.Parallel()
		for cost, want := range map[float64]time.Duration{0: 24 * time.Second, 1: 30 * time.Second, 20: 144 * time.Second} {
			wait, err := v.RetryAfter(v.AsOf, cost)
			require.NoError(t, err)
			require.Equal(t, want, wait, "%v", cost)
		}
		wait, err := v.RetryAfter(opening.Add(time.Hour), 20)
		require.NoError(t, err)
		require.Zero(t, wait)
	})
	t.Run("RefusesCostsThatNeverCanBeTaken", func(t *testing.T) {
		t.Parallel()
		_, err := v.RetryAfter(v.AsOf, 21)
		require.ErrorIs(t, err, ratelimit.ErrCostExceedsCapacity)
		_, err = v.RetryAfter(v.AsOf, -1)
		require.ErrorIs(t, err, ratelimit.ErrInvalidCost)
		_, err = ratelimit.Value{}.RetryAfter(v.AsOf, 1)
		require.ErrorIs(t, err, ratelimit.ErrInvalidLimit)
	})
}

func TestReservationDelay(t *testing.T) {
	t.Parallel()
	allowed := ratelimit.Reservation{Decision: ratelimit.Decision{Allowed: true, At: opening}, ReadyAt: opening.Add(3 * time.Second)}
	require.Equal(t, 3*time.Second, allowed.Delay())
	refused := ratelimit.Reservation{Decision: ratelimit.Decision{At: opening, RetryAfter: time.Hour}}
	require.Zero(t, refused.Delay(), "there is no work to delay")
}

func TestIsRetryable(t *testing.T) {
	t.Parallel()
	for code, want := range map[string]bool{"40001": true, "40P01": true, "23505": false, "22012": false, "25P02": false, "08006": false, "57014": false} {
		require.Equal(t, want, ratelimit.IsRetryable(fmt.Errorf("insert: %w", &pgconn.PgError{Code: code})), code)
	}
	require.False(t, ratelimit.IsRetryable(nil))
	require.False(t, ratelimit.IsRetryable(errors.New("SQLSTATE 40001")))
	require.False(t, ratelimit.IsRetryable(ratelimit.ErrLimited))
}
