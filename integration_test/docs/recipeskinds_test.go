package docs_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// The blocks of docs/recipes.md on kinds that are no bucket, and the tests that run them.

var Strictest = ratelimit.Define("strictest", ratelimit.SlidingWindow{Rate: 100, Period: time.Minute})

var MonthlyQuota = ratelimit.Define("quota",
	ratelimit.CalendarWindow{Rate: 1000, Resets: ratelimit.Monthly, Zone: "Europe/Berlin"})

var Exports = ratelimit.Define("exports", ratelimit.Concurrency{Most: 3, Lease: 30 * time.Second})

func recipeSlots(ctx context.Context, limiter *ratelimit.Limiter, tenant string, export func(ctx context.Context, fence int64) error) error {
	err := limiter.Hold(ctx, func(ctx context.Context, lease ratelimit.Lease) error {
		return export(ctx, lease.Fence) // and stops when ctx ends: the lease is lost
	}, Exports.For(tenant))
	return err
}

// kinds are limits of 10 in 10 seconds, as the table of the page has them.
var kinds = map[string]ratelimit.Limit{
	"TokenBucket":   ratelimit.Define("bucket", ratelimit.TokenBucket{Rate: 10, Period: 10 * time.Second}),
	"FixedWindow":   ratelimit.Define("fixed", ratelimit.FixedWindow{Rate: 10, Period: 10 * time.Second, Start: recipeStart}),
	"SlidingWindow": ratelimit.Define("sliding", ratelimit.SlidingWindow{Rate: 10, Period: 10 * time.Second}),
}

// TestRecipesWorstCase presses each kind when that gives the most.
func TestRecipesWorstCase(t *testing.T) {
	t.Parallel()
	testsize.Long(t, documents)
	worst := func(limit ratelimit.Limit) (most int) {
		for quiet := 0; quiet < 1000; quiet += 50 { // before it is pressed, in hundredths of a second
			s, err := ratelimit.NewSimulation(ratelimit.Config{})
			require.NoError(t, err)
			var admitted []time.Duration
			for i := quiet; i < 4000; i++ {
				at := time.Duration(i) * 10 * time.Millisecond
				d, err := s.Take(t.Context(), recipeStart.Add(at), limit.Global())
				require.NoError(t, err)
				if d.Allowed {
					admitted = append(admitted, at)
				}
			}
			most = max(most, busiest(admitted, 10*time.Second))
		}
		return most
	}
	says(t, "| `TokenBucket` | bursts up to `Capacity`, and `Rate` each `Period` in the long run | %d |", worst(kinds["TokenBucket"]))
	says(t, "| `FixedWindow` | `Rate` in each window, from `Start`, or from an offset derived from the key | %d |", worst(kinds["FixedWindow"]))
	says(t, "| `SlidingWindow` | never more than `Rate` in any `Period` | %d |", worst(kinds["SlidingWindow"]))
	var runs []time.Duration
	v := ratelimit.Define("spacing", ratelimit.TokenBucket{Rate: 10, Period: 10 * time.Second, Capacity: ratelimit.None}).Global().Full(recipeStart)
	for range 40 {
		next, r := v.Reserve(recipeStart, 1)
		require.True(t, r.Allowed)
		v, runs = next, append(runs, r.ReadyAt.Sub(recipeStart))
	}
	says(t, "| `TokenBucket` with `Capacity: None`, and `Reserve` | no burst: one after the other, first come, first served | %d |", busiest(runs, 10*time.Second))
}

func TestRecipesOfKinds(t *testing.T) {
	t.Parallel()
	testsize.Long(t, documents)

	t.Run("NeverMore", func(t *testing.T) {
		t.Parallel()
		admitted, refused := pressed(t, Strictest, 20, 20*600)
		says(t, "the busiest minute has %d", busiest(admitted, time.Minute))
		says(t, "pressed 20 times a second it refuses first at %s", inSeconds(refused[0]))
		says(t, "%d are admitted in ten minutes", len(admitted))
	})

	t.Run("Quota", func(t *testing.T) {
		t.Parallel()
		f := newFrozen(t)
		f.now = time.Date(2026, time.March, 31, 21, 59, 59, 0, time.UTC) // 23:59:59 in Berlin, where it is summer since the 29th
		d, err := f.Limiter.Take(t.Context(), MonthlyQuota.For("ada").Cost(1000))
		require.NoError(t, err)
		require.True(t, d.Allowed)
		d, err = f.Limiter.Take(t.Context(), MonthlyQuota.For("ada"))
		require.NoError(t, err)
		require.False(t, d.Allowed)
		require.Equal(t, time.Second, d.RetryAfter)
		says(t, "a refusal one second before midnight of 31 March in Berlin (22:00 UTC) has a `RetryAfter` of %s", inSeconds(d.RetryAfter))
		f.now = f.now.Add(d.RetryAfter)
		require.Equal(t, 1000.0, f.tokens(t, MonthlyQuota.For("ada")))
	})

	t.Run("SlowWork", func(t *testing.T) {
		t.Parallel()
		f := newFrozen(t)
		running, most, refused := 0, 0, 0
		var export func(context.Context, int64) error
		export = func(context.Context, int64) error {
			running++
			defer func() { running-- }()
			most = max(most, running)
			if running+refused < 5 { // the next one asks while this one works
				var limited *ratelimit.LimitedError
				if err := recipeSlots(t.Context(), f.Limiter, "acme", export); errors.As(err, &limited) {
					require.Equal(t, 30*time.Second, limited.Decision.RetryAfter)
					refused++
				}
			}
			return nil
		}
		require.NoError(t, recipeSlots(t.Context(), f.Limiter, "acme", export))
		require.Equal(t, 3, most)
		require.Positive(t, refused)
		require.Equal(t, 3.0, f.tokens(t, Exports.For("acme")), "all came back")
		require.NoError(t, recipeSlots(t.Context(), f.Limiter, "another", func(context.Context, int64) error { return nil }))
		for range 3 { // by programs that die
			lease, err := f.Limiter.Acquire(t.Context(), Exports.For("acme"))
			require.NoError(t, err)
			require.True(t, lease.Allowed)
		}
		f.now = f.now.Add(30*time.Second - time.Microsecond)
		require.ErrorIs(t, recipeSlots(t.Context(), f.Limiter, "acme", export), ratelimit.ErrLimited)
		f.now = f.now.Add(time.Microsecond)
		require.NoError(t, recipeSlots(t.Context(), f.Limiter, "acme", func(context.Context, int64) error { return nil }))
		says(t, "At most %d exports run at a time, and a fourth is refused", most)
		says(t, "The slots of programs that die are free after %s", inSeconds(30*time.Second))
	})
}
