package rules

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// isFull reports whether a row that held value so many nanoseconds ago is full under a policy, whatever the phase of its
// windows.
func isFull(policy ratelimit.Policy, value, elapsed float64) bool {
	n, _ := numbersOf(policy)
	periods := elapsed / float64(n.period)
	if n.window {
		periods = math.Floor(periods)
	}
	shards := float64(n.shards)
	return value+periods*n.rate/shards >= n.capacity/shards*(1-1e-12)
}

// drawPolicy draws any policy that may be.
func drawPolicy(random *rand.Rand) ratelimit.Policy {
	for {
		rate, period := math.Exp(random.Float64()*48-20), time.Duration(math.Exp(random.Float64()*36+6))/1000*1000
		capacity, shards := rate*math.Exp(random.Float64()*10-5), 1<<random.IntN(7)
		var policy ratelimit.Policy = ratelimit.TokenBucket{Rate: rate, Period: period, Capacity: capacity, Shards: shards}
		if random.IntN(2) == 0 {
			policy = ratelimit.FixedWindow{Rate: rate, Period: period, Capacity: capacity, Shards: shards}
		}
		if _, err := ratelimit.NewLimit("drawn", policy); err == nil {
			return policy
		}
	}
}

func TestBoundsAreFullLast(t *testing.T) {
	t.Parallel()
	decided := 0
	for seed := range uint64(300) {
		random := rand.New(rand.NewPCG(seed, 7))
		b, policies := bounds{name: "drawn"}, make([]ratelimit.Policy, 1+random.IntN(4))
		for i := range policies {
			policies[i] = drawPolicy(random)
			b.add(policies[i])
		}
		bounding := b.policies()
		require.NotEmpty(t, bounding)
		for range 200 {
			some, _ := numbersOf(policies[random.IntN(len(policies))])
			value := some.capacity / float64(some.shards) * (2*random.Float64() - 1)
			elapsed := math.Exp(random.Float64() * 43)
			full := true
			for _, policy := range bounding {
				full = full && isFull(policy, value, elapsed)
			}
			if !full {
				continue
			}
			decided++
			for _, policy := range policies {
				require.True(t, isFull(policy, value, elapsed), "%v: %g, %g ns later, is full under %v", policy, value, elapsed, bounding)
			}
		}
	}
	require.Greater(t, decided, 5000, "the draw is of some use")
}

func TestRulesOf(t *testing.T) {
	t.Parallel()
	code := ratelimit.Define("messages", ratelimit.PerMinute(10))
	// set returns a Set of what is loaded.
	set := func(l loaded) *Set {
		s := &Set{}
		l.now = time.Now().UnixMicro()
		s.current.Store(compile(&l, nil, &s.limits))
		return s
	}
	// most returns the largest capacity of the rules.
	most := func(s *Set) (capacity float64) {
		of := s.current.Load().limits["messages"]
		b := bounds{name: "messages"}
		b.addAll(of)
		for _, policy := range b.policies() {
			n, _ := numbersOf(policy)
			capacity = max(capacity, n.capacity)
		}
		return capacity
	}
	override := func(key string, times float64) loadedOverride {
		return loadedOverride{"messages", key, 5, overrideRow{Multiplier: &times}}
	}
	rule := func(rate float64) loadedRule {
		return loadedRule{name: "messages", from: 5, row: ruleRowOf(Rule{Rate: rate, Period: time.Minute})}
	}

	t.Run("KnowsRulesAndOverrides", func(t *testing.T) {
		t.Parallel()
		s := set(loaded{rules: []loadedRule{rule(20)}, overrides: []loadedOverride{{
			"messages", "ana", 5, overrideRow{Policy: new(policyRowOf(Rule{Rate: 70, Period: time.Minute}))},
		}}})
		require.InEpsilon(t, 70, most(s), 1e-9)
		require.Empty(t, s.RulesOf("other"))
		require.Len(t, s.RulesOf("messages"), 2)
	})

	t.Run("FewAreEnough", func(t *testing.T) {
		t.Parallel()
		l := loaded{rules: []loadedRule{rule(20)}}
		for n := range 10_000 {
			l.overrides = append(l.overrides, override(fmt.Sprint(n), 1+float64(n%7)/10))
		}
		s := set(l)
		s.RuleFor(code, "", "0")
		require.InEpsilon(t, 32, most(s), 1e-9)
		require.LessOrEqual(t, len(s.RulesOf("messages")), 2)
	})

	t.Run("AMultipleOfTheCodesIsNeverFullUntilThatIsKnown", func(t *testing.T) {
		t.Parallel()
		s := set(loaded{overrides: []loadedOverride{override("ana", 3)}})
		require.Equal(t, maxTokens, most(s))
		s.RuleFor(code, "", "ana")
		require.InEpsilon(t, 30, most(s), 1e-9)
		for n := range 40 {
			s.RuleFor(ratelimit.Define("messages", ratelimit.PerMinute(float64(n+1))), "", "ana")
		}
		require.Equal(t, maxTokens, most(s), "there are too many to know")
	})
}
