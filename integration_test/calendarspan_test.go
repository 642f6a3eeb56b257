package integration_test

import (
	"fmt"
	"strconv"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Each verb over the end of a window, by itself and in a transaction of the caller's.
func TestReservationsOverTheEndOfACalendarWindow(t *testing.T) {
	t.Parallel()
	b := setup(t)
	limit := ratelimit.Define("month", monthly)
	ends, following := in(t, "Europe/Berlin", time.April, 1, 0), in(t, "Europe/Berlin", time.May, 1, 0)
	for _, inTx := range []bool{false, true} {
		within := func(t *testing.T, d *desk, call func(l *ratelimit.Limiter)) {
			t.Helper()
			if !inTx {
				call(d.limiter)
				return
			}
			tx := b.begin(t, pgx.RepeatableRead)
			call(d.limiter.WithTx(tx))
			require.NoError(t, tx.Commit(t.Context()))
		}
		// ready makes a reservation that March cannot pay, and returns its ID. It is ready in April.
		ready := func(t *testing.T, d *desk, request ratelimit.Request) (id string) {
			t.Helper()
			d.clock.set(ends.Add(-time.Hour))
			within(t, d, func(l *ratelimit.Limiter) {
				requireAllowed(t, taking(request.Cost(900)), l)
				r, err := l.Reserve(t.Context(), request.Cost(600))
				require.NoError(t, err)
				require.True(t, r.Allowed)
				requireInstant(t, ends, r.ReadyAt)
				id = r.ID
				refused, err := l.Reserve(t.Context(), request.Cost(501))
				require.NoError(t, err)
				require.False(t, refused.Allowed, "it would reach into May")
				require.Equal(t, time.Hour, refused.RetryAfter)
				far, err := l.Take(t.Context(), request.Cost(600))
				require.NoError(t, err)
				require.Equal(t, following.Sub(d.clock.now()), far.RetryAfter, "500 are left of April")
			})
			return id
		}
		name := map[bool]string{false: "ByItself/", true: "InATransaction/"}[inTx]
		t.Run(name+"Settle", func(t *testing.T) {
			t.Parallel()
			d, request := b.desk(t, ratelimit.Config{}), limit.For(t.Name())
			id := ready(t, d, request)
			d.clock.set(ends.Add(time.Hour))
			d.requireTokens(t, 500, request)
			within(t, d, func(l *ratelimit.Limiter) { require.NoError(t, l.Settle(t.Context(), id, request.Cost(650))) })
			d.requireTokens(t, 450, request)
			d.clock.set(following)
			d.requireTokens(t, 1000, request)
		})
		t.Run(name+"SettleLessWhenTheWindowIsOver", func(t *testing.T) {
			t.Parallel()
			d, request := b.desk(t, ratelimit.Config{}), limit.For(t.Name())
			id := ready(t, d, request)
			d.clock.set(following.Add(time.Hour))
			requireAllowed(t, taking(request.Cost(700)), d.limiter)
			within(t, d, func(l *ratelimit.Limiter) { require.NoError(t, l.Settle(t.Context(), id, request.Cost(1))) })
			d.requireTokens(t, 300, request)
		})
		t.Run(name+"Cancel", func(t *testing.T) {
			t.Parallel()
			d, request := b.desk(t, ratelimit.Config{}), limit.For(t.Name())
			id := ready(t, d, request)
			d.clock.set(following.Add(-time.Microsecond))
			requireAllowed(t, taking(request.Cost(400)), d.limiter)
			within(t, d, func(l *ratelimit.Limiter) { require.NoError(t, l.Cancel(t.Context(), id)) })
			d.requireTokens(t, 700, request)
		})
		t.Run(name+"CancelBeforeItIsReady", func(t *testing.T) {
			t.Parallel()
			d, request := b.desk(t, ratelimit.Config{}), limit.For(t.Name())
			id := ready(t, d, request)
			within(t, d, func(l *ratelimit.Limiter) { require.NoError(t, l.Cancel(t.Context(), id)) })
			d.requireTokens(t, 100, request)
		})
		t.Run(name+"EndedByAProcessThatDoesNotKnowTheLimit", func(t *testing.T) {
			t.Parallel()
			d, request := b.desk(t, ratelimit.Config{}), limit.For(t.Name())
			id := ready(t, d, request)
			stranger := &desk{clock: d.clock, bundle: &bundle{pool: b.pool, schema: b.schema}}
			stranger.limiter = b.with(t, ratelimit.Config{AsOf: d.clock.now})
			d.clock.set(following.AddDate(0, 1, 3)) // in June
			requireAllowed(t, taking(request.Cost(700)), d.limiter)
			within(t, stranger, func(l *ratelimit.Limiter) {
				require.NoError(t, l.Settle(t.Context(), id))
				_, err := l.Renew(t.Context(), id)
				require.NoError(t, err)
			})
			d.requireTokens(t, -300, request)
			require.NoError(t, stranger.limiter.Settle(t.Context(), id))
			d.clock.set(following.AddDate(0, 2, 0))
			d.requireTokens(t, 700, request)
		})
	}

	t.Run("CreditTakenAndCharge", func(t *testing.T) {
		t.Parallel()
		d, request := b.desk(t, ratelimit.Config{}), limit.For(t.Name())
		d.clock.set(ends.Add(-time.Hour))
		requireAllowed(t, taking(request.Cost(900)), d.limiter)
		require.NoError(t, d.limiter.CreditTaken(t.Context(), d.clock.now(), request.Cost(100)))
		d.requireTokens(t, 200, request)
		taken := d.clock.now()
		d.clock.set(ends)
		requireAllowed(t, taking(request.Cost(500)), d.limiter)
		require.NoError(t, d.limiter.CreditTaken(t.Context(), taken, request.Cost(100)))
		d.requireTokens(t, 500, request)
		require.NoError(t, d.limiter.Charge(t.Context(), request.Cost(4600))) // four months and a tenth
		d.requireTokens(t, -4100, request)
		refused, err := d.limiter.Take(t.Context(), request)
		require.NoError(t, err)
		require.Equal(t, ends.AddDate(0, 5, 0).Sub(ends), refused.RetryAfter, "it is repaid by a rate each month")
		require.InDelta(t, -100, refused.States[0].Value.At(ends.AddDate(0, 5, 0).Add(-time.Microsecond)), 0)
		require.InDelta(t, 900, refused.States[0].Value.At(ends.AddDate(0, 5, 0)), 0)
		d.clock.set(ends.AddDate(0, 4, 0))
		d.requireTokens(t, -100, request)
		d.clock.set(ends.AddDate(0, 5, 0).Add(-time.Microsecond))
		requireRefusedFor(t, d, request, time.Microsecond)
		d.clock.set(ends.AddDate(0, 5, 0))
		d.requireTokens(t, 900, request)
		require.NoError(t, d.limiter.Reset(t.Context(), request))
		d.requireTokens(t, 1000, request)
		d.clock.set(ends.AddDate(0, 6, 0))
		d.requireTokens(t, 1000, request)
	})
}

func requireRefusedFor(t *testing.T, d *desk, request ratelimit.Request, wait time.Duration) {
	t.Helper()
	refused, err := d.limiter.Take(t.Context(), request)
	require.NoError(t, err)
	require.False(t, refused.Allowed)
	require.Equal(t, wait, refused.RetryAfter)
}

// The clock of the database goes on, or back, by many windows.
func TestTheClockGoesManyWindowsOn(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for _, resets := range []ratelimit.Calendar{ratelimit.Daily, ratelimit.Weekly, ratelimit.Monthly, ratelimit.Quarterly, ratelimit.Yearly} {
		limit := ratelimit.Define("limit", ratelimit.CalendarWindow{Rate: 10, Resets: resets, Zone: "America/Santiago"})
		for _, years := range []int{2, 30, 300, -8, -40} {
			t.Run(string(resets)+time.Date(2000+years, 1, 1, 0, 0, 0, 0, time.UTC).Format("/2006"), func(t *testing.T) {
				t.Parallel()
				representative(t, fmt.Sprint(resets, years), "day300", "month2", "year-8")
				d := b.desk(t, ratelimit.Config{})
				d.clock.set(clockNoon)
				takeAll(t, d.limiter, limit.For(t.Name()))
				d.clock.set(clockNoon.AddDate(years, 0, 0))
				next, err := d.limiter.Take(t.Context(), limit.For(t.Name()))
				require.NoError(t, err)
				require.Equal(t, years > 0, next.Allowed, "a clock that goes back gives nothing")
				begin := d.clock.now().Add(next.ResetAfter)
				fresh, err := b.with(t, ratelimit.Config{AsOf: d.clock.now}).Take(t.Context(), limit.For(t.Name()+" anew"))
				require.NoError(t, err)
				require.Equal(t, begin, d.clock.now().Add(fresh.ResetAfter), "a Limiter that never saw another time says the same")
				local := begin.In(in(t, "America/Santiago", 1, 1, 0).Location())
				require.LessOrEqual(t, local.Hour(), 1)
			})
			t.Run("InTheMidst/"+string(resets)+time.Date(2000+years, 1, 1, 0, 0, 0, 0, time.UTC).Format("/2006"), func(t *testing.T) {
				t.Parallel()
				representative(t, fmt.Sprint(resets, years), "month2", "year-8")
				for reads := range int64(6) {
					n := int64(0)
					l := b.with(t, ratelimit.Config{NoBatching: true, AsOf: func() time.Time {
						if n++; n <= reads+4 {
							return clockNoon
						}
						return clockNoon.AddDate(years, 0, 0)
					}})
					tx := b.begin(t, pgx.Serializable)
					for range 3 {
						d, err := l.WithTx(tx).Take(t.Context(), limit.For(t.Name()), roomy.For(t.Name()))
						require.NoError(t, err)
						require.Less(t, d.States[0].ResetAfter, 400*ratelimit.Day)
					}
					require.NoError(t, tx.Rollback(t.Context()))
				}
			})
		}
	}
}

// The clock goes on in the midst of a call for as much as there is.
func TestTheClockGoesManyWindowsOnDuringATakeUpTo(t *testing.T) {
	t.Parallel()
	b := setup(t)
	limit := ratelimit.Define("limit", ratelimit.CalendarWindow{Rate: 10, Resets: ratelimit.Monthly, Zone: "America/Santiago"})
	for reads := range 8 { // of the clock, before it goes
		n := 0
		l := b.with(t, ratelimit.Config{NoBatching: true, AsOf: func() time.Time {
			if n++; n <= reads {
				return clockNoon
			}
			return clockNoon.AddDate(30, 0, 0)
		}})
		taken, d, err := l.TakeUpTo(t.Context(), 20, limit.For(strconv.Itoa(reads)))
		require.NoError(t, err)
		require.True(t, d.Allowed)
		require.Equal(t, 10, taken, "after %d reads", reads)
		require.InDelta(t, 0, d.Remaining, 0)
	}
}
