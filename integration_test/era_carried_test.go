package integration_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// The rows that a bucket had before a reset count no more, also when Prune has deleted rows since.
func TestPruneBringsNoOldRowsBack(t *testing.T) {
	t.Parallel()
	for name, shards := range map[string]int{"OneRow": 1, "TwoRows": 2} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := eraChange{before: slowly(80, 8), after: slowly(80, shards), onChange: ratelimit.ResetTokens}
			d := setup(t).changing(t, ratelimit.Config{}, map[string]eraChange{"limit": c})
			for shard := range 8 {
				d.plant(t, "key", shard, 0, changeInstant.Add(-time.Second))
			}
			request := changingLimit("limit").For("key")
			requireRefused(t, d.limiter, []ratelimit.Request{request})
			for _, at := range []time.Duration{time.Second, time.Hour} {
				d.at(at)
				d.requireTokens(t, 80, request)
				_, err := d.limiter.Prune(t.Context(), changingLimit("limit"))
				require.NoError(t, err)
			}
			require.Equal(t, 80, admitted(t, d.limiter, request, 1, 100))
			_, err := d.limiter.Prune(t.Context(), changingLimit("limit"))
			require.NoError(t, err)
			require.Zero(t, admitted(t, d.limiter, request, 1, 10))
		})
	}
}

// What a bucket owes after a change is not forgotten because the row that owes it was full by the policy before.
func TestPruneForgivesNothingOwedThatAChangeScales(t *testing.T) {
	t.Parallel()
	onEach(t, testPruneForgivesNothingOwedThatAChangeScales, onPostgres, inMemory)
}

func testPruneForgivesNothingOwedThatAChangeScales(t *testing.T, on backend) {
	tests := map[string]eraChange{
		"Scaled": {
			before: ratelimit.TokenBucket{Rate: 10, Period: time.Minute}, after: ratelimit.TokenBucket{Rate: 10, Period: time.Minute, Capacity: 1000},
			onChange: ratelimit.ScaleTokens,
		},
		"Added": {
			before: ratelimit.TokenBucket{Rate: 10, Period: time.Minute, Capacity: 1000}, after: ratelimit.TokenBucket{Rate: 10, Period: time.Minute},
			onChange: ratelimit.AddTokens,
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := on.setup(t).changing(t, ratelimit.Config{}, map[string]eraChange{"limit": test})
			request := changingLimit("limit").For("key")
			d.plant(t, "key", 0, -90, changeInstant.Add(-time.Second))
			for minutes := 1; minutes < 1200; minutes += 7 {
				d.at(time.Duration(minutes) * time.Minute)
				before := tokens(t, d.limiter, request)
				_, err := d.limiter.Prune(t.Context(), changingLimit("limit"))
				require.NoError(t, err)
				require.InDelta(t, before, tokens(t, d.limiter, request), 1e-6, "after %d minutes", minutes)
			}
		})
	}
}

// A clock that was wrong, and showed an instant after the change, has credited nothing to any bucket once it is right
// again.
func TestAClockThatWasWrongOfAChangeCreditsNothing(t *testing.T) {
	t.Parallel()
	daily := func(rate float64) ratelimit.FixedWindow {
		return ratelimit.FixedWindow{Rate: rate, Period: ratelimit.Day, Start: clockNoon.Add(-12 * time.Hour)}
	}
	d := setup(t).changing(t, ratelimit.Config{}, map[string]eraChange{"limit": {before: daily(10_000), after: daily(20_000)}})
	window := changingLimit("limit").For("key")
	hourly := ratelimit.Define("hourly", ratelimit.PerHour(60)).For("key")
	d.at(time.Second)
	requireAllowed(t, taking(window), d.limiter)
	d.at(-3 * time.Hour)
	requireAllowed(t, taking(hourly.Cost(60)), d.limiter)
	for range 5 {
		decision, err := d.limiter.Take(t.Context(), window, hourly)
		require.NoError(t, err)
		require.False(t, decision.Allowed, "at %v", decision.At)
		decision, err = d.limiter.Take(t.Context(), window.Cost(2), hourly.Cost(2))
		require.NoError(t, err)
		require.False(t, decision.Allowed, "at %v", decision.At)
	}
}

