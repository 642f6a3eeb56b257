package integration_test

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// TakeUpTo reports the cost of the units taken, for one limit and for several.
func TestTakeUpToTellsWhatItCost(t *testing.T) {
	t.Parallel()
	d := setup(t).desk(t, ratelimit.Config{})
	for _, limit := range mixLimits("Europe/Berlin")[:mixHeld] {
		for _, c := range callers() {
			key := t.Name() + c.name
			taken, answer, err := c.takesUpTo(t.Context(), d.db(), d.limiter, 5, limit.For(key).Cost(1.5))
			require.NoError(t, err)
			want := min(5, int(limit.Capacity()/1.5))
			require.Equal(t, want, taken)
			require.InDelta(t, 1.5*float64(want), answer.States[0].Cost, 0)
			d.requireTokens(t, limit.Capacity()-1.5*float64(want), limit.For(key))
			if want == 5 {
				continue
			}
			taken, answer, err = c.takesUpTo(t.Context(), d.db(), d.limiter, 5, limit.For(key).Cost(1.5))
			require.NoError(t, err)
			require.Zero(t, taken)
			require.InDelta(t, 1.5, answer.States[0].Cost, 0)
			require.Positive(t, answer.RetryAfter)
		}
	}
}

// If the clock goes on by many windows during a call, it takes its whole cost.
func TestTakeUpToWhileTheClockGoesManyWindowsOn(t *testing.T) {
	t.Parallel()
	b := setup(t)
	limit := ratelimit.Define("daily", ratelimit.CalendarWindow{Rate: 10, Resets: ratelimit.Daily, Zone: "America/Santiago"})
	for _, c := range callers() {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			for reads := range int64(6) {
				var n atomic.Int64
				l := b.with(t, ratelimit.Config{NoBatching: true, AsOf: func() time.Time {
					if n.Add(1) <= reads+4 {
						return clockNoon
					}
					return clockNoon.AddDate(30, 0, 0)
				}})
				key := fmt.Sprint(t.Name(), reads)
				for left := 8; left > 0; left -= 4 { // today, or thirty years later
					taken, d, err := c.takesUpTo(t.Context(), b.db(), l, 4, limit.For(key), roomy.For(key).Cost(2))
					require.NoError(t, err)
					require.True(t, d.Allowed)
					require.Equal(t, 4, taken)
					require.InDelta(t, 8, d.States[1].Cost, 0)
					require.Contains(t, []float64{6, 2}, d.States[0].Remaining)
				}
			}
		})
	}
}

// A credit returns tokens to their window also if that is many windows ahead of another process's clock.
func TestCreditManyWindowsOn(t *testing.T) {
	t.Parallel()
	b := setup(t)
	limit, tries, later := ratelimit.Define("daily", ratelimit.CalendarWindow{Rate: 10, Resets: ratelimit.Daily, Zone: "America/Santiago"}), 0, 0
	for hour := 0; hour < 24; hour += testsize.Of(12, 1) {
		for reads := range int64(4) {
			tries++
			taken, request := &clock{}, limit.For(fmt.Sprint(hour, reads))
			taken.set(time.Date(2056, 7, 9, 12+hour, 0, 0, 0, time.UTC))
			other := b.with(t, ratelimit.Config{AsOf: taken.now})
			d, err := other.Take(t.Context(), request.Cost(4))
			require.NoError(t, err)
			var n atomic.Int64
			l := b.with(t, ratelimit.Config{AsOf: func() time.Time {
				if n.Add(1) <= reads {
					return clockNoon
				}
				return taken.now()
			}})
			require.NoError(t, l.CreditTaken(t.Context(), d.At, request.Cost(3)))
			if b.row(t, "daily", fmt.Sprint(hour, reads)).TS < clockNoon.AddDate(1, 0, 0).UnixMicro() {
				continue // the clock went on after the statement
			}
			later++
			v, err := other.Value(t.Context(), request)
			require.NoError(t, err)
			require.InDelta(t, 9, v.Tokens, 0, "hour %d, reads %d", hour, reads)
		}
	}
	require.Greater(t, 5*later, 2*tries)
}

