package integration_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

func TestAShadowRefusesNobodyAndTakesNothingWhenItIsShort(t *testing.T) {
	t.Parallel()
	tried, enforced := ratelimit.Define("tried", ratelimit.PerDay(2)), ratelimit.Define("enforced", ratelimit.PerDay(5))
	shadowed := func(t *testing.T) *ruled {
		t.Helper()
		r := setupRuled(t, ratelimit.Config{RefusalCache: 100})
		r.rule(t, tried, "", ratelimit.Era{Mode: ratelimit.Shadow})
		return r
	}
	t.Run("alone", func(t *testing.T) {
		t.Parallel()
		r := shadowed(t)
		for i := range 4 {
			d := r.takes(t, tried.For("ada"))
			require.True(t, d.Allowed)
			require.Zero(t, d.RetryAfter)
			require.NoError(t, d.Err())
			require.Equal(t, i < 2, d.States[0].Allowed, "what would be decided is told")
			require.Equal(t, ratelimit.Shadow, d.States[0].Mode)
		}
		require.InDelta(t, 0, r.holds(t, tried.For("ada")), 0)
	})
	t.Run("beside a limit that is enforced", func(t *testing.T) {
		t.Parallel()
		r := shadowed(t)
		for i := range 7 {
			d := r.takes(t, tried.For("ada"), enforced.For("ada"))
			require.Equal(t, i < 5, d.Allowed)
		}
		require.InDelta(t, 0, r.holds(t, enforced.For("ada")), 0)
	})
	t.Run("in a transaction", func(t *testing.T) {
		t.Parallel()
		r := shadowed(t)
		require.NoError(t, r.InTx(t.Context(), func(tx pgx.Tx) error {
			for range 3 {
				d, err := r.WithTx(tx).Take(t.Context(), tried.For("ada"), enforced.For("ada"))
				require.NoError(t, err)
				require.True(t, d.Allowed)
			}
			return nil
		}))
		require.InDelta(t, 2, r.holds(t, enforced.For("ada")), 0)
	})
	t.Run("a cost that it could never give", func(t *testing.T) {
		t.Parallel()
		r := shadowed(t)
		d := r.takes(t, tried.For("ada").Cost(3), enforced.For("ada").Cost(3))
		require.True(t, d.Allowed)
		require.False(t, d.States[0].Allowed)
		require.InDelta(t, 2, r.holds(t, enforced.For("ada")), 0)
	})
	t.Run("a reservation", func(t *testing.T) {
		t.Parallel()
		r := shadowed(t)
		r.rule(t, tried, "", ratelimit.Era{Mode: ratelimit.Shadow, Policy: ratelimit.TokenBucket{Rate: 2, Period: ratelimit.Day, MaxReserved: 1}})
		for range 4 {
			reserved, err := r.Reserve(t.Context(), tried.For("ada"), enforced.For("ada"))
			require.NoError(t, err)
			require.True(t, reserved.Allowed)
			require.Zero(t, reserved.Delay(), "no work waits for a limit that is not enforced")
			require.NoError(t, r.Settle(t.Context(), reserved.ID, tried.For("ada").Cost(1)))
		}
		require.InDelta(t, 1, r.holds(t, enforced.For("ada")), 0)
	})
	t.Run("no limit at all refuses", func(t *testing.T) {
		t.Parallel()
		r := shadowed(t)
		r.rule(t, enforced, "", ratelimit.Era{Mode: ratelimit.Shadow})
		for range 7 {
			require.True(t, r.takes(t, tried.For("ada"), enforced.For("ada")).Allowed)
		}
		require.InDelta(t, 0, r.holds(t, enforced.For("ada")), 0)
	})
}

func TestALimitThatIsOffIsAllowedAndUncharged(t *testing.T) {
	t.Parallel()
	off, enforced := ratelimit.Define("off", ratelimit.PerDay(2)), ratelimit.Define("enforced", ratelimit.PerDay(5))
	r := setupRuled(t, ratelimit.Config{})
	r.rule(t, off, "", ratelimit.Era{Mode: ratelimit.Off})
	key := off.For("ada")
	for range 5 {
		d := r.takes(t, key, enforced.For("ada"))
		require.True(t, d.Allowed)
		require.Equal(t, ratelimit.Off, d.States[0].Mode)
		require.True(t, d.States[0].NotAsked)
	}
	require.False(t, r.takes(t, key, enforced.For("ada")).Allowed, "the other limit is in use")
	d := r.takes(t, key)
	require.True(t, d.Allowed)
	require.Equal(t, clockNoon, d.At.UTC())
	require.NoError(t, r.Charge(t.Context(), key))
	require.InDelta(t, 2, r.holds(t, key), 0)
	require.NoError(t, r.Reset(t.Context(), enforced.For("ada")))

	reserved, err := r.Reserve(t.Context(), key, enforced.For("ada"))
	require.NoError(t, err)
	require.NoError(t, r.Settle(t.Context(), reserved.ID, key.Cost(2), enforced.For("ada").Cost(2)))
	require.InDelta(t, 2, r.holds(t, key), 0)
	require.InDelta(t, 3, r.holds(t, enforced.For("ada")), 0)
}

func TestAPauseLetsNothingThroughUntilItEnds(t *testing.T) {
	t.Parallel()
	limit, other := ratelimit.Define("upstream", ratelimit.PerDay(10)), ratelimit.Define("other", ratelimit.PerDay(10))
	r := setupRuled(t, ratelimit.Config{RefusalCache: 100})
	r.pausedRule(t, limit, "", time.Hour)
	key := limit.For("ada")

	d := r.takes(t, key, other.For("ada"))
	require.False(t, d.Allowed)
	require.Equal(t, time.Hour, d.RetryAfter)
	require.Equal(t, clockNoon.Add(time.Hour).UTC(), d.States[0].PausedUntil.UTC())
	require.Equal(t, "the provider is down", d.States[0].PauseReason)
	require.True(t, d.States[1].Allowed)
	require.True(t, d.States[1].NotAsked)
	require.ErrorContains(t, d.Err(), "upstream")
	require.InDelta(t, 10, r.holds(t, other.For("ada")), 0)
	checked, err := r.Check(t.Context(), key)
	require.NoError(t, err)
	require.False(t, checked.Allowed)
	require.NoError(t, r.Reset(t.Context(), key))
	require.False(t, r.takes(t, key).Allowed, "a reset does not end it")

	reserved, err := r.Reserve(t.Context(), key)
	require.NoError(t, err)
	require.Equal(t, time.Hour, reserved.Delay())
	r.at(30 * time.Minute)
	slot, err := r.Start(t.Context(), reserved.ID)
	require.NoError(t, err)
	require.Equal(t, 30*time.Minute, slot.Wait)

	r.at(time.Hour)
	slot, err = r.Start(t.Context(), reserved.ID)
	require.NoError(t, err)
	require.Zero(t, slot.Wait)
	require.True(t, r.takes(t, key).Allowed)
	r.pausedRule(t, limit, "", 3*time.Hour)
	slot, err = r.Start(t.Context(), reserved.ID)
	require.NoError(t, err)
	require.Equal(t, 2*time.Hour, slot.Wait, "work that was reserved before waits, too, and at its next attempt")
	require.True(t, slot.Restarted)
}
