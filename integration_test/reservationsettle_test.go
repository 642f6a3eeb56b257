package integration_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

func TestSettle(t *testing.T) {
	t.Parallel()
	b := setup(t)
	tests := []struct {
		name     string
		estimate float64 // of ten, at noon
		at       time.Duration
		actual   []float64
		want     float64
	}{
		{"WhatWasReservedChangesNothing", 8, 0, []float64{8}, 2},
		{"ASurplusGoesBack", 8, 0, []float64{5}, 5},
		{"WhatCostNothingGoesBackWhole", 8, 0, []float64{0}, 10},
		{"ASurplusPaysWhatIsOwed", 25, 0, []float64{20}, -10},
		{"ASurplusEndsAtTheCapacity", 8, 700 * time.Millisecond, []float64{5}, 10},
		{"ASurplusFindsAFullBucket", 8, time.Hour, []float64{0}, 10},
		{"AnOverageIsTaken", 8, 0, []float64{9.5}, 0.5},
		{"AnOverageIsOwed", 8, 0, []float64{12}, -2},
		{"AnOverageIsTakenFromTheBucketAsItIsNow", 8, 300 * time.Millisecond, []float64{12}, 1},
		{"AnOverageIsTakenFromAFullBucket", 8, time.Hour, []float64{12}, 6},
		{"AnActualCostAboveTheCapacityIsOwed", 8, 0, []float64{1010}, -1000},
		{"WhatIsNotNamedKeepsItsEstimate", 8, 0, nil, 2},
		{"WhatIsNamedTwiceAddsUp", 8, 0, []float64{2, 3}, 5},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			d, key := b.desk(t, ratelimit.Config{}), lookups.For(t.Name())
			r := d.reserve(t, key.Cost(test.estimate))
			d.at(test.at)
			var actual []ratelimit.Request
			for _, cost := range test.actual {
				actual = append(actual, key.Cost(cost))
			}
			require.NoError(t, d.limiter.Settle(t.Context(), r.ID, actual...))
			d.requireTokens(t, test.want, key)
		})
	}
}

func TestSettleOverSeveralLimits(t *testing.T) {
	t.Parallel()
	b := setup(t)

	t.Run("ChangesThoseItNames", func(t *testing.T) {
		t.Parallel()
		d, key := b.desk(t, ratelimit.Config{}), t.Name()
		r := d.reserve(t, words.For(key).Cost(40), lookups.For(key), words.Global().Cost(40), roomy.For(key).Cost(7))
		require.NoError(t, d.limiter.Settle(t.Context(), r.ID, words.Global().Cost(15), roomy.For(key).Cost(1e6+1)))
		d.requireTokens(t, 10, words.For(key))
		d.requireTokens(t, 9, lookups.For(key))
		d.requireTokens(t, 35, words.Global())
		d.requireTokens(t, -1, roomy.For(key))
	})
	t.Run("NamesTheFirstOfSeveralItWasNotReservedFor", func(t *testing.T) {
		t.Parallel()
		d, key := inMemory.setup(t).desk(t, ratelimit.Config{}), t.Name()
		r := d.reserve(t, lookups.For(key).Cost(8))
		for range 20 {
			err := d.limiter.Settle(t.Context(), r.ID, words.For(key), roomy.For(key), lookups.For(key))
			require.ErrorContains(t, err, `it is not for "roomy"`)
		}
	})
	t.Run("RefusesABucketItWasNotReservedFor", func(t *testing.T) {
		t.Parallel()
		d, key := b.desk(t, ratelimit.Config{}), t.Name()
		r := d.reserve(t, lookups.For(key).Cost(8))
		for _, level := range levels {
			tx := d.begin(t, level.level)
			for _, stranger := range []ratelimit.Request{lookups.For(key + "'s neighbour"), lookups.Global(), words.For(key)} {
				err := d.limiter.WithTx(tx).Settle(t.Context(), r.ID, lookups.For(key).Cost(1), stranger)
				require.ErrorIs(t, err, ratelimit.ErrInvalidRequest)
			}
			require.NoError(t, tx.Commit(t.Context()))
		}
		d.requireTokens(t, 2, lookups.For(key))
		require.NoError(t, d.limiter.Settle(t.Context(), r.ID, lookups.For(key).Cost(1)), "it is still open")
		d.requireTokens(t, 9, lookups.For(key))
	})
	t.Run("KnowsHashedKeys", func(t *testing.T) {
		t.Parallel()
		d := setup(t).desk(t, ratelimit.Config{HashKey: []byte("a secret of some length")})
		key := lookups.For(t.Name() + "\x00")
		r := d.reserve(t, key.Cost(8))
		require.NoError(t, d.limiter.Settle(t.Context(), r.ID, key.Cost(1)))
		d.requireTokens(t, 9, key)
	})
	t.Run("GoesByTheTermsTheLimitHasNow", func(t *testing.T) {
		t.Parallel()
		d, key := b.desk(t, ratelimit.Config{}), lookups.For(t.Name())
		widened := ratelimit.Define("lookups", ratelimit.TokenBucket{Rate: 10, Period: time.Second, Capacity: 100}).For(t.Name())
		settled, cancelled := d.reserve(t, key.Cost(4)), d.reserve(t, key.Cost(4))
		d.at(700 * time.Millisecond)
		require.NoError(t, d.limiter.Settle(t.Context(), settled.ID, widened.Cost(3)))
		d.requireTokens(t, 10, widened)
		require.NoError(t, d.limiter.Cancel(t.Context(), cancelled.ID))
		d.requireTokens(t, 14, widened)
		narrowed := ratelimit.Define("lookups", ratelimit.TokenBucket{Rate: 10, Period: time.Second, Capacity: 5}).For(t.Name())
		settled = d.reserve(t, widened.Cost(4))
		require.NoError(t, d.limiter.Settle(t.Context(), settled.ID, narrowed.Cost(6)))
		d.requireTokens(t, 3, narrowed)
		err := d.limiter.Settle(t.Context(), settled.ID, narrowed.Cost(6), widened.Cost(6))
		require.ErrorIs(t, err, ratelimit.ErrInvalidRequest, "one bucket under two policies")
	})
}

