package rules

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

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

// TestABoundingPolicyIsFullLast has buckets live through revisions, each full by the last of them or not, and asks
// whether what bounds the chain agrees that they are full only when they are.
func TestABoundingPolicyIsFullLast(t *testing.T) {
	t.Parallel()
	decided := 0
	for seed := range uint64(400) {
		random := rand.New(rand.NewPCG(seed, 7))
		revisions := make([]ratelimit.Policy, 1+random.IntN(3))
		b, all := bounds{name: "drawn", all: nowhere()}, nowhere()
		for i := range revisions {
			revisions[i] = drawPolicy(random)
			p, ok := pointOf(revisions[i])
			require.True(t, ok)
			all = all.with(p)
		}
		b.add(all)
		bounding := b.policy()
		for range 200 {
			some, _ := numbersOf(revisions[random.IntN(len(revisions))])
			value := some.Capacity / float64(some.Shards) * (2*random.Float64() - 1)
			spans, elapsed := make([]float64, len(revisions)), 0.0
			for i := range spans {
				spans[i] = math.Exp(random.Float64() * 41) // 20 years
				elapsed += spans[i]
			}
			if !isFullAfter([]ratelimit.Policy{bounding}, []float64{elapsed}, value) {
				continue
			}
			decided++
			require.True(t, isFullAfter(revisions, spans, value), "%v for %g, from %g, is full under %v", revisions, spans, value, bounding)
		}
	}
	require.Greater(t, decided, 2000, "the draw is of some use")
}

// isFullAfter reports whether a row that held value is full after it has lived through the revisions, in every phase of
// their windows. A full row stays full.
func isFullAfter(revisions []ratelimit.Policy, spans []float64, value float64) (full bool) {
	for i, policy := range revisions {
		n, _ := numbersOf(policy)
		shards := float64(n.Shards)
		capacity := n.Capacity / shards
		if full {
			value = capacity
		}
		periods := spans[i] / float64(n.Period)
		if n.Kind != ratelimit.KindTokenBucket {
			periods = math.Floor(periods)
		}
		value = min(capacity, value+periods*n.Rate/shards)
		full = value >= capacity*(1-1e-12)
	}
	return full
}

func TestRulingsOf(t *testing.T) {
	t.Parallel()
	code := ratelimit.Define("messages", ratelimit.PerMinute(10))
	// set returns a Set of rows that hold since long ago.
	set := func(rows ...row) *Set {
		s := &Set{}
		for i := range rows {
			rows[i].from = 5
		}
		s.current.Store(compile(&loaded{now: time.Now().UnixMicro(), rows: rows}, &s.limits))
		return s
	}
	// policyOf returns the policy that bounds.
	policyOf := func(s *Set) ratelimit.Policy { return boundsOf(s.current.Load().limits["messages"]).policy() }
	// most returns its capacity.
	most := func(s *Set) float64 {
		n, _ := numbersOf(policyOf(s))
		return n.Capacity
	}
	override := func(o Override) row {
		o.Limit = "messages"
		r, err := rowOfOverride(o)
		require.NoError(t, err)
		return r
	}
	rule := func(policy ratelimit.TokenBucket, change ratelimit.OnChange) row {
		policy.Period = time.Minute
		r, err := rowOfRule(Rule{Limit: "messages", Policy: policy, OnChange: change})
		require.NoError(t, err)
		return r
	}
	twenty := rule(ratelimit.TokenBucket{Rate: 20}, "")

	t.Run("KnowsRulesAndOverrides", func(t *testing.T) {
		t.Parallel()
		s := set(twenty, override(Override{Key: "ana", Policy: ratelimit.PerMinute(70)}), override(Override{Key: "eve", OnPlan: "pro"}))
		require.Equal(t, maxTokens, most(s), "the code's is not known, and no bucket is full")
		s.RulingFor(code, "", "bob")
		require.InEpsilon(t, 70, most(s), 1e-9)
		require.Empty(t, s.RulingsOf("other"))
		require.Len(t, s.RulingsOf("messages"), 1)
	})

	t.Run("KnowsThatOwedTokensGrow", func(t *testing.T) {
		t.Parallel()
		slowest := func(shards int, change ratelimit.OnChange) float64 {
			s := set(rule(ratelimit.TokenBucket{Rate: 1000, Shards: shards}, change))
			s.RulingFor(ratelimit.Define("messages", ratelimit.TokenBucket{Rate: 10, Period: time.Minute, Shards: shards}), "", "bob")
			p, _ := pointOf(boundsOf(s.current.Load().limits["messages"]).policy())
			return p.speed
		}
		require.InEpsilon(t, 100, slowest(0, ratelimit.KeepTokens)/slowest(0, ratelimit.ScaleTokens), 1e-6)
		require.InEpsilon(t, 100, slowest(4, ratelimit.KeepTokens)/slowest(4, ratelimit.ScaleTokens), 1e-6)
		require.InEpsilon(t, 100, slowest(4, ratelimit.AddTokens)/slowest(4, ratelimit.ScaleTokens), 1e-6)
	})

	t.Run("OneIsEnough", func(t *testing.T) {
		t.Parallel()
		rows := []row{twenty}
		for n := range 10_000 {
			rows = append(rows, override(Override{Key: fmt.Sprint(n), Multiplier: 1 + float64(n%7)/10}))
		}
		s := set(rows...)
		s.RulingFor(code, "", "0")
		require.InEpsilon(t, 32, most(s), 1e-9)
		first := s.RulingsOf("messages")
		require.Same(t, first[0], s.RulingsOf("messages")[0], "it is remembered, as Prune asks often")
	})

	t.Run("KnowsAMultipleOfTheCodes", func(t *testing.T) {
		t.Parallel()
		s := set(override(Override{Key: "ana", Multiplier: 3}))
		require.Equal(t, maxTokens, most(s))
		s.RulingFor(code, "", "ana")
		require.InEpsilon(t, 30, most(s), 1e-9)
		for n := range 40 {
			s.RulingFor(ratelimit.Define("messages", ratelimit.PerMinute(float64(n+1))), "", "ana")
		}
		require.Equal(t, maxTokens, most(s), "there are too many to know")
	})

	t.Run("KnowsPoliciesThatCannotBeCompared", func(t *testing.T) {
		t.Parallel()
		type tagged struct { // of a program
			ratelimit.TokenBucket
			tags []string
		}
		s := set(twenty, override(Override{Key: "ana", Multiplier: 2}))
		limit := ratelimit.Define("messages", tagged{ratelimit.PerMinute(30), []string{"chat"}})
		for _, key := range []string{"ana", "bob"} {
			require.NotNil(t, s.RulingFor(limit, "", key))
		}
		require.InEpsilon(t, 60, most(s), 1e-9)
	})

	t.Run("KnowsTheLimitsOfTheConfiguration", func(t *testing.T) {
		t.Parallel()
		pool, err := pgxpool.New(t.Context(), "postgres://nobody@localhost:1/none")
		require.NoError(t, err)
		defer pool.Close()
		s, err := NewSet(pool, Config{Limits: []ratelimit.Limit{code}})
		require.NoError(t, err)
		s.current.Store(compile(&loaded{rows: []row{twenty}}, &s.limits))
		require.InEpsilon(t, 20, most(s), 1e-9)
	})
}
