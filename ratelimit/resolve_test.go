package ratelimit

import (
	"context"
	"fmt"
	"log"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// use notes a limit.
func (p *policies) use(limit Limit) { p.note(limit.Name(), limit) }

// used returns a limit of that name with only a rate.
func used(name string, rate float64) Limit {
	return limitOf(name, madeElsewhere{}, bucket.Terms{Rate: rate})
}

func TestPoliciesRememberTheLastAndTheDistinctOnes(t *testing.T) {
	t.Parallel()
	p := &policies{}
	_, known := p.last("limit")
	require.False(t, known)
	require.Empty(t, p.seen("limit"))
	for _, rate := range []float64{1, 2, 2, 1, 3, 1} {
		p.use(used("limit", rate))
		last, known := p.last("limit")
		require.True(t, known)
		require.Equal(t, rate, last.Rate)
	}
	require.Equal(t, []bucket.Terms{{Rate: 1}, {Rate: 2}, {Rate: 3}}, p.seen("limit"))

	for n := range 2 * maxPolicies {
		p.use(used("limit", float64(100+n)))
	}
	require.Len(t, p.seen("limit"), maxPolicies)
	for _, t2 := range p.seen("limit") {
		require.GreaterOrEqual(t, t2.Rate, float64(100+maxPolicies), "the older ones give way")
	}
	for n := range 2 * maxNames {
		p.use(used(fmt.Sprint("limit ", n), 1))
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
				p.use(used(fmt.Sprint("limit ", n%10), float64(1+(n+worker)%4)))
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
		p.use(free)
		p.use(free)
		p.use(pro)
	})
	require.Zero(t, allocated)
}

// heardEvents is an Observer that collects its events.
type heardEvents struct {
	mu     sync.Mutex
	events []Event
}

func (h *heardEvents) Observe(_ context.Context, event Event) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.events = append(h.events, event)
}

// TestANameWithTwoPoliciesIsToldOnce: of all calls under two policies, only the first that differs is reported.
func TestANameWithTwoPoliciesIsToldOnce(t *testing.T) {
	t.Parallel()
	heard := &heardEvents{}
	limiter, err := New(&answering{}, Config{Observer: heard})
	require.NoError(t, err)
	api, more := Define("api", PerHour(10)), Define("api", PerHour(20))
	same := Define("api", TokenBucket{Rate: 10, Period: time.Hour, Capacity: 10})
	limiter.Resolve(api.For("ada"))
	limiter.Resolve(same.For("ada"))
	require.Empty(t, heard.events, "one policy in other words")
	var callers sync.WaitGroup
	for range 8 {
		callers.Go(func() {
			limiter.Resolve(more.For("ada"))
			limiter.Resolve(api.For("bob"))
			limiter.WithTx(nil).Resolve(Define("api", PerHour(30)).For("ada"))
		})
	}
	callers.Wait()
	require.Len(t, heard.events, 1)
	told := heard.events[0].(Redefined)
	require.Equal(t, "api", told.Limit)
	require.Equal(t, api.Policy(), told.Before)
	require.Contains(t, []Policy{PerHour(20), PerHour(30)}, told.Policy)
}

// TestANameWithTwoPoliciesIsLoggedOnce: without an Observer, slog has it.
//
//nolint:paralleltest // it replaces slog's default logger
func TestANameWithTwoPoliciesIsLoggedOnce(t *testing.T) {
	var text strings.Builder
	logger, output, flags := slog.Default(), log.Writer(), log.Flags()
	t.Cleanup(func() {
		slog.SetDefault(logger)
		log.SetOutput(output)
		log.SetFlags(flags)
	})
	slog.SetDefault(slog.New(slog.NewTextHandler(&text, nil)))
	limiter, err := New(&answering{}, Config{})
	require.NoError(t, err)
	for range 3 {
		limiter.Resolve(Define("api", PerHour(10)).For("ada"))
		limiter.Resolve(Define("api", PerHour(20)).For("ada"))
	}
	require.Equal(t, 1, strings.Count(text.String(), "\n"), text.String())
	require.Contains(t, text.String(), `level=WARN msg="ratelimit: one name, two policies`)
	require.Contains(t, text.String(), `limit=api before="10 per hour" policy="20 per hour"`)
}
