package integration_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

const staleAfter = 10 * time.Second

// start starts the reservation, and checks that it says to wait so long.
func (d *desk) start(t *testing.T, id string, wait time.Duration) ratelimit.Turn {
	t.Helper()
	turn, err := d.limiter.Start(t.Context(), id)
	require.NoError(t, err)
	require.Equal(t, wait, turn.Wait)
	require.Equal(t, id, turn.ID)
	return turn
}

// renew renews the reservation, and checks that it says to wait so long.
func (d *desk) renew(t *testing.T, id string, wait time.Duration) ratelimit.Turn {
	t.Helper()
	turn, err := d.limiter.Renew(t.Context(), id)
	require.NoError(t, err)
	require.Equal(t, wait, turn.Wait)
	require.False(t, turn.Restarted)
	return turn
}

func TestStart(t *testing.T) {
	t.Parallel()
	b := setup(t)
	config := ratelimit.Config{StaleAfter: staleAfter}

	t.Run("WaitsUntilReadyAt", func(t *testing.T) {
		t.Parallel()
		d, key := b.desk(t, config), lookups.For(t.Name())
		r := d.reserve(t, key.Cost(15))
		turn := d.start(t, r.ID, 500*time.Millisecond)
		requireInstant(t, r.ReadyAt, turn.ReadyAt)
		requireInstant(t, r.StaleAt, turn.StaleAt)
		d.at(500*time.Millisecond - time.Microsecond)
		d.start(t, r.ID, time.Microsecond)
		d.at(500 * time.Millisecond)
		turn = d.start(t, r.ID, 0)
		require.False(t, turn.Restarted)
		require.Equal(t, ratelimit.Open, turn.State)
		d.requireTokens(t, 0, key)
	})
	t.Run("AgainDoesNotPayAgain", func(t *testing.T) {
		t.Parallel()
		d, key := b.desk(t, config), lookups.For(t.Name())
		r := d.reserve(t, key.Cost(15))
		d.at(time.Second)
		require.False(t, d.start(t, r.ID, 0).Restarted)
		for _, later := range []time.Duration{time.Second, staleAfter + time.Minute, time.Hour} {
			d.at(later)
			require.True(t, d.start(t, r.ID, 0).Restarted)
		}
		d.at(time.Second)
		d.requireTokens(t, 5, key)
		require.NoError(t, d.limiter.Cancel(t.Context(), r.ID))
	})
	t.Run("AgainPaysWhenItsReservationWasReleased", func(t *testing.T) {
		t.Parallel()
		d, key := setup(t).desk(t, ratelimit.Config{ReleaseExpired: true, ExpireAfter: time.Minute}), lookups.For(t.Name())
		r := d.reserve(t, key.Cost(8))
		d.start(t, r.ID, 0)
		d.at(time.Hour)
		takeAll(t, d.limiter, key)
		d.expire(t, 1)
		d.requireTokens(t, 8, key)
		turn := d.start(t, r.ID, 0)
		require.Equal(t, ratelimit.Open, turn.State)
		require.False(t, turn.Restarted)
		d.requireTokens(t, 0, key)
		require.True(t, d.start(t, r.ID, 0).Restarted, "which it has paid for")
		d.requireTokens(t, 0, key)
	})
	t.Run("BeforeStaleAtKeepsItsTurn", func(t *testing.T) {
		t.Parallel()
		d, key := b.desk(t, config), lookups.For(t.Name())
		r := d.reserve(t, key.Cost(15))
		d.at(500*time.Millisecond + staleAfter - time.Microsecond)
		require.False(t, d.start(t, r.ID, 0).Restarted)
		d.requireTokens(t, 10, key)
	})
	t.Run("AfterStaleAtPaysForANewTurn", func(t *testing.T) {
		t.Parallel()
		d, key := b.desk(t, config), lookups.For(t.Name())
		r := d.reserve(t, key.Cost(15))
		d.start(t, r.ID, 500*time.Millisecond) // too early is no start
		d.at(time.Minute)
		turn := d.start(t, r.ID, 500*time.Millisecond)
		requireInstant(t, clockNoon.Add(time.Minute+500*time.Millisecond), turn.ReadyAt)
		requireInstant(t, turn.ReadyAt.Add(staleAfter), turn.StaleAt)
		d.requireTokens(t, -5, key)
		d.start(t, r.ID, 500*time.Millisecond)
		d.requireTokens(t, -5, key)
		d.at(time.Minute + 500*time.Millisecond)
		require.False(t, d.start(t, r.ID, 0).Restarted)
		d.at(time.Hour)
		require.True(t, d.start(t, r.ID, 0).Restarted)
		d.requireTokens(t, 10, key)
	})
	t.Run("AfterStaleAtMayRunAtOnceWhereTheTokensAreThere", func(t *testing.T) {
		t.Parallel()
		d, key := b.desk(t, config), lookups.For(t.Name())
		r := d.reserve(t, key.Cost(4))
		d.at(time.Hour)
		require.False(t, d.start(t, r.ID, 0).Restarted)
		d.requireTokens(t, 6, key)
		require.True(t, d.start(t, r.ID, 0).Restarted)
		d.requireTokens(t, 6, key)
	})
	t.Run("OfWorkThatPiledUpDoesNotBurst", func(t *testing.T) {
		t.Parallel()
		d, key := b.desk(t, config), t.Name()
		var piled []ratelimit.Reservation
		for range 5 {
			piled = append(piled, d.reserve(t, lookups.For(key).Cost(10), words.For(key)))
		}
		d.at(time.Hour)
		for i, r := range piled {
			d.start(t, r.ID, time.Duration(i)*time.Second)
		}
		d.requireTokens(t, -40, lookups.For(key))
		d.requireTokens(t, 45, words.For(key))
	})
	t.Run("IsRefusedANewTurnWhileTooMuchIsOwed", func(t *testing.T) {
		t.Parallel()
		d, key := b.desk(t, config), t.Name()
		r := d.reserve(t, mortgaged.For(key).Cost(8), lookups.For(key).Cost(8))
		d.at(time.Minute)
		d.reserve(t, mortgaged.For(key).Cost(30))
		turn := d.start(t, r.ID, 800*time.Millisecond)
		requireInstant(t, r.ReadyAt, turn.ReadyAt)
		d.requireTokens(t, -20, mortgaged.For(key))
		d.requireTokens(t, 10, lookups.For(key))
		d.at(time.Minute + 800*time.Millisecond)
		turn = d.start(t, r.ID, 2*time.Second)
		requireInstant(t, clockNoon.Add(time.Minute+2800*time.Millisecond), turn.ReadyAt)
		d.requireTokens(t, 2, lookups.For(key))
	})
	t.Run("WithoutStaleAfterKeepsTheTurnForEver", func(t *testing.T) {
		t.Parallel()
		d, key := b.desk(t, ratelimit.Config{}), lookups.For(t.Name())
		r := d.reserve(t, key.Cost(15))
		d.at(1000 * time.Hour)
		require.Zero(t, d.start(t, r.ID, 0).StaleAt)
		d.requireTokens(t, 10, key)
	})
	t.Run("AfterTheEnd", func(t *testing.T) {
		t.Parallel()
		d, key := b.desk(t, config), lookups.For(t.Name())
		settled, cancelled := d.reserve(t, key.Cost(2)), d.reserve(t, key.Cost(3))
		d.start(t, settled.ID, 0)
		require.NoError(t, d.limiter.Settle(t.Context(), settled.ID))
		require.NoError(t, d.limiter.Cancel(t.Context(), cancelled.ID))
		d.at(100 * time.Millisecond)
		turn := d.start(t, settled.ID, 0)
		require.Equal(t, ratelimit.Settled, turn.State)
		require.True(t, turn.Restarted)
		_, err := d.limiter.Start(t.Context(), cancelled.ID)
		require.ErrorIs(t, err, ratelimit.ErrReservationEnded)
		d.requireTokens(t, 9, key)
	})
	t.Run("AfterTheClockSteppedBackWaitsAsMuchLonger", func(t *testing.T) {
		t.Parallel()
		d, key := b.desk(t, config), lookups.For(t.Name())
		r := d.reserve(t, key.Cost(15))
		d.at(-30 * time.Second)
		d.start(t, r.ID, 30*time.Second+500*time.Millisecond)
	})
}

