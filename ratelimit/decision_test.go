package ratelimit_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

// Require is nil only if it has taken, outside a transaction and in one. A refusal is a LimitedError.
func TestRequireIsNilOnlyIfItTook(t *testing.T) {
	t.Parallel()
	tried := ratelimit.Define("tried", ratelimit.PerMinute(1)) // in shadow
	sends, all := ratelimit.Define("sends", ratelimit.PerMinute(2)), ratelimit.Define("all", ratelimit.PerHour(100))
	limiter := newLimiter(t, ratelimittest.NewDB(), ratelimit.Config{Policies: ratelimit.ShadowLimits(tried)})
	send := func(l *ratelimit.Limiter) error {
		return l.Require(t.Context(), sends.For("ada"), all.Global(), tried.For("ada"))
	}
	sendInTx := func() error {
		return limiter.InTx(t.Context(), func(tx pgx.Tx) error { return send(limiter.WithTx(tx)) })
	}
	require.NoError(t, send(limiter))
	require.NoError(t, sendInTx(), "only the limit in shadow refuses")
	require.Zero(t, held(t, limiter, sends.For("ada")))
	for _, err := range []error{send(limiter), sendInTx()} {
		require.EqualError(t, err, "ratelimit: limited by sends: retry after 30s")
		var limited *ratelimit.LimitedError
		require.ErrorAs(t, fmt.Errorf("send: %w", err), &limited)
		require.Equal(t, 30*time.Second, limited.Decision.RetryAfter)
		require.Len(t, limited.Decision.States, 3)
		require.ErrorIs(t, err, ratelimit.ErrLimited)
		require.False(t, ratelimit.IsUndecided(err))
	}
	require.Equal(t, 98.0, held(t, limiter, all.Global()), "a refused call takes nothing")
	err := limiter.Require(t.Context(), sends.For("ada"), all.Global().Cost(99))
	require.EqualError(t, err, "ratelimit: limited by sends, all: retry after 36s")
}

// A call without a decision returns an error that is undecided, and no refusal. Errors of the caller's own code, and
// errors that belong to a decision, are not undecided.
func TestIsUndecided(t *testing.T) {
	t.Parallel()
	db := ratelimittest.NewDB()
	limiter, unreached := newLimiter(t, db, ratelimit.Config{}), newLimiter(t, unreachable{}, ratelimit.Config{})
	ada := ratelimit.Define("sends", ratelimit.PerMinute(2)).For("ada")
	tx, err := db.Begin(t.Context())
	require.NoError(t, err)
	require.NoError(t, tx.Rollback(t.Context()))
	ended := limiter.WithTx(tx).Require(t.Context(), ada)
	require.ErrorIs(t, ended, pgx.ErrTxClosed)
	require.ErrorContains(t, ended, "the transaction of WithTx has ended: call the Limiter before")
	for name, err := range map[string]error{
		"NoLimiter": (*ratelimit.Limiter)(nil).Require(t.Context(), ada),
		"NoRequest": limiter.Require(t.Context()),
		"NoKey":     limiter.Require(t.Context(), ada.Limit().For("")),
		"TooMuch":   limiter.Require(t.Context(), ada.Cost(3)),
		"NoServer":  unreached.Require(t.Context(), ada),
		"InTx":      unreached.InTx(t.Context(), func(pgx.Tx) error { return nil }),
		"Ended":     ended,
		"Contended": fmt.Errorf("%w: gave up", ratelimit.ErrContended),
	} {
		require.Error(t, err, name)
		require.NotErrorIs(t, err, ratelimit.ErrLimited, name)
		require.True(t, ratelimit.IsUndecided(fmt.Errorf("send: %w", err)), "%s: %v", name, err)
	}
	gone, leave := context.WithCancel(t.Context())
	leave()
	gaveUp := limiter.Require(gone, ada)
	require.ErrorIs(t, gaveUp, context.Canceled)
	_, unknown := limiter.Start(t.Context(), someID)
	require.ErrorIs(t, unknown, ratelimit.ErrNotReserved)
	own := errors.New("the recipient does not exist")
	for _, err := range []error{
		nil, own, limiter.InTx(t.Context(), func(pgx.Tx) error { return own }), gaveUp, context.Canceled, unknown, ratelimit.ErrCommitUnknown,
		ratelimit.ErrLeaseLost, ratelimit.Decision{}.Err(), fmt.Errorf("ratelimit: by chance: %w", own),
		errors.Join(ratelimit.ErrContended, ratelimit.Decision{}.Err()), errors.Join(ratelimit.ErrContended, ratelimit.ErrCommitUnknown),
	} {
		require.False(t, ratelimit.IsUndecided(err), "%v", err)
	}
	require.Equal(t, 2.0, held(t, limiter, ada))
}