func TestCancel(t *testing.T) {
	t.Parallel()
	b := setup(t)

	t.Run("GivesBackAllItTook", func(t *testing.T) {
		t.Parallel()
		d, key := b.desk(t, ratelimit.Config{}), t.Name()
		r := d.reserve(t, lookups.For(key).Cost(25), words.For(key).Cost(7), roomy.For(key))
		require.NoError(t, d.limiter.Cancel(t.Context(), r.ID))
		d.requireTokens(t, 10, lookups.For(key))
		d.requireTokens(t, 50, words.For(key))
		d.requireTokens(t, 1e6, roomy.For(key))
	})
	t.Run("NeverLiftsABucketAboveItsCapacity", func(t *testing.T) {
		t.Parallel()
		d, key := b.desk(t, ratelimit.Config{}), lookups.For(t.Name())
		r := d.reserve(t, key.Cost(8))
		d.at(500 * time.Millisecond)
		require.NoError(t, d.limiter.Cancel(t.Context(), r.ID))
		d.requireTokens(t, 10, key)
		require.LessOrEqual(t, d.row(t, "lookups", t.Name()).Value, 10.0)
	})
	t.Run("IsThereForWhoeverAsksNext", func(t *testing.T) {
		t.Parallel()
		d, key := b.desk(t, ratelimit.Config{}), lookups.For(t.Name())
		first := d.reserve(t, key.Cost(20))
		second := d.reserve(t, key.Cost(10))
		require.NoError(t, d.limiter.Cancel(t.Context(), first.ID))
		d.requireTokens(t, 0, key)
		require.Equal(t, 500*time.Millisecond, d.reserve(t, key.Cost(5)).Delay())
		d.at(500 * time.Millisecond)
		slot, err := d.limiter.Start(t.Context(), second.ID)
		require.NoError(t, err)
		require.Equal(t, 1500*time.Millisecond, slot.Wait, "those that wait do not move forward")
	})
}

