package integration_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

func TestTakeUpTo(t *testing.T) {
	t.Parallel()
	d := setup(t).desk(t, ratelimit.Config{RefusalCache: 64})
	few, bytes := ratelimit.Define("few", ratelimit.TokenBucket{Rate: 1, Period: time.Second, Capacity: 5}), ratelimit.Define("bytes", ratelimit.PerSecond(100))
	upTo := func(n int, requests ...ratelimit.Request) (int, ratelimit.Decision) {
		t.Helper()
		taken, answer, err := d.limiter.TakeUpTo(t.Context(), n, requests...)
		require.NoError(t, err)
		return taken, answer
	}
	t.Run("TheMostThatAllHave", func(t *testing.T) {
		t.Parallel()
		taken, answer := upTo(10, few.For("a"), bytes.For("a").Cost(30))
		require.Equal(t, 3, taken)
		require.True(t, answer.Allowed)
		require.InDelta(t, 3, answer.States[0].Cost, 0)
		require.InDelta(t, 90, answer.States[1].Cost, 0)
		require.InDelta(t, 2, answer.States[0].Remaining, 0)
		d.requireTokens(t, 10, bytes.For("a"))

		taken, answer = upTo(10, few.For("a"), bytes.For("a").Cost(30))
		require.Zero(t, taken)
		require.False(t, answer.Allowed)
		require.Equal(t, 200*time.Millisecond, answer.RetryAfter, "until there is one unit")
		require.InDelta(t, 30, answer.States[1].Cost, 0)
		d.requireTokens(t, 2, few.For("a"))
	})
	t.Run("OneBucketTwice", func(t *testing.T) {
		t.Parallel()
		taken, answer := upTo(10, few.For("c"), few.For("c").Cost(1.5))
		require.Equal(t, 2, taken)
		require.InDelta(t, 2, answer.States[0].Cost, 0)
		require.InDelta(t, 3, answer.States[1].Cost, 0)
		require.InDelta(t, 0, answer.Remaining, 0)
	})
	t.Run("Borrowed", func(t *testing.T) {
		t.Parallel()
		own := ratelimit.Borrow(few.For("d"), bytes.For("d"))
		taken, answer := upTo(200, own)
		require.Equal(t, 100, taken, "all of the pool, as that is more than he has himself")
		require.True(t, answer.States[0].Borrowed)
		taken, answer = upTo(200, own)
		require.Equal(t, 5, taken)
		require.False(t, answer.States[0].Borrowed)
		d.requireTokens(t, -5, bytes.For("d"))
	})
	t.Run("NotRememberedAsARefusal", func(t *testing.T) {
		t.Parallel()
		upTo(4, few.For("e"))
		taken, _ := upTo(10, few.For("e").Cost(2))
		require.Zero(t, taken)
		requireAllowed(t, taking(few.For("e")), d.limiter)
	})
	t.Run("Wrong", func(t *testing.T) {
		t.Parallel()
		for _, limiter := range []*ratelimit.Limiter{d.limiter, d.limiter.WithTx(d.begin(t, pgx.ReadCommitted))} {
			for _, wrong := range []struct {
				n        int
				requests []ratelimit.Request
				want     error
				text     string
			}{
				{0, []ratelimit.Request{few.For("f")}, ratelimit.ErrInvalidRequest, "TakeUpTo 0 units; ask for 1 or more"},
				{-1, []ratelimit.Request{few.For("f")}, ratelimit.ErrInvalidRequest, "ask for 1 or more"},
				{1, []ratelimit.Request{few.For("f").Cost(0), bytes.For("f").Cost(0)}, ratelimit.ErrInvalidCost, "units that cost nothing"},
				{1, []ratelimit.Request{few.For("f").Cost(6)}, ratelimit.ErrCostExceedsCapacity, `6 of "few"`},
			} {
				_, _, err := limiter.TakeUpTo(t.Context(), wrong.n, wrong.requests...)
				require.ErrorIs(t, err, wrong.want)
				require.ErrorContains(t, err, wrong.text)
			}
			_, _, err := limiter.TakeUpTo(t.Context(), 3, few.For("f"))
			require.NoError(t, err, "the transaction is alive")
		}
	})
}

