package ratelimit

import (
	"context"
	"math"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A limit in shadow mode refuses no request, and the hook is called with Shadow set.
func TestRefusalsOfALimitThatIsNotEnforcedAreShadows(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		mode   Mode
		shadow bool
	}{
		{"", false},
		{On, false},
		{Shadow, true},
		{Off, true},
	} {
		var told []Refusal
		r := &reports{refused: func(_ context.Context, refusal Refusal) { told = append(told, refusal) }}
		c := calling(t, Define("tried", PerMinute(1)).For("key"), Define("asked", PerMinute(1)).For("key"))
		c.Verb = "take"
		d := Decision{Allowed: test.shadow, At: instant, States: []State{
			{Limit: c.plan.of[c.plan.asked[0].ask].limit, Rule: "by plan", Mode: test.mode}, {Allowed: true},
		}}
		r.refusals(t.Context(), c, &d)
		require.Equal(t, []Refusal{{Limit: "tried", Key: "key", Rule: "by plan", Cost: 1, At: instant, Shadow: test.shadow}}, told)
	}
}

// The hook costs a refusal no allocation.
func TestRefusedAllocatesNothing(t *testing.T) { //nolint:paralleltest // what others allocate meanwhile would count
	request := Define("sendMessage", PerMinute(10)).For("alice")
	calls := 0
	// perTen returns the fewest allocations of ten refusals. On a busy machine the garbage collector adds allocations to some runs,
	// but a hook that allocates adds them to each. A batch would add the allocations of its goroutine. A call that another test left
	// in the pool would save some, so two collections empty the pool.
	perTen := func(config Config) float64 {
		config.AsOf, config.NoBatching = func() time.Time { return instant }, true
		limiter, err := New(&answering{rows: oneRow{value: 0.5}}, config)
		require.NoError(t, err)
		ctx := WithRoute(t.Context(), "POST /messages")
		refuse := func() { calls++; _, _ = limiter.Take(ctx, request) }
		runtime.GC()
		runtime.GC()
		refuse()
		fewest := math.Inf(1)
		for range 20 {
			fewest = min(fewest, testing.AllocsPerRun(5, func() {
				for range 10 {
					refuse()
				}
			}))
		}
		return fewest
	}
	var told int
	hook := func(_ context.Context, r Refusal) {
		if r.Key == "alice" && r.Route == "POST /messages" {
			told++
		}
	}
	require.InDelta(t, perTen(Config{}), perTen(Config{Refused: hook}), 5, "of ten refusals")
	require.InDelta(t, perTen(Config{RefusalCache: 10}), perTen(Config{RefusalCache: 10, Refused: hook}), 5, "of ten refusals")
	require.Equal(t, calls/2, told, "half of the calls have the hook")
}
