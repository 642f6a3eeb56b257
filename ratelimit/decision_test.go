package ratelimit

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// TestDecision folds the states of several limits into one answer.
func TestDecision(t *testing.T) {
	t.Parallel()
	now := opening.UnixMicro()
	perMinute, perDay := Define("perMinute", PerMinute(10)), Define("perDay", PerDay(100))
	decide := func(minute, day answer) Decision {
		minute.now, day.now = now, now
		p, err := new(Limiter).plan([]Request{perMinute.For("u").Cost(2), perDay.For("u").Cost(3), perMinute.For("u").Cost(1)}, false)
		require.NoError(t, err)
		return p.decide([]answer{day, minute}) // in the order of locking
	}

	t.Run("IsTheLeastThatIsLeftWhenAllAllow", func(t *testing.T) {
		t.Parallel()
		d := decide(answer{allowed: true, state: bucket.State{Value: 7, TS: now}}, answer{allowed: true, state: bucket.State{Value: 2.5, TS: now}})
		require.True(t, d.Allowed)
		require.NoError(t, d.Err())
		require.Zero(t, d.RetryAfter)
		require.Equal(t, 2.5, d.Remaining)
		require.Equal(t, Day*975/1000, d.ResetAfter)
		require.True(t, d.At.Equal(opening))
	})
	t.Run("HasAStateForEachRequestInTheOrderAsked", func(t *testing.T) {
		t.Parallel()
		d := decide(answer{allowed: true, state: bucket.State{Value: 7, TS: now}}, answer{allowed: true, state: bucket.State{Value: 2.5, TS: now}})
		require.Len(t, d.States, 3)
		for i, want := range []struct {
			limit     Limit
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
		d := decide(answer{state: bucket.State{Value: 1, TS: now}}, answer{state: bucket.State{Value: -1, TS: now}})
		require.False(t, d.Allowed)
		require.Equal(t, Day*4/100, d.RetryAfter)
		require.Equal(t, 12*time.Second, d.States[0].RetryAfter)
		require.Zero(t, d.Remaining, "a debt is nothing left")
		require.Equal(t, -1.0, d.States[1].Value.Tokens)
	})
	t.Run("WaitsForNoneThatAllows", func(t *testing.T) {
		t.Parallel()
		d := decide(answer{state: bucket.State{Value: 1, TS: now}}, answer{allowed: true, state: bucket.State{Value: 50, TS: now}})
		require.Equal(t, 12*time.Second, d.RetryAfter)
		require.True(t, d.States[1].Allowed)
		require.Zero(t, d.States[1].RetryAfter)
		require.Equal(t, 1.0, d.Remaining)
	})
}

func TestLimitedError(t *testing.T) {
	t.Parallel()
	now := opening.UnixMicro()
	first, second := Define("first", PerMinute(10)), Define("second", PerMinute(5))
	p, err := new(Limiter).plan([]Request{first.For("alice"), second.For("alice")}, false)
	require.NoError(t, err)
	refused := answer{state: bucket.State{Value: 0, TS: now}, now: now}
	err = fmt.Errorf("send: %w", p.decide([]answer{refused, refused}).Err())

	require.ErrorIs(t, err, ErrLimited)
	require.NotErrorIs(t, err, ErrContended)
	require.EqualError(t, err, "send: ratelimit: limited by first, second: retry after 12s")
	var limited *LimitedError
	require.ErrorAs(t, err, &limited)
	require.Equal(t, 12*time.Second, limited.Decision.RetryAfter)

	allowed := answer{allowed: true, state: bucket.State{Value: 3, TS: now}, now: now}
	err = p.decide([]answer{allowed, refused}).Err()
	require.EqualError(t, err, "ratelimit: limited by second: retry after 12s", "the one that allowed is not blamed")
}

// TestValue projects a reading to other instants.
func TestValue(t *testing.T) {
	t.Parallel()
	limit := Define("projected", TokenBucket{Rate: 10, Period: time.Minute, Capacity: 20})
	b := ask{limit: limit, terms: limit.terms}
	v := b.reading(answer{state: bucket.State{Value: -5, TS: opening.UnixMicro()}, now: opening.Add(6 * time.Second).UnixMicro()})
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
		require.Zero(t, Value{}.At(opening))
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
		require.ErrorIs(t, err, ErrCostExceedsCapacity)
		_, err = v.RetryAfter(v.AsOf, -1)
		require.ErrorIs(t, err, ErrInvalidCost)
		_, err = Value{}.RetryAfter(v.AsOf, 1)
		require.ErrorIs(t, err, ErrInvalidLimit)
	})
}

func TestReservationDelay(t *testing.T) {
	t.Parallel()
	allowed := Reservation{Decision: Decision{Allowed: true, At: opening}, ReadyAt: opening.Add(3 * time.Second)}
	require.Equal(t, 3*time.Second, allowed.Delay())
	refused := Reservation{Decision: Decision{At: opening, RetryAfter: time.Hour}}
	require.Zero(t, refused.Delay(), "there is no work to delay")
}

func TestIsRetryable(t *testing.T) {
	t.Parallel()
	for code, want := range map[string]bool{"40001": true, "40P01": true, "23505": false, "22012": false, "25P02": false, "08006": false, "57014": false} {
		require.Equal(t, want, IsRetryable(fmt.Errorf("insert: %w", &pgconn.PgError{Code: code})), code)
	}
	require.False(t, IsRetryable(nil))
	require.False(t, IsRetryable(errors.New("SQLSTATE 40001")))
	require.False(t, IsRetryable(ErrLimited))
}
