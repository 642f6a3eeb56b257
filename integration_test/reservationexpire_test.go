package integration_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// daily and minutely are windows of which one is over an hour after noon.
var (
	daily    = ratelimit.Define("daily", ratelimit.FixedWindow{Rate: 10, Period: ratelimit.Day, Capacity: 300, Start: clockNoon})
	minutely = ratelimit.Define("minutely", ratelimit.FixedWindow{Rate: 0.001, Period: time.Minute, Capacity: 300, Start: clockNoon})
)

// expire expires, which must end so many reservations.
func (d *desk) expire(t *testing.T, want int) {
	t.Helper()
	ended, err := d.limiter.Expire(t.Context())
	require.NoError(t, err)
	require.Equal(t, want, ended)
}

func TestExpire(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name                   string
		release                bool
		roomy, daily, minutely float64
		started                ratelimit.ReservationState
	}{
		{"KeepsTheEstimate", false, 5e5, 100, 260, ratelimit.Expired},
		{"GivesItBackWhereThePolicySaysSo", true, 1e6, 300, 260, ratelimit.Open},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			d := setup(t).desk(t, ratelimit.Config{ExpireAfter: time.Hour, ReleaseExpired: test.release})
			requireTokens := func(of ratelimit.Request, want float64) {
				value, err := d.limiter.Value(t.Context(), of)
				require.NoError(t, err)
				require.InDelta(t, want, value.Tokens, 10)
			}
			r := d.reserve(t, roomy.For("key").Cost(5e5), daily.For("key").Cost(200), minutely.For("key").Cost(40))
			late := d.reserve(t, lookups.For("key").Cost(20)) // ready a second later
			settled, cancelled := d.reserve(t, other.For("key").Cost(3e5)), d.reserve(t, other.For("key").Cost(5e5))
			require.NoError(t, d.limiter.Settle(t.Context(), settled.ID))
			require.NoError(t, d.limiter.Cancel(t.Context(), cancelled.ID))

			d.at(time.Hour)
			d.expire(t, 0)
			d.at(time.Hour + time.Microsecond)
			d.expire(t, 1)
			d.expire(t, 0)
			requireTokens(roomy.For("key"), test.roomy)
			requireTokens(daily.For("key"), test.daily)
			requireTokens(minutely.For("key"), test.minutely)
			requireTokens(other.For("key"), 7e5)
			require.ErrorIs(t, d.limiter.Settle(t.Context(), r.ID), ratelimit.ErrReservationEnded)
			require.ErrorIs(t, d.limiter.Cancel(t.Context(), r.ID), ratelimit.ErrReservationEnded)
			require.NoError(t, d.limiter.Cancel(t.Context(), late.ID), "it is not over yet")

			slot := d.start(t, r.ID, 0)
			require.Equal(t, test.started, slot.State)
			requireTokens(roomy.For("key"), 5e5)
		})
	}
}

// If several processes call Expire, each reservation ends once and is returned once.
func TestExpireBySeveralProcessesAtOnce(t *testing.T) {
	t.Parallel()
	onEach(t, testExpireBySeveralProcessesAtOnce, onPostgres, inMemory)
}

func testExpireBySeveralProcessesAtOnce(t *testing.T, on backend) {
	const reservations = 230 // more than are read at once
	d := on.setup(t).desk(t, ratelimit.Config{ExpireAfter: time.Hour, ReleaseExpired: true})
	var halfIsKept float64
	for n := range reservations {
		key := roomy.For(fmt.Sprint("key ", n%7))
		d.reserve(t, key.Cost(10), other.Global().Cost(10))
		if n%2 == 0 {
			requireAllowed(t, taking(other.Global().Cost(10)), d.limiter)
			halfIsKept += 10
		}
	}
	d.at(time.Hour + time.Second)
	ended := make([]int, 4)
	require.NoError(t, atonce.Do(len(ended), func(process int) (err error) {
		ended[process], err = d.limiter.Expire(t.Context())
		return err
	}))
	value, err := d.limiter.Value(t.Context(), other.Global())
	require.NoError(t, err)
	require.InDelta(t, 1e6-halfIsKept, value.Tokens, 2)
	total := 0
	for _, n := range ended {
		total += n
	}
	require.Equal(t, reservations, total, "each process counts those that it ended: %v", ended)
}

func TestExpireForgetsAWeekLater(t *testing.T) {
	t.Parallel()
	const expireAfter = time.Hour
	d := setup(t).desk(t, ratelimit.Config{ExpireAfter: expireAfter})
	settled, cancelled, open := d.reserve(t, roomy.For("key")), d.reserve(t, roomy.For("key")), d.reserve(t, roomy.For("key"))
	require.NoError(t, d.limiter.Settle(t.Context(), settled.ID))
	require.NoError(t, d.limiter.Cancel(t.Context(), cancelled.ID))

	d.at(expireAfter + ratelimit.Week)
	d.expire(t, 1) // which is when it ends: a week from here it is deleted
	require.Len(t, d.reservations(t), 3)
	require.NoError(t, d.limiter.Settle(t.Context(), settled.ID))
	require.NoError(t, d.limiter.Cancel(t.Context(), cancelled.ID))
	require.ErrorIs(t, d.limiter.Settle(t.Context(), open.ID), ratelimit.ErrReservationEnded)

	d.at(expireAfter + ratelimit.Week + time.Microsecond)
	d.expire(t, 0)
	require.Len(t, d.reservations(t), 1)
	require.ErrorIs(t, d.limiter.Cancel(t.Context(), open.ID), ratelimit.ErrReservationEnded)
	d.at(expireAfter + 2*ratelimit.Week + time.Microsecond)
	d.expire(t, 0)
	require.Empty(t, d.reservations(t))
	for _, r := range []ratelimit.Reservation{settled, cancelled, open} {
		require.ErrorIs(t, d.limiter.Settle(t.Context(), r.ID), ratelimit.ErrNotReserved)
	}
}