// A reservation that is made after the change owes no more than the policy of then lets it.
func TestAReservationOwesWhatThePolicyOfItsInstantAllows(t *testing.T) {
	t.Parallel()
	policy := func(most float64) ratelimit.TokenBucket {
		return ratelimit.TokenBucket{Rate: 10, Period: 365 * ratelimit.Day, MaxReserved: most}
	}
	b := setup(t)
	for reads := range int64(5) {
		c := eraChange{before: policy(100), after: policy(5)}
		limiter := b.with(t, ratelimit.Config{
			Policies: eraRules{"limit": c.rule(t, changingLimit("limit"))}, AsOf: jumping(reads), StaleAfter: time.Hour, ExpireAfter: 2 * time.Hour,
		})
		key := t.Name() + string(rune('a'+reads))
		r, err := limiter.Reserve(t.Context(), changingLimit("limit").For(key).Cost(10))
		require.NoError(t, err)
		require.True(t, r.Allowed)
		limiter = b.with(t, ratelimit.Config{
			Policies: eraRules{"limit": c.rule(t, changingLimit("limit"))}, AsOf: jumping(reads), StaleAfter: time.Hour, ExpireAfter: 2 * time.Hour,
		})
		r, err = limiter.Reserve(t.Context(), changingLimit("limit").For(key).Cost(14))
		require.NoError(t, err)
		require.Equal(t, r.At.Before(changeInstant), r.Allowed, "decided at %v, after %d readings of the clock", r.At, reads)
	}
}

// A process that learns of the change late continues with the policy before. Only its takes in that time exceed the new policy: at
// most the tokens held and arriving under the policy before.
func TestAProcessThatHearsLateAdmitsNoMoreThanThePolicyBeforeHolds(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		change eraChange
		shard  int // that holds the last token
		absent int // how many of the rows before are not there
		most   int
	}{
		"OneRow":            {eraChange{before: slowly(10, 1), after: slowly(800, 1)}, 0, 0, 1 + 10},
		"OneRowScaled":      {eraChange{before: slowly(10, 1), after: slowly(800, 1), onChange: ratelimit.ScaleTokens}, 0, 0, 80 + 10},
		"SeveralRowsAdded":  {eraChange{before: slowly(8, 4), after: slowly(800, 4), onChange: ratelimit.AddTokens}, 0, 0, 793 + 8},
		"SeveralRowsScaled": {eraChange{before: slowly(8, 4), after: slowly(800, 4), onChange: ratelimit.ScaleTokens}, 1, 1, 300 + 8},
		"MoreRowsReset":     {eraChange{before: slowly(10, 1), after: slowly(800, 8), onChange: ratelimit.ResetTokens}, 0, 0, 800 + 10},
		"FewerRowsReset":    {eraChange{before: slowly(8, 4), after: slowly(800, 2), onChange: ratelimit.ResetTokens}, 1, 0, 800 + 8},
		"Lowered":           {eraChange{before: slowly(800, 8), after: slowly(10, 1), onChange: ratelimit.ResetTokens}, 0, 0, 10 + 800},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			representative(t, name, "SeveralRowsScaled", "FewerRowsReset")
			b := setup(t)
			d := b.changing(t, ratelimit.Config{}, map[string]eraChange{"limit": test.change})
			rule, err := ratelimit.NewRuling(changingLimit("limit"), ratelimit.RulingConfig{Eras: []ratelimit.Era{{Policy: test.change.before}}})
			require.NoError(t, err)
			late := b.with(t, ratelimit.Config{Policies: eraRules{"limit": rule}, AsOf: d.clock.now})
			shards := max(1, test.change.before.(ratelimit.TokenBucket).Shards)
			for shard := test.absent; shard < shards; shard++ {
				value := 0.0
				if shard == test.shard {
					value = 1
				}
				d.plant(t, "key", shard, value, changeInstant.Add(-time.Second))
			}
			request := changingLimit("limit").For("key")
			d.at(time.Second)
			given := 0
			for range 3 {
				given += admitted(t, late, request, 1, 20)
				given += admitted(t, d.limiter, request, 1, testsize.Of(100, 1000))
			}
			require.LessOrEqual(t, given, test.most)
		})
	}
}