// A decision over several limits has the fewest tokens and the longest wait of them, and the state of each request in
// the order asked. Two requests for one bucket add up.
func TestDecision(t *testing.T) {
	t.Parallel()
	minute, day := ratelimit.Define("minute", ratelimit.PerMinute(10)), ratelimit.Define("day", ratelimit.PerDay(100))
	for name, c := range map[string]struct {
		minute, day float64         // the tokens before the call
		remaining   []float64       // of the states
		resets      time.Duration   // until both buckets are full
		waits       []time.Duration // of the states; nil: it is allowed
	}{
		"AllAllow":         {10, 5.5, []float64{7, 2.5, 7}, ratelimit.Day * 975 / 1000, nil},
		"AllRefuse":        {1, -1, []float64{1, 0, 1}, ratelimit.Day * 101 / 100, []time.Duration{12 * second, ratelimit.Day * 4 / 100, 12 * second}},
		"OneRefuses":       {1, 50, []float64{1, 50, 1}, ratelimit.Day / 2, []time.Duration{12 * second, 0, 12 * second}},
		"OnlyTheSumIsMore": {2.5, 50, []float64{2.5, 50, 2.5}, ratelimit.Day / 2, []time.Duration{3 * second, 0, 3 * second}},
	} {
		limiter := newLimiter(t, ratelimittest.NewDB(), ratelimit.Config{})
		_, err := limiter.Reserve(t.Context(), minute.For("ada").Cost(10-c.minute), day.For("ada").Cost(100-c.day))
		require.NoError(t, err)
		d, err := limiter.Take(t.Context(), minute.For("ada").Cost(2), day.For("ada").Cost(3), minute.For("ada").Cost(1))
		require.NoError(t, err)
		require.True(t, d.At.Equal(at))
		require.Equal(t, c.waits == nil, d.Allowed, name)
		require.Len(t, d.States, 3)
		least, longest := math.Inf(1), time.Duration(0)
		for i, limit := range []ratelimit.Limit{minute, day, minute} {
			s := &d.States[i]
			require.Equal(t, limit, s.Limit)
			require.Equal(t, []float64{2, 3, 1}[i], s.Cost)
			require.Equal(t, c.remaining[i], s.Remaining, name)
			if c.waits != nil {
				require.Equal(t, c.waits[i], s.RetryAfter, name)
				require.Equal(t, c.waits[i] == 0, s.Allowed, name)
				longest = max(longest, c.waits[i])
			}
			least = min(least, s.Remaining)
		}
		require.Equal(t, []any{least, longest, c.resets}, []any{d.Remaining, d.RetryAfter, d.ResetAfter}, name)
		require.Equal(t, d.Allowed, d.Err() == nil)
		state, is := d.State(minute)
		require.Equal(t, []any{true, d.States[0]}, []any{is, state})
		_, is = d.State(ratelimit.Define("other", ratelimit.PerMinute(10)))
		require.False(t, is)
		text, err := json.Marshal(d)
		require.NoError(t, err)
		require.Contains(t, string(text), `"Limit":{"name":"day","policy":"100 per day"}`)
	}
}

