package integration_test

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// deployKinds are policies of each kind that hold so many tokens, or slots. At deployDay each of their windows begins.
func deployKinds(most int) map[string]ratelimit.Policy {
	rate := float64(most)
	return map[string]ratelimit.Policy{
		"Bucket":   ratelimit.TokenBucket{Rate: rate, Period: ratelimit.Day},
		"Fixed":    ratelimit.FixedWindow{Rate: rate, Period: ratelimit.Day, Start: deployDay},
		"Sliding":  ratelimit.SlidingWindow{Rate: rate, Period: ratelimit.Day, Slices: 24},
		"Calendar": ratelimit.CalendarWindow{Rate: rate, Resets: ratelimit.Daily, Zone: "UTC"},
		"Adaptive": ratelimit.Adaptive{Contract: ratelimit.TokenBucket{Rate: rate, Period: ratelimit.Day}, Apply: true},
		"Slots":    ratelimit.Concurrency{Most: most, Lease: 24 * time.Hour},
	}
}

var deployDay = time.Date(2026, 3, 2, 0, 0, 0, 0, time.UTC)

// deployed is a process of one version of a program.
type deployed struct {
	*ratelimit.Limiter

	limit    ratelimit.Limit
	admitted atomic.Int64 // tokens, or slots that are held
}

// holds reports whether its limit is one of slots.
func (p *deployed) holds() bool {
	_, holds := p.limit.Policy().(ratelimit.Concurrency)
	return holds
}

// ways are how a process asks for its limit.
func (p *deployed) ways() []caller {
	if p.holds() {
		return acquirers()
	}
	return callers()
}

// ask asks for one until the limit has refused so often, in one of the ways, alone or beside another limit.
func (p *deployed) ask(t *testing.T, pool *pgxpool.Pool, key string, way, tries int) error {
	t.Helper()
	requests := []ratelimit.Request{p.limit.For(key)}
	if way%2 == 1 {
		requests = append(requests, roomy.For(key))
	}
	ways := p.ways()
	for range tries {
		d, err := ways[way%len(ways)].take(t.Context(), pool, p.Limiter, requests...)
		if err != nil {
			return err
		}
		if d.Allowed {
			p.admitted.Add(1)
		}
	}
	return nil
}

// In a rolling deployment an old and a new version of a program use one name, each with its own kind of limit. Neither fails on the
// other's rows, and together they admit no more than the larger of the two limits. Once the old version is gone, the new version
// admits its own limit.
func TestTwoKindsSideBySideInADeployment(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "36 pairs of kinds, each with hundreds of calls")
	const few, many, tries = 6, 10, 5
	b := setup(t, func(c *pgxpool.Config) { c.MaxConns = 40 })
	for one, before := range deployKinds(few) {
		for two, after := range deployKinds(many) {
			for name, policies := range map[string][2]ratelimit.Policy{"Raised": {before, after}, "Lowered": {deployKinds(many)[one], deployKinds(few)[two]}} {
				t.Run(one+"/"+two+"/"+name, func(t *testing.T) {
					t.Parallel()
					now := &clock{}
					now.set(deployDay)
					var versions [2]*deployed
					for i, policy := range policies {
						versions[i] = &deployed{
							Limiter: b.with(t, ratelimit.Config{AsOf: now.now, RefusalCache: 100 * i}), limit: ratelimit.Define("deployed", policy),
						}
					}
					first, second := versions[0], versions[1]
					require.NoError(t, atonce.Do(2*len(callers()), func(worker int) error {
						return versions[worker%2].ask(t, b.pool, t.Name(), worker/2, tries)
					}))
					requireTogether(t, first, second)

					now.set(deployDay.AddDate(0, 0, 3)) // every kind is full again, and the old version is gone
					for range 2 {
						second.admitted.Store(0)
						require.NoError(t, atonce.Do(len(callers()), func(worker int) error {
							return second.ask(t, b.pool, t.Name(), worker, 2*tries)
						}))
						require.EqualValues(t, second.limit.Capacity(), second.admitted.Load(), "what the new version says")
						now.set(now.now().AddDate(0, 0, 2))
					}
				})
			}
		}
	}
}

// requireTogether checks what two versions have admitted at one instant. Slots and tokens do not count for each other.
func requireTogether(t *testing.T, first, second *deployed) {
	t.Helper()
	one, two := float64(first.admitted.Load()), float64(second.admitted.Load())
	if first.holds() == second.holds() {
		require.LessOrEqual(t, one+two, max(first.limit.Capacity(), second.limit.Capacity()), fmt.Sprint(one, " and ", two))
		return
	}
	for _, p := range []*deployed{first, second} {
		if p.holds() {
			require.EqualValues(t, p.limit.Capacity(), p.admitted.Load(), "slots that are held")
		}
	}
}
