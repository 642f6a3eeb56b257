package integration_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// takesUpTo takes up to n units, and gets some. For each limit the answer reports the cost of these, or of one unit if there are none.
func takesUpTo(n, want int, requests ...ratelimit.Request) act {
	return func(s *story) {
		taken, d, err := s.limiter.TakeUpTo(s.Context(), n, requests...)
		require.NoError(s, err)
		require.Equal(s, want, taken)
		require.Equal(s, want > 0, d.Allowed)
		one, err := s.limiter.Check(s.Context(), requests...)
		require.NoError(s, err)
		for i := range requests {
			require.InDelta(s, one.States[i].Cost*float64(max(1, want)), d.States[i].Cost, 1e-9)
		}
		if want == 0 && d.States[0].PausedUntil.IsZero() {
			require.Equal(s, one.RetryAfter, d.RetryAfter, "until there is one unit")
		}
	}
}

func TestTakeUpTo(t *testing.T) {
	t.Parallel()
	few := ratelimit.Define("few", ratelimit.TokenBucket{Rate: 1, Period: time.Second, Capacity: 5}).For("key")
	bytes := ratelimit.Define("bytes", ratelimit.PerSecond(100)).For("key")
	own := ratelimit.Borrow(few, bytes)
	play(t, ratelimit.Config{RefusalCache: 64}, map[string][]act{
		"TheMostThatAllHave":     {takesUpTo(10, 3, few, bytes.Cost(30)), holds(10, bytes), takesUpTo(10, 0, few, bytes.Cost(30)), holds(2, few)},
		"OneBucketTwice":         {takesUpTo(10, 2, few, few.Cost(1.5)), holds(0, few)},
		"OfAPool":                {takesUpTo(200, 100, own), holds(5, few), takesUpTo(200, 5, own), holds(-5, bytes)}, // the pool has more than the guarantee
		"NotRememberedAsRefusal": {takesUpTo(4, 4, few), takesUpTo(10, 0, few.Cost(2)), takes(few)},
	})
	limiter := inMemory.setup(t).limiter
	for _, wrong := range []struct {
		n        int
		requests []ratelimit.Request
		want     error
		text     string
	}{
		{0, []ratelimit.Request{few}, ratelimit.ErrInvalidRequest, "TakeUpTo 0 units; ask for 1 or more"},
		{-1, []ratelimit.Request{few}, ratelimit.ErrInvalidRequest, "ask for 1 or more"},
		{1, []ratelimit.Request{few.Cost(0), bytes.Cost(0)}, ratelimit.ErrInvalidCost, "units that cost nothing"},
		{1, []ratelimit.Request{few.Cost(6)}, ratelimit.ErrCostExceedsCapacity, `6 of "few"`},
	} {
		_, _, err := limiter.TakeUpTo(t.Context(), wrong.n, wrong.requests...)
		require.ErrorIs(t, err, wrong.want)
		require.ErrorContains(t, err, wrong.text)
	}
}

// A limit in shadow mode does not reduce the units, a limit that is off is not checked, a paused limit gives none, and a limit that
// changes gives its tokens at that time.
func TestTakeUpToUnderRules(t *testing.T) {
	t.Parallel()
	rules := eraRules{}
	ruled := func(name string, policy ratelimit.Policy, config ratelimit.RulingConfig) ratelimit.Request {
		limit := ratelimit.Define(name, policy)
		config.Name = name
		rule, err := ratelimit.NewRuling(limit, config)
		require.NoError(t, err)
		rules[name] = rule
		return limit.For("key")
	}
	smaller := ratelimit.Era{From: clockNoon.Add(time.Second), Policy: ratelimit.TokenBucket{Rate: 1, Period: ratelimit.Day, Capacity: 4}}
	tried := ruled("tried", ratelimit.PerDay(2), ratelimit.RulingConfig{Eras: []ratelimit.Era{{Mode: ratelimit.Shadow}}})
	unused := ruled("unused", ratelimit.PerDay(1), ratelimit.RulingConfig{Eras: []ratelimit.Era{{Mode: ratelimit.Off}}})
	stopped := ruled("stopped", ratelimit.PerDay(5), ratelimit.RulingConfig{Eras: []ratelimit.Era{{}}, PausedUntil: clockNoon.Add(time.Hour)})
	changing := ruled("changing", ratelimit.TokenBucket{Rate: 1, Period: ratelimit.Day, Capacity: 8}, ratelimit.RulingConfig{Eras: []ratelimit.Era{{}, smaller}})
	enforced := ratelimit.Define("enforced", ratelimit.PerDay(5)).For("key")
	play(t, ratelimit.Config{Policies: rules}, map[string][]act{
		"Shadow": {
			takesUpTo(9, 5, tried, enforced, unused), holds(2, tried), holds(0, enforced), takesUpTo(2, 2, tried, unused), holds(0, tried),
			takesUpTo(2, 2, tried), // it refuses nobody
		},
		"ShadowOfALimitThatIsTooSmall": {takes(tried.Cost(3), enforced), holds(2, tried), holds(4, enforced)},

		"Off":     {takesUpTo(3, 3, unused)},
		"Paused":  {takesUpTo(3, 0, stopped, unused)},
		"Changes": {takesUpTo(1, 1, changing), after(time.Second), takesUpTo(9, 4, changing)},
	})
}

// TakeUpTo waits for a locked row, and takes the units available after the wait.
func TestTakeUpToWaitsForARowThatIsHeld(t *testing.T) {
	t.Parallel()
	b := setup(t)
	five := ratelimit.Define("five", hoard(5))
	for _, c := range callers() {
		t.Run(c.name, func(t *testing.T) { // not parallel: waiting counts all
			require.NoError(t, b.limiter.Reset(t.Context(), five.For(t.Name())))
			holder := b.begin(t, pgx.ReadCommitted)
			requireAllowed(t, taking(five.For(t.Name()).Cost(2)), b.limiter.WithTx(holder))
			waited := make(chan error, 1)
			var taken int
			go func() {
				var err error
				taken, _, err = c.takesUpTo(t.Context(), b.db(), b.limiter, 9, five.For(t.Name()))
				waited <- err
			}()
			eventually(t, "the caller waits for the row", func() bool { return waiting(t, b.pool) == 1 })
			require.NoError(t, holder.Commit(t.Context()))
			require.NoError(t, <-waited)
			require.Equal(t, 3, taken)
		})
	}
}
