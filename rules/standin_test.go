package rules

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

// table has the rows of a table of rules, as a Store writes them and a Set reads them.
type table []row

// state adds a row at an instant. It replaces the rows about the same thing that have not ended by its beginning.
func (t *table) state(r row, now int64) {
	for i := range *t {
		o := &(*t)[i]
		if o.of == r.of && o.plan == r.plan && o.key == r.key && (o.end() == nil || *o.end() > max(r.from, o.from)) {
			o.replaced = new(r.from)
		}
	}
	if r.says == nil && r.of != OfRule {
		r.replaced = new(r.from)
	}
	r.version, r.name, r.made = int64(len(*t)+1), "api", now
	*t = append(*t, r)
}

// load returns what a Set has that loads the table at an instant.
func (t *table) load(now int64, noted *definitions) *snapshot {
	var rows []row
	for i := range *t {
		r := (*t)[i]
		never := r.of == OfRule && r.replaced != nil && *r.replaced <= r.from
		over := r.of == OfPause && r.end() != nil && *r.end() <= now
		if !never && !over {
			rows = append(rows, r)
		}
	}
	return compile(&loaded{version: int64(len(*t)), now: now, rows: rows}, noted)
}

// drawRow returns a random change, which holds from an instant.
func drawRow(random *rand.Rand, from int64) (r row) {
	policy := ratelimit.TokenBucket{Rate: float64(1 + random.IntN(9)), Period: time.Minute}
	plan := []string{"", "", "free", "pro"}[random.IntN(4)]
	switch random.IntN(7) {
	case 0, 1, 2:
		r, _ = rowOfRule(Rule{Plan: plan, Policy: policy, Mode: []ratelimit.Mode{"", ratelimit.Off, ratelimit.Shadow}[random.IntN(3)]})
	case 3, 4:
		r = row{of: OfRule, plan: plan}
	case 5:
		o := []Override{{Multiplier: 3}, {OnPlan: "pro"}, {Policy: policy}}[random.IntN(3)]
		if o.Key = "ana"; random.IntN(2) == 0 {
			o.Until = time.UnixMicro(from + 1 + random.Int64N(30))
		}
		r, _ = rowOfOverride(o)
	default:
		r = row{of: OfOverride, key: "ana"}
	}
	r.from = from
	return r
}

// decides returns the policy, the mode and the rule that decide a request at an instant, under what a Set has loaded.
func decides(t *testing.T, set *Set, at int64, request ratelimit.Request) string {
	t.Helper()
	limiter, err := ratelimit.New(ratelimittest.NewDB(), ratelimit.Config{Policies: set, AsOf: func() time.Time { return time.UnixMicro(at) }})
	require.NoError(t, err)
	d, err := limiter.Check(t.Context(), request)
	require.NoError(t, err)
	return fmt.Sprint(limiter.Resolve(request).Policy(), limiter.Mode(request), d.States[0].Rule)
}

// A program that has run for long decides as one that starts now, at each instant, also if nothing has changed since it
// loaded.
func TestARunningProgramDecidesAsANewOne(t *testing.T) {
	t.Parallel()
	testkit.EachSeed(t, func(t *testing.T, seed uint64) {
		random := rand.New(rand.NewPCG(seed, 51))
		for range testkit.Sized(10, 400) {
			var stated table
			ran, handed := &Set{}, []ratelimit.Limit(nil)
			for now := int64(1000); now < 1200; now += 1 + random.Int64N(12) {
				if random.IntN(4) == 0 {
					stated.state(drawRow(random, now+max(0, random.Int64N(40)-20)), now)
					ran.current.Store(stated.load(now, &ran.limits))
				}
				if ran.loaded() == nil {
					continue
				}
				fresh := &Set{}
				fresh.current.Store(stated.load(now, &fresh.limits))
				limit, known := ran.loaded().limit("api", now)
				want, wanted := fresh.loaded().limit("api", now)
				require.Equal(t, wanted, known, now)
				require.Equal(t, want, limit, now)
				require.Equal(t, fresh.loaded().plansAt(now), ran.loaded().plansAt(now))
				if known && !slices.Contains(handed, limit) {
					handed = append(handed, limit)
				}
				for _, plan := range []string{"", "free", "none"} {
					for _, key := range []string{"ana", "bob"} {
						code := ratelimit.Define("api", ratelimit.PerDay(77)).For(key).Plan(plan)
						require.Equal(t, decides(t, fresh, now, code), decides(t, ran, now, code), "%d, code, %s, %s", now, plan, key)
						for _, earlier := range handed {
							if known {
								require.Equal(t, decides(t, fresh, now, want.For(key).Plan(plan)), decides(t, ran, now, earlier.For(key).Plan(plan)),
									"%d, stand-in %v, %s, %s", now, earlier, plan, key)
							}
						}
					}
				}
			}
		}
	})
}

func TestAPlanEndsWithItsRule(t *testing.T) {
	t.Parallel()
	var stated table
	free, err := rowOfRule(Rule{Plan: "free", Policy: ratelimit.PerMinute(5)})
	require.NoError(t, err)
	free.from = 10
	stated.state(free, 10)
	stated.state(row{of: OfRule, plan: "free", from: 20}, 12)
	loaded := stated.load(15, &definitions{})
	for _, at := range []int64{15, 19} {
		require.Equal(t, []string{"free"}, loaded.plansAt(at), at)
	}
	require.Nil(t, loaded.plansAt(20))
	require.NotNil(t, loaded.plansAt(19), "the clock stepped back")
}