func TestRenew(t *testing.T) {
	t.Parallel()
	b := setup(t)
	config := ratelimit.Config{StaleAfter: staleAfter}

	t.Run("PaysEachTimeWhateverItWas", func(t *testing.T) {
		t.Parallel()
		d, key := b.desk(t, config), lookups.For(t.Name())
		r := d.reserve(t, key.Cost(10))
		d.start(t, r.ID, 0)
		d.renew(t, r.ID, time.Second) // started
		d.renew(t, r.ID, 2*time.Second)
		require.NoError(t, d.limiter.Settle(t.Context(), r.ID))
		d.renew(t, r.ID, 3*time.Second) // settled
		require.NoError(t, d.limiter.Cancel(t.Context(), r.ID))
		d.requireTokens(t, -20, key)
		turn := d.renew(t, r.ID, 3*time.Second) // cancelled
		require.Equal(t, ratelimit.Open, turn.State)
		requireInstant(t, clockNoon.Add(3*time.Second), turn.ReadyAt)
		requireInstant(t, clockNoon.Add(3*time.Second+staleAfter), turn.StaleAt)
		d.requireTokens(t, -30, key)
		d.at(3 * time.Second)
		require.False(t, d.start(t, r.ID, 0).Restarted)
	})
	t.Run("ChangesNothingWhenTooMuchIsOwed", func(t *testing.T) {
		t.Parallel()
		d, key := b.desk(t, config), t.Name()
		r := d.reserve(t, mortgaged.For(key).Cost(20), lookups.For(key).Cost(8))
		require.NoError(t, d.limiter.Cancel(t.Context(), r.ID))
		d.reserve(t, mortgaged.For(key).Cost(15))
		turn := d.renew(t, r.ID, 500*time.Millisecond)
		require.Equal(t, ratelimit.Cancelled, turn.State)
		d.requireTokens(t, 10, lookups.For(key))
		d.at(500 * time.Millisecond)
		require.Equal(t, ratelimit.Open, d.renew(t, r.ID, 2*time.Second).State)
		d.requireTokens(t, 2, lookups.For(key))
	})
	t.Run("MovesTheWindowThatTakesBack", func(t *testing.T) {
		t.Parallel()
		quarterly := ratelimit.Define("quarterly", ratelimit.FixedWindow{Rate: 10, Period: time.Minute, Capacity: 30, Start: clockNoon})
		d, key := b.desk(t, config), quarterly.For(t.Name())
		r := d.reserve(t, key.Cost(28))
		d.at(time.Minute)
		d.renew(t, r.ID, 2*time.Minute) // 12 are there and 16 are owed
		d.at(4*time.Minute - time.Microsecond)
		d.requireTokens(t, 4, key)
		require.NoError(t, d.limiter.Cancel(t.Context(), r.ID))
		d.requireTokens(t, 30, key)
	})
}