// TakeUpTo takes the units that the tokens can pay at the price, from a full bucket and from one with half its tokens.
func TestTakeUpToAtAPrice(t *testing.T) {
	t.Parallel()
	m := newMarket(t)
	for name, test := range map[string]struct {
		contract   ratelimit.Policy
		full, half int // units taken when it is full, and when 50 of 100 are left
	}{
		"TokenBucket":    {hoard(100), 8, 4},
		"FixedWindow":    {ratelimit.FixedWindow{Rate: 100, Period: ratelimit.Day, Start: clockNoon}, 8, 4},
		"CalendarWindow": {ratelimit.CalendarWindow{Rate: 100, Resets: ratelimit.Daily, Zone: "UTC"}, 8, 4},
	} {
		t.Run(name, func(t *testing.T) {
			upstream := ratelimit.Define("at-a-price-"+name, ratelimit.Adaptive{Contract: test.contract, Apply: true})
			for _, c := range callers() {
				request := upstream.For(t.Name() + c.name).Cost(3).Price(4)
				upTo := func(n int) (int, ratelimit.Decision) {
					taken, d, err := c.takesUpTo(t.Context(), m.db(), m.limiter, n, request)
					require.NoError(t, err)
					return taken, d
				}
				require.NoError(t, m.limiter.Reset(t.Context(), request))
				taken, d := upTo(8) // 96 of 100
				require.Equal(t, 8, taken)
				require.InDelta(t, 24, d.States[0].Cost, 0)
				require.InDelta(t, 4, d.States[0].Price, 0)
				m.holds(t, request, 4)
				taken, d = upTo(8)
				require.Zero(t, taken)
				require.InDelta(t, 3, d.States[0].Cost, 0)

				require.NoError(t, m.limiter.Reset(t.Context(), request))
				require.NoError(t, m.limiter.Charge(t.Context(), request.Price(1).Cost(50)))
				taken, _ = upTo(100)
				require.Equal(t, test.half, taken)
				m.holds(t, request, 2)

				require.NoError(t, m.limiter.Reset(t.Context(), request))
				taken, d = upTo(100)
				require.Equal(t, test.full, taken, "what is there, at its price")
				require.InDelta(t, 3*float64(taken), d.States[0].Cost, 0)
				m.holds(t, request, 4)
			}
		})
	}
}

// What a verb does not do for a kind is an error before any SQL, which says what to do; the transaction goes on.
func TestVerbsThatMeanNothingForAKind(t *testing.T) {
	t.Parallel()
	b, w := setupCounted(t)
	limits := mixLimits("UTC")
	tokens, slides, calendar, slots := limits[mixTokens].For("k"), limits[mixSlides].For("k"), limits[mixCalendar].For("k"), limits[mixHeld].For("k")
	adapts := adaptive("adapts").For("k")
	tx := b.begin(t, pgx.Serializable)
	_, err := b.limiter.WithTx(tx).Take(t.Context(), tokens, calendar, adapts)
	require.NoError(t, err)
	for name, test := range map[string]struct {
		call func(l *ratelimit.Limiter) error
		want error
		says string
	}{
		"LookAtSlots": {func(l *ratelimit.Limiter) error { _, err := l.CheckReserve(t.Context(), slots); return err }, ratelimit.ErrInvalidRequest, "call Acquire"},
		"BorrowSlots": {func(l *ratelimit.Limiter) error {
			_, err := l.Take(t.Context(), ratelimit.Borrow(slots, tokens))
			return err
		}, ratelimit.ErrInvalidRequest, ""},
		"BorrowSliding": {func(l *ratelimit.Limiter) error {
			_, err := l.Take(t.Context(), ratelimit.Borrow(slides, tokens))
			return err
		}, ratelimit.ErrInvalidRequest, "use token buckets"},
		"BorrowOfSliding": {func(l *ratelimit.Limiter) error {
			_, err := l.Take(t.Context(), ratelimit.Borrow(tokens, slides))
			return err
		}, ratelimit.ErrInvalidRequest, "use token buckets"},
		"BorrowAdaptive": {func(l *ratelimit.Limiter) error {
			_, err := l.Take(t.Context(), ratelimit.Borrow(adapts, tokens))
			return err
		}, ratelimit.ErrInvalidRequest, "use token buckets"},
		"AcquireBorrow": {func(l *ratelimit.Limiter) error {
			_, err := l.Acquire(t.Context(), slots, ratelimit.Borrow(tokens, calendar))
			return err
		}, ratelimit.ErrInvalidRequest, "Borrow"},
		"AcquireTokens": {func(l *ratelimit.Limiter) error {
			_, err := l.Acquire(t.Context(), slides, calendar, adapts)
			return err
		}, ratelimit.ErrInvalidRequest, "call Take"},
		"ReserveSliding": {func(l *ratelimit.Limiter) error { _, err := l.Reserve(t.Context(), calendar, slides); return err }, ratelimit.ErrNoReservations, "mixed-slides"},
		"LookAtSliding":  {func(l *ratelimit.Limiter) error { _, err := l.CheckReserve(t.Context(), adapts, slides); return err }, ratelimit.ErrNoReservations, "mixed-slides"},
		"UpToSlots":      {func(l *ratelimit.Limiter) error { _, _, err := l.TakeUpTo(t.Context(), 2, slides, slots); return err }, ratelimit.ErrInvalidRequest, "call Acquire"},
		"ReportTokens":   {func(l *ratelimit.Limiter) error { return l.Report(t.Context(), slides, ratelimit.Outcome{}) }, ratelimit.ErrInvalidRequest, "Adaptive"},
	} {
		t.Run(name, func(t *testing.T) { // not parallel: they share the connection
			require.Zero(t, w.count(func() {
				for _, l := range []*ratelimit.Limiter{b.limiter.WithTx(tx), b.limiter} {
					err := test.call(l)
					require.ErrorIs(t, err, test.want)
					require.ErrorContains(t, err, test.says)
				}
			}))
		})
	}
	for name, request := range map[string]ratelimit.Request{"Slots": slots, "Sliding": slides} {
		_, err := b.limiter.Wait(t.Context(), request)
		require.Error(t, err, name)
	}
	_, err = b.limiter.WithTx(tx).Take(t.Context(), tokens)
	require.NoError(t, err)
	require.NoError(t, tx.Commit(t.Context()))
}