func TestCredit(t *testing.T) {
	t.Parallel()
	b := setup(t)

	t.Run("EndsAtTheCapacity", func(t *testing.T) {
		t.Parallel()
		d, key := b.desk(t, ratelimit.Config{}), lookups.For(t.Name())
		takeAll(t, d.limiter, key)
		for _, want := range []float64{4, 8, 10, 10} {
			require.NoError(t, d.limiter.Credit(t.Context(), key.Cost(4)))
			d.requireTokens(t, want, key)
		}
		require.LessOrEqual(t, d.row(t, "lookups", t.Name()).Value, 10.0)
	})
	t.Run("LeavesABucketFullThatHasNoRow", func(t *testing.T) {
		t.Parallel()
		d, key := b.desk(t, ratelimit.Config{}), lookups.For(t.Name())
		require.NoError(t, d.limiter.Credit(t.Context(), key.Cost(10)))
		d.requireTokens(t, 10, key)
		slowest := ratelimit.Define("lookups", ratelimit.TokenBucket{Rate: 1000, Period: century, Capacity: 1000}).For(t.Name())
		d.requireTokens(t, 1000, slowest)
		require.Greater(t, d.row(t, "lookups", t.Name()).TS, int64(-1<<53), "pages have it exactly")
	})
	t.Run("PaysWhatIsOwedUnderEachLimit", func(t *testing.T) {
		t.Parallel()
		d, key := b.desk(t, ratelimit.Config{}), t.Name()
		d.reserve(t, lookups.For(key).Cost(30), words.For(key).Cost(60))
		require.NoError(t, d.limiter.Credit(t.Context(), words.For(key).Cost(3), lookups.For(key), words.For(key).Cost(4)))
		d.requireTokens(t, -19, lookups.For(key))
		d.requireTokens(t, -3, words.For(key))
	})
	t.Run("CountsWhatArrivedBefore", func(t *testing.T) {
		t.Parallel()
		d, key := b.desk(t, ratelimit.Config{}), lookups.For(t.Name())
		takeAll(t, d.limiter, key)
		d.at(300 * time.Millisecond)
		require.NoError(t, d.limiter.Credit(t.Context(), key.Cost(2)))
		d.requireTokens(t, 5, key)
	})
}

// What a fixed window gave is over with the window.
func TestCreditEndsWithTheWindow(t *testing.T) {
	t.Parallel()
	window := ratelimit.Define("credited", ratelimit.FixedWindow{Rate: 10, Period: time.Minute, Start: clockNoon})
	d := setup(t).desk(t, ratelimit.Config{})
	both := []ratelimit.Request{window.For("key").Cost(4), lookups.For("key").Cost(4)}
	for _, test := range []struct {
		after   time.Duration
		windows float64
	}{{59 * time.Second, 6 + 3}, {61 * time.Second, 10 - 1}} {
		t.Run(test.after.String(), func(t *testing.T) { // not parallel: they share the clock
			d.at(0)
			require.NoError(t, d.limiter.Reset(t.Context(), both...))
			taken, err := d.limiter.Take(t.Context(), both...)
			require.NoError(t, err)
			d.at(test.after)
			_, err = d.limiter.Take(t.Context(), window.For("key"))
			require.NoError(t, err)
			require.NoError(t, d.limiter.CreditTaken(t.Context(), taken.At, both...))
			d.requireTokens(t, test.windows, window.For("key"))
			d.requireTokens(t, 10, lookups.For("key"))
		})
	}
}

func TestCharge(t *testing.T) {
	t.Parallel()
	b := setup(t)

	t.Run("TakesWhatIsThereAndThenOwes", func(t *testing.T) {
		t.Parallel()
		d, key := b.desk(t, ratelimit.Config{}), lookups.For(t.Name())
		for _, want := range []float64{6, 2, -2} {
			require.NoError(t, d.limiter.Charge(t.Context(), key.Cost(4)))
			d.requireTokens(t, want, key)
		}
		require.NoError(t, d.limiter.Charge(t.Context(), key.Cost(25)), "even more than the capacity")
		d.requireTokens(t, -27, key)
		refused, err := d.limiter.Take(t.Context(), key)
		require.NoError(t, err)
		require.Equal(t, 2800*time.Millisecond, refused.RetryAfter)
	})
	t.Run("EachLimitItsOwnCost", func(t *testing.T) {
		t.Parallel()
		d, key := b.desk(t, ratelimit.Config{}), t.Name()
		require.NoError(t, d.limiter.Charge(t.Context(), words.For(key).Cost(3), lookups.For(key), words.For(key).Cost(4)))
		d.requireTokens(t, 9, lookups.For(key))
		capacity := words.Capacity()
		d.requireTokens(t, capacity-7, words.For(key))
	})
	t.Run("IsUndoneWithTheTransaction", func(t *testing.T) {
		t.Parallel()
		d, key := b.desk(t, ratelimit.Config{}), lookups.For(t.Name())
		tx := d.begin(t, pgx.Serializable)
		require.NoError(t, d.limiter.WithTx(tx).Charge(t.Context(), key.Cost(4)))
		require.NoError(t, tx.Rollback(t.Context()))
		d.requireTokens(t, 10, key)
	})
}