// A Value says what the bucket holds at any instant, and when it can give a cost.
func TestValue(t *testing.T) {
	t.Parallel()
	clock, request := ratelimittest.NewClock(), ratelimit.Define("projected", tokens{Rate: 10, Period: time.Minute, Capacity: 20}).For("a")
	clock.Set(at.Add(-6 * time.Second))
	limiter := ratelimittest.New(t, clock)
	_, err := limiter.Reserve(t.Context(), request.Cost(25))
	require.NoError(t, err)
	clock.Set(at)
	v, err := limiter.Value(t.Context(), request)
	require.NoError(t, err)
	require.True(t, v.AsOf.Equal(at))
	for instant, want := range map[time.Time]float64{
		at: -4, at.Add(24 * time.Second): 0, at.Add(54 * time.Second): 5, at.Add(time.Hour): 20,
		time.Date(9999, 1, 1, 0, 0, 0, 0, time.UTC): 20, time.Date(586_542, 1, 1, 0, 0, 0, 0, time.UTC): 20, time.Unix(1<<58, 0): 20,
		at.Add(-6 * time.Second): -5, at.Add(-time.Hour): -5, {}: -5, time.Date(-5000, 1, 1, 0, 0, 0, 0, time.UTC): -5, time.Unix(-1<<58, 0): -5,
	} {
		require.Equal(t, want, v.At(instant), instant)
	}
	require.Equal(t, -4.0, v.Tokens)
	require.Zero(t, ratelimit.Value{}.At(at))
	none, err := json.Marshal(ratelimit.Value{})
	require.NoError(t, err)
	require.Equal(t, "null", string(none))
	for cost, want := range map[float64]time.Duration{0: 24 * time.Second, 1: 30 * time.Second, 20: 144 * time.Second} {
		for _, after := range []time.Duration{0, time.Hour} {
			wait, err := v.RetryAfter(v.AsOf.Add(after), cost)
			require.NoError(t, err)
			require.Equal(t, max(want-after, 0), wait, "%v after %v", cost, after)
		}
	}
	_, err = v.RetryAfter(v.AsOf, 21)
	require.ErrorIs(t, err, ratelimit.ErrCostExceedsCapacity)
	_, err = v.RetryAfter(v.AsOf, -1)
	require.ErrorIs(t, err, ratelimit.ErrInvalidCost)
	_, err = ratelimit.Value{}.RetryAfter(v.AsOf, 1)
	require.ErrorIs(t, err, ratelimit.ErrInvalidLimit)
}

// Take and Reserve of a Value predict the answers of a Limiter, for every kind. They refuse a cost for which it returns
// an error.
func TestStepsOfAValue(t *testing.T) {
	t.Parallel()
	for _, policy := range []ratelimit.Policy{
		tokens{Rate: 7, Period: time.Hour, Capacity: 9, MaxReserved: 4},
		tokens{Rate: 7, Period: time.Hour, MaxReserved: ratelimit.NoReservations},
		windows{Rate: 5, Period: time.Hour, Capacity: 8},
		sliding{Rate: 8, Period: time.Hour},
		calendar{Rate: 6, Resets: ratelimit.Daily, Zone: "Europe/Berlin"},
		slots{Slots: 7, Lease: time.Hour},
	} {
		clock, request := ratelimittest.NewClock(), ratelimit.Define("limit", policy).For("key")
		limiter := ratelimittest.New(t, clock)
		for range 4 {
			v, err := limiter.Value(t.Context(), request)
			require.NoError(t, err)
			clock.Advance(17 * time.Minute)
			now := clock.Now()
			for _, cost := range []float64{-1, math.NaN(), math.Inf(1), 1e-300, 1, 3, 5, 8.001, 21} {
				said, err := limiter.Check(t.Context(), request.Cost(cost))
				after, d := v.Take(now, cost)
				require.Equal(t, err == nil && said.Allowed, d.Allowed, "%v of %v", cost, policy)
				require.Equal(t, err != nil, d.RetryAfter > 200*365*ratelimit.Day, "%v of %v: %v", cost, policy, err)
				if err == nil {
					require.Equal(t, said.RetryAfter, d.RetryAfter, "%v of %v", cost, policy)
				}
				if !d.Allowed {
					require.Equal(t, v.At(now), after.At(now), "%v of %v", cost, policy)
				}
				slot, err := limiter.CheckReserve(t.Context(), request.Cost(cost))
				_, r := v.Reserve(now, cost)
				require.Equal(t, err == nil && slot.Allowed, r.Allowed, "%v of %v", cost, policy)
				require.True(t, !r.Allowed || slot.ReadyAt.Equal(r.ReadyAt), "%v of %v", cost, policy)
			}
			if _, holds := policy.(slots); holds {
				_, err = limiter.Acquire(t.Context(), request.Cost(3))
			} else {
				_, err = limiter.Take(t.Context(), request.Cost(3))
			}
			require.NoError(t, err)
		}
	}
	_, d := ratelimit.Value{}.Take(at, 1)
	require.ErrorIs(t, d.Err(), ratelimit.ErrLimited, "of the zero Value")
}

