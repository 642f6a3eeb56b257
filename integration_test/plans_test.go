package integration_test

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/test/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// planned are the plans of a quota a day, and a limiter whose clock a test sets.
func planned(t *testing.T, b *bundle, now *time.Time, configure func(*ratelimit.Config)) (limiter *ratelimit.Limiter, quota ratelimit.Limit) {
	t.Helper()
	policy := func(n float64) ratelimit.Policy {
		return ratelimit.FixedWindow{Rate: n, Period: 24 * time.Hour, Start: clockNoon}
	}
	set, err := rules.SetOf(rules.Document{Rules: []rules.Rule{
		{Limit: "quota", Plan: "free", Policy: policy(10)}, {Limit: "quota", Plan: "team", Policy: policy(40)}, {Limit: "quota", Plan: "pro", Policy: policy(100)},
	}})
	require.NoError(t, err)
	config := ratelimit.Config{Policies: set, AsOf: func() time.Time { return *now }}
	configure(&config)
	return b.with(t, config), ratelimit.Define("quota", policy(10))
}

// TestPlansThatAlternate promises that a key whose requests name any of its plans, in any order, takes no more in a
// window than the largest quota, with reservations that are settled and cancelled in between.
func TestPlansThatAlternate(t *testing.T) {
	t.Parallel()
	for _, on := range []backend{onPostgres, inMemory, byRoutedStatements} {
		t.Run(on.name, func(t *testing.T) {
			t.Parallel()
			if on.isLong {
				testsize.Long(t, "another backend")
			}
			testsize.EachSeed(t, func(t *testing.T, seed uint64) {
				t.Helper()
				r, now := rand.New(rand.NewPCG(seed, 0)), clockNoon.Add(time.Minute)
				limiter, quota := planned(t, on.setup(t), &now, func(c *ratelimit.Config) { c.NoBatching = r.IntN(2) == 0 })
				for history := range testsize.Of(8, 100) {
					taken, open := 0.0, map[string]float64{}
					for range 25 {
						now = now.Add(time.Duration(r.IntN(60)) * time.Second)
						request := quota.For(fmt.Sprint("key", history)).Plan([]string{"free", "team", "pro"}[r.IntN(3)]).Cost(float64(1 + r.IntN(10)))
						switch chance := r.IntN(6); {
						case chance == 0:
							made, err := limiter.Reserve(t.Context(), request)
							require.NoError(t, err)
							if made.Allowed && made.ReadyAt.Equal(made.At) {
								open[made.ID] = made.States[0].Cost
								taken += open[made.ID]
							} else if made.Allowed {
								require.NoError(t, limiter.Cancel(t.Context(), made.ID))
							}
						case chance == 1 && len(open) > 0:
							for id, cost := range open {
								require.NoError(t, limiter.Cancel(t.Context(), id))
								taken -= cost
								delete(open, id)
								break
							}
						default:
							d, err := limiter.Take(t.Context(), request)
							require.NoError(t, err)
							if d.Allowed {
								taken += d.States[0].Cost
							}
						}
						require.LessOrEqual(t, taken, 100.0, "history %d", history)
					}
				}
			})
		})
	}
}
