package integration_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// twinPolicies have every shape.
func twinPolicies() map[string]ratelimit.Policy {
	return map[string]ratelimit.Policy{
		"Bucket":                ratelimit.TokenBucket{Rate: 16, Period: twinsSecond, Capacity: 64},
		"BucketThatOwes":        ratelimit.TokenBucket{Rate: 16, Period: twinsSecond, Capacity: 64, MaxReserved: 32},
		"BucketThatOwesNothing": ratelimit.TokenBucket{Rate: 16, Period: twinsSecond, Capacity: 64, MaxReserved: ratelimit.None},
		"Windows":               ratelimit.FixedWindow{Rate: 64, Period: 4 * twinsSecond, Start: clockNoon},
		"WindowsOfTheKey":       ratelimit.FixedWindow{Rate: 32, Period: 4 * twinsSecond, Capacity: 96},
	}
}

// TestShardsDecideAsOneRow holds a limit on several rows to its twin on one: while no row is full that is not as
// full as the others, every answer is the same, and what the rows hold together is. To have it so, the rows are
// evened out before time passes.
func TestShardsDecideAsOneRow(t *testing.T) {
	t.Parallel()
	steps := testsize.Of(50, 150)
	for name, policy := range twinPolicies() {
		for _, shards := range []int{2, 16} {
			t.Run(fmt.Sprintf("%s/%d", name, shards), func(t *testing.T) {
				t.Parallel()
				if shards > 2 {
					testsize.Long(t, "thousands of calls; two shards are the same code")
				}
				w := newTwins(t, policy, shards)
				for step := range steps {
					w.draw()
					even := w.isEven(t)
					switch n := w.random.IntN(20); {
					case n < 5:
						w.even(t)
						w.pass()
					case n < 6:
						w.even(t)
						w.clock.set(w.latest.Add(-time.Duration(w.random.Int64N(int64(50 * twinsSecond))))) // not wrong yet
					case n < 11:
						answers, _ := w.take(t, w.sides[0].limit.Capacity(), func(ctx context.Context, l *ratelimit.Limiter, r ...ratelimit.Request) (ratelimit.Decision, error) {
							return l.Take(ctx, r...)
						})
						w.sameAnswers(t, answers, even, false)
					case n < 12:
						answers, _ := w.take(t, w.sides[0].limit.Capacity(), func(ctx context.Context, l *ratelimit.Limiter, r ...ratelimit.Request) (ratelimit.Decision, error) {
							return l.Check(ctx, r...)
						})
						w.sameAnswers(t, answers, even, true)
					case n < 15:
						w.reserve(t, even)
					case n < 16:
						w.where = 0
						var ended [2]int
						w.each(t, func(i int, _ *side, limiter *ratelimit.Limiter) (err error) {
							ended[i], err = limiter.Expire(t.Context())
							return err
						})
						require.Equal(t, ended[0], ended[1])
						if ended[0] > 0 {
							w.leases = nil
						}
					default:
						w.change(t)
					}
					held := w.tokens(t)
					require.Equal(t, held[0], held[1], "step %d", step)
				}
			})
		}
	}
}

// TestShardsNeverGiveMoreThanOneRow lets time pass over rows that are not even. What a full row does not gain is
// lost to the others, so that the limit may hold less than its twin, and refuse what that allows; never more.
func TestShardsNeverGiveMoreThanOneRow(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "thousands of calls; TestShardsDecideAsOneRow is its even case")
	const steps = 150
	for name, policy := range twinPolicies() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newTwins(t, policy, 8)
			later := 0
			for step := range steps {
				w.draw()
				w.undone = false
				before := w.tokens(t)
				switch w.random.IntN(20) {
				case 0, 1, 2, 3, 4:
					w.pass()
				case 5:
					w.where = 0
					w.each(t, func(_ int, s *side, limiter *ratelimit.Limiter) error {
						return limiter.Credit(t.Context(), s.limit.For("key").Cost(2))
					})
				default:
					most := []float64{4, 4, 4, 4, w.sides[0].limit.Capacity()}[w.random.IntN(5)]
					answers, cost := w.take(t, most, func(ctx context.Context, l *ratelimit.Limiter, r ...ratelimit.Request) (ratelimit.Decision, error) {
						return l.Take(ctx, r[0])
					})
					one, many := answers[0], answers[1]
					require.Equal(t, before[1] >= cost, many.Allowed, "refused only when the rows are short together")
					require.True(t, one.Allowed || !many.Allowed)
					if one.Allowed && !many.Allowed {
						later++
						require.NoError(t, w.sides[0].limiter.Credit(t.Context(), w.sides[0].limit.For("key").Cost(cost)))
					} else {
						require.GreaterOrEqual(t, many.RetryAfter, one.RetryAfter)
					}
				}
				held := w.tokens(t)
				require.LessOrEqual(t, held[1], held[0], "step %d", step)
			}
			t.Logf("%d takes had to wait longer", later)
		})
	}
}
