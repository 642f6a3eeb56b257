package ratelimit

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

func TestPoliciesRememberTheLastAndTheDistinctOnes(t *testing.T) {
	t.Parallel()
	p := &policies{}
	_, known := p.last("limit")
	require.False(t, known)
	require.Empty(t, p.seen("limit"))
	policy := func(rate float64) *bucket.Terms { return &bucket.Terms{Rate: rate} }
	for _, rate := range []float64{1, 2, 2, 1, 3, 1} {
		p.note("limit", policy(rate))
		last, known := p.last("limit")
		require.True(t, known)
		require.Equal(t, rate, last.Rate)
	}
	require.Equal(t, []bucket.Terms{{Rate: 1}, {Rate: 2}, {Rate: 3}}, p.seen("limit"))

	for n := range 2 * maxPolicies {
		p.note("limit", policy(float64(100+n)))
	}
	require.Len(t, p.seen("limit"), maxPolicies)
	for _, t2 := range p.seen("limit") {
		require.GreaterOrEqual(t, t2.Rate, float64(100+maxPolicies), "the older ones give way")
	}
	for n := range 2 * maxNames {
		p.note(fmt.Sprint("limit ", n), policy(1))
	}
	require.EqualValues(t, maxNames, p.count.Load())
	last, known := p.last("limit")
	require.True(t, known)
	require.Equal(t, float64(100+2*maxPolicies-1), last.Rate)
}

func TestPoliciesAreNotedByManyAtOnce(t *testing.T) {
	t.Parallel()
	p := &policies{}
	var workers sync.WaitGroup
	for worker := range 8 {
		workers.Go(func() {
			for n := range 1000 {
				p.note(fmt.Sprint("limit ", n%10), &bucket.Terms{Rate: float64(1 + (n+worker)%4)})
			}
		})
	}
	workers.Wait()
	for n := range 10 {
		seen := p.seen(fmt.Sprint("limit ", n))
		require.Len(t, seen, 4, "each once: %v", seen)
	}
	require.EqualValues(t, 10, p.count.Load())
}

func TestNotingAKnownPolicyAllocatesNothing(t *testing.T) { //nolint:paralleltest // what others allocate meanwhile would count
	p := &policies{}
	free, pro := Define("plan", FixedWindow{Rate: 50, Period: Day}), Define("plan", FixedWindow{Rate: 500, Period: time.Hour})
	allocated := testing.AllocsPerRun(1000, func() {
		p.note(free.name, &free.terms)
		p.note(free.name, &free.terms)
		p.note(pro.name, &pro.terms)
	})
	require.Zero(t, allocated)
}
