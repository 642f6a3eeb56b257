//go:build unix

package server_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// A call waits for a row for days, and the transaction that holds the row takes from it at the beginning and at the end. The call
// began long before the row's ts, but must not treat that ts as a wrong clock. The tokens that arrived between the two takes count
// once.
func TestWhoWaitsForDaysCreditsNothingTwice(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "servers of its own")
	_, a, clock := startClocked(t)
	const capacity, wait = 10, 41 * time.Hour // which fills every limit, and is two windows long
	beside := ratelimit.Define("beside", ratelimit.TokenBucket{Rate: 1000, Period: time.Second})
	var began time.Time
	type call func(ctx context.Context, l *ratelimit.Limiter, r ratelimit.Request) error
	acquire := func(ctx context.Context, l *ratelimit.Limiter, r ratelimit.Request) error {
		lease, err := l.Acquire(ctx, r)
		return orRefused(lease.Decision, err)
	}
	take := func(ctx context.Context, l *ratelimit.Limiter, r ratelimit.Request) error {
		return orRefused(l.Take(ctx, r))
	}
	calls := map[string]call{
		"Take": take,
		"Several": func(ctx context.Context, l *ratelimit.Limiter, r ratelimit.Request) error {
			return orRefused(l.Take(ctx, r, beside.For("all")))
		},
		"Charge": func(ctx context.Context, l *ratelimit.Limiter, r ratelimit.Request) error { return l.Charge(ctx, r) },
		"CreditTaken": func(ctx context.Context, l *ratelimit.Limiter, r ratelimit.Request) error {
			return l.CreditTaken(ctx, began, r)
		},
	}
	ahead := time.Duration(0)
	for kind, s := range steppedLimits(one[time.Time](t, a.pool, `SELECT clock_timestamp()`)) {
		hold, ways := take, calls
		if kind == "slots" {
			hold, ways = acquire, map[string]call{"Acquire": acquire}
		}
		for way, call := range ways {
			for _, level := range []pgx.TxIsoLevel{"", pgx.ReadCommitted, pgx.Serializable} {
				t.Run(fmt.Sprint(kind, "/", way, "/", level), func(t *testing.T) { // one after the other: they share the clock
					request := s.limit.For(t.Name())
					began = one[time.Time](t, a.pool, `SELECT clock_timestamp()`)
					holder, err := a.pool.Begin(t.Context())
					require.NoError(t, err)
					require.NoError(t, hold(t.Context(), a.limiter.WithTx(holder), request))
					waited := make(chan error, 1)
					go func() {
						waited <- a.at(t.Context(), level, func(l *ratelimit.Limiter) error { return call(t.Context(), l, request) })
					}()
					eventually(t, "the call waits for the row", func() bool { return a.waiting(t) == 1 })
					ahead += wait
					clock.Set(t, ahead)
					require.NoError(t, hold(t.Context(), a.limiter.WithTx(holder), request))
					require.NoError(t, holder.Commit(t.Context()))
					require.NoError(t, <-waited)
					left := capacity - 2
					switch {
					case way == "CreditTaken" && kind == "bucket":
						left = capacity
					case way == "CreditTaken": // of a window that has ended meanwhile
						left = capacity - 1
					}
					require.Equal(t, left, a.drain(t, s, t.Name(), false))
				})
			}
		}
	}
}

// at runs call in a transaction of the isolation level, which is made again after a conflict, or in none.
func (a *application) at(ctx context.Context, level pgx.TxIsoLevel, call func(*ratelimit.Limiter) error) error {
	if level == "" {
		return call(a.limiter)
	}
	for {
		err := pgx.BeginTxFunc(ctx, a.pool, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) error { return call(a.limiter.WithTx(tx)) })
		if sqlstate(err) != "40001" {
			return err
		}
	}
}

// waiting returns how many sessions wait for a lock.
func (a *application) waiting(t *testing.T) int {
	t.Helper()
	return one[int](t, a.pool, `SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'`)
}

// orRefused returns err, or else the refusal.
func orRefused(d ratelimit.Decision, err error) error {
	if err == nil {
		err = d.Err()
	}
	return err
}