// The start_us that a client gets, which a float64 holds, begins the same windows as the limit does.
func TestValueMarshalJSONStart(t *testing.T) {
	t.Parallel()
	const exact = int64(1) << 53
	random := testkit.Rand(t)
	for range 500 {
		period := time.Duration(math.Pow(float64(century/time.Microsecond), random.Float64())) * time.Microsecond
		start := at.Add(time.Duration((random.Float64()*2 - 1) * float64(century)))
		if random.IntN(3) == 0 {
			start = time.Time{}
		}
		rate := max(1, float64(period)/float64(century)*10) // which fills within a century
		limit, err := ratelimit.NewLimit("x", ratelimit.FixedWindow{Rate: rate, Period: period, Start: start})
		require.NoError(t, err)
		for range 20 {
			now := random.Int64N(exact)
			text, err := json.Marshal(limit.For("alice").FullValue(time.UnixMicro(now)))
			require.NoError(t, err)
			var got struct {
				Kind   string `json:"kind"`
				Period int64  `json:"period_us"`
				Start  int64  `json:"start_us"`
				TS     int64  `json:"ts_us"` // when the window of now began
			}
			require.NoError(t, json.Unmarshal(text, &got))
			require.Equal(t, period.Microseconds(), got.Period)
			require.Equal(t, got.Kind == "fixed window", period > time.Microsecond)
			require.True(t, got.Start >= 0 && got.Start < got.Period)
			into := ((now-got.Start)%got.Period + got.Period) % got.Period // below 2^53 throughout
			require.Equal(t, got.TS, now-into, "%v at %d", limit, now)
		}
	}
}

func TestReservationDelay(t *testing.T) {
	t.Parallel()
	allowed := ratelimit.Reservation{Decision: ratelimit.Decision{Allowed: true, At: at}, ReadyAt: at.Add(3 * time.Second)}
	require.Equal(t, 3*time.Second, allowed.Delay())
	refused := ratelimit.Reservation{Decision: ratelimit.Decision{At: at, RetryAfter: time.Hour}}
	require.Zero(t, refused.Delay(), "there is no work to delay")
}

// Of an hour, the place of a client moves by (1 - share), and the places of different clients are all over the hour.
func TestSpread(t *testing.T) {
	t.Parallel()
	for _, none := range []time.Duration{0, -time.Second} {
		require.Zero(t, ratelimit.Jitter(none))
		require.Zero(t, ratelimit.JitterFor("a", none, 0.5))
	}
	require.Equal(t, 47*time.Minute, ratelimit.JitterFor("a", time.Hour, 1).Truncate(time.Minute), "in every process")
	for share, moves := range map[float64]time.Duration{
		1: 0, 2: 0, 0.9: 6 * time.Minute, 0.5: 30 * time.Minute, 0: time.Hour, -1: time.Hour, math.NaN(): time.Hour,
	} {
		low, high := time.Hour, time.Duration(0)
		for range 500 {
			d := ratelimit.JitterFor("client 7", time.Hour, share)
			low, high = min(low, d), max(high, d)
		}
		require.True(t, low >= 0 && high < time.Hour)
		require.True(t, high-low <= moves && high-low >= moves*9/10, "share %v: %v", share, high-low)
	}
	var drawn, own [10]int // places of each tenth of the hour: 400, with a standard deviation of 19
	for i := range 4000 {
		drawn[ratelimit.Jitter(time.Hour)*10/time.Hour]++
		own[ratelimit.JitterFor(fmt.Sprintf("client %d", i), time.Hour, 1)*10/time.Hour]++
	}
	for i := range drawn {
		require.InDelta(t, 400, drawn[i], 160)
		require.InDelta(t, 400, own[i], 160)
	}
}