// Tokens belong to the window in which the work was ready.
func TestFixedWindowTakesBackOnlyIntoItsOwnWindow(t *testing.T) {
	t.Parallel()
	b := setup(t)
	hourly := ratelimit.Define("hourly", ratelimit.FixedWindow{Rate: 10, Period: time.Hour, Capacity: 30, Start: clockNoon})
	const last = time.Hour - time.Microsecond
	settling := func(cost float64) func(*testing.T, *desk, ratelimit.Request, string) {
		return func(t *testing.T, d *desk, key ratelimit.Request, id string) {
			t.Helper()
			require.NoError(t, d.limiter.Settle(t.Context(), id, key.Cost(cost)))
		}
	}
	cancelling := func(t *testing.T, d *desk, _ ratelimit.Request, id string) {
		t.Helper()
		require.NoError(t, d.limiter.Cancel(t.Context(), id))
	}
	tests := []struct {
		name  string
		taken float64 // of thirty
		cost  float64
		ready time.Duration
		at    time.Duration
		end   func(*testing.T, *desk, ratelimit.Request, string)
		want  float64
	}{
		{"ASurplusInTheWindow", 0, 28, 0, 30 * time.Minute, settling(20), 10},
		{"ASurplusAtItsLastMicrosecond", 0, 28, 0, last, settling(20), 10},
		{"ASurplusInTheNextIsGone", 0, 28, 0, time.Hour, settling(20), 12},
		{"ASurplusTwoLaterIsGone", 0, 28, 0, 2 * time.Hour, settling(20), 22},
		{"ACancelInTheWindow", 0, 28, 0, last, cancelling, 30},
		{"ACancelInTheNextIsGone", 0, 28, 0, time.Hour, cancelling, 12},
		{"ACancelBeforeItsWindow", 30, 5, time.Hour, last, cancelling, 0},
		{"ACancelInTheWindowItWaitedFor", 30, 5, time.Hour, 2*time.Hour - time.Microsecond, cancelling, 10},
		{"ACancelAfterTheWindowItWaitedFor", 30, 5, time.Hour, 2 * time.Hour, cancelling, 15},
		{"ASurplusOfAThirdWindow", 30, 15, 2 * time.Hour, 2 * time.Hour, settling(1), 19},
		{"AnOverageInTheWindow", 0, 28, 0, last, settling(35), -5},
		{"AnOverageInTheNextIsChargedThere", 0, 28, 0, time.Hour, settling(35), 5},
		{"AnOverageIsNeverClampedAway", 0, 28, 0, time.Hour, settling(128), -88},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			d, key := b.desk(t, ratelimit.Config{}), hourly.For(t.Name())
			requireAllowed(t, taking(key.Cost(test.taken)), d.limiter)
			r := d.reserve(t, key.Cost(test.cost))
			require.Equal(t, test.ready, r.Delay())
			d.at(test.at)
			test.end(t, d, key, r.ID)
			d.requireTokens(t, test.want, key)
		})
	}
	t.Run("BesideABucketThatTakesBackAnyTime", func(t *testing.T) {
		t.Parallel()
		d, key := b.desk(t, ratelimit.Config{}), t.Name()
		r := d.reserve(t, hourly.For(key).Cost(28), roomy.For(key).Cost(28))
		d.at(time.Hour)
		require.NoError(t, d.limiter.Cancel(t.Context(), r.ID))
		d.requireTokens(t, 12, hourly.For(key))
		d.requireTokens(t, 1e6, roomy.For(key))
	})
	t.Run("WhereverTheKeyPutsTheWindow", func(t *testing.T) {
		t.Parallel()
		d, key := b.desk(t, ratelimit.Config{}), ratelimit.Define("spread", ratelimit.FixedWindow{Rate: 10, Period: time.Hour, Capacity: 30}).For(t.Name())
		first, second := d.reserve(t, key.Cost(15)), d.reserve(t, key.Cost(15))
		next := d.reserve(t, key.Cost(1)).Delay()
		d.at(next - time.Microsecond)
		require.NoError(t, d.limiter.Cancel(t.Context(), first.ID))
		d.requireTokens(t, 14, key)
		d.at(next)
		require.NoError(t, d.limiter.Cancel(t.Context(), second.ID))
		d.requireTokens(t, 24, key)
	})
}