// A limit in shadow mode does not reduce the units, a limit that is off is not checked, a paused limit gives none, and a limit that
// changes gives its tokens at that time.
func TestTakeUpToUnderRules(t *testing.T) {
	t.Parallel()
	tried, unused, enforced := ratelimit.Define("tried", ratelimit.PerDay(2)), ratelimit.Define("unused", ratelimit.PerDay(1)), ratelimit.Define("enforced", ratelimit.PerDay(5))
	changing := ratelimit.Define("changing", ratelimit.TokenBucket{Rate: 1, Period: ratelimit.Day, Capacity: 8})
	stopped := ratelimit.Define("stopped", ratelimit.PerDay(5))
	rules := eraRules{}
	for _, r := range []struct {
		limit  ratelimit.Limit
		config ratelimit.RulingConfig
	}{
		{tried, ratelimit.RulingConfig{Name: "tried", Eras: []ratelimit.Era{{Mode: ratelimit.Shadow}}}},
		{unused, ratelimit.RulingConfig{Name: "unused", Eras: []ratelimit.Era{{Mode: ratelimit.Off}}}},
		{changing, ratelimit.RulingConfig{Name: "changing", Eras: []ratelimit.Era{{}, {From: changeInstant, Policy: ratelimit.TokenBucket{Rate: 1, Period: ratelimit.Day, Capacity: 4}}}}},
		{stopped, ratelimit.RulingConfig{Name: "stopped", Eras: []ratelimit.Era{{}}, PausedUntil: changeInstant.Add(time.Hour)}},
	} {
		rule, err := ratelimit.NewRuling(r.limit, r.config)
		require.NoError(t, err)
		rules[r.limit.Name()] = rule
	}
	d := setup(t).desk(t, ratelimit.Config{Policies: rules})
	d.at(-time.Second)
	upTo := func(n int, requests ...ratelimit.Request) (int, ratelimit.Decision) {
		t.Helper()
		taken, answer, err := d.limiter.TakeUpTo(t.Context(), n, requests...)
		require.NoError(t, err)
		return taken, answer
	}
	taken, answer := upTo(9, tried.For("a"), enforced.For("a"), unused.For("a"))
	require.Equal(t, 5, taken)
	require.False(t, answer.States[0].Allowed, "what would be decided is told")
	require.Equal(t, ratelimit.Shadow, answer.States[0].Mode)
	require.True(t, answer.States[2].NotAsked)
	d.requireTokens(t, 2, tried.For("a"))
	d.requireTokens(t, 0, enforced.For("a"))
	taken, _ = upTo(2, tried.For("a"), unused.For("a"))
	require.Equal(t, 2, taken)
	d.requireTokens(t, 0, tried.For("a"))
	taken, answer = upTo(2, tried.For("a"))
	require.Equal(t, 2, taken, "it refuses nobody")
	require.False(t, answer.States[0].Allowed)
	taken, answer = upTo(3, unused.For("a"))
	require.Equal(t, 3, taken)
	require.InDelta(t, 3, answer.States[0].Cost, 0)
	taken, answer = upTo(3, stopped.For("a"), unused.For("a"))
	require.Zero(t, taken)
	require.False(t, answer.Allowed)
	require.InDelta(t, 1, answer.States[0].Cost, 0)
	require.False(t, answer.States[0].PausedUntil.IsZero())

	taken, _ = upTo(1, changing.For("a"))
	require.Equal(t, 1, taken)
	d.at(time.Second)
	taken, _ = upTo(9, changing.For("a"))
	require.Equal(t, 4, taken)
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
