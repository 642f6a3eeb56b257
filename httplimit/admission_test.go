package httplimit_test

import (
	"context"
	"math"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// within serves one request of ada's by config, and lets work have the admission.
func (b *bundle) within(t *testing.T, config httplimit.Config, work func(ctx context.Context, a *httplimit.Admission)) {
	t.Helper()
	ran := false
	w := do(b.limited(t, config, inline(func(e exchange) {
		require.NotNil(t, e.admission)
		work(e.r.Context(), e.admission)
		ran = true
	})), request(t))
	require.True(t, ran, "status %d", w.Code)
}

var planLimit = httplimit.Limit{Limit: perPlan, Key: user, Cost: httplimit.FixedCost(10)}

func TestAHandlerSeesWhatIsLeft(t *testing.T) {
	t.Parallel()
	b := setup(t)
	_, ok := httplimit.FromContext(t.Context())
	require.False(t, ok)
	b.within(t, limits(userLimit, planLimit), func(_ context.Context, a *httplimit.Admission) {
		require.True(t, a.Decision().Allowed)
		require.Len(t, a.Decision().States, 2)
		state, ok := a.State(perPlan)
		require.True(t, ok)
		require.Equal(t, 90.0, state.Remaining)
		_, ok = a.State(everyone)
		require.False(t, ok)
	})
}

func TestSettleBooksTheRealCost(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ actual, charged float64 }{
		"Less":      {4, 4},
		"Nothing":   {0, 0},
		"AsMuch":    {10, 10},
		"About":     {10 + 1e-12, 10},
		"More":      {25, 25},
		"BelowZero": {250, 250}, // of 100
	} {
		b := setup(t)
		b.within(t, limits(userLimit, planLimit), func(ctx context.Context, a *httplimit.Admission) {
			require.NoError(t, a.Settle(ctx, c.actual, perPlan))
			require.NoError(t, a.Settle(ctx, 77, perPlan), "it is settled once")
			require.NoError(t, a.Credit(ctx))
		})
		require.Equal(t, c.charged, b.charged(t, perPlan.For("ada")), name)
		require.Zero(t, b.charged(t, perUser.For("ada")), "Credit gives back what is not settled")
	}
}

func TestSettleSeveralLimitsAtOnce(t *testing.T) {
	t.Parallel()
	b := setup(t)
	handler := b.limited(t, limits(httplimit.Limit{Limit: everyone, Global: true, Cost: httplimit.FixedCost(30)}),
		b.limited(t, limits(userLimit, planLimit), inline(func(e exchange) {
			_, ok := e.admission.State(everyone)
			require.True(t, ok, "that of the middleware around it")
			require.NoError(t, e.admission.Settle(e.r.Context(), 20, perPlan, everyone))
		})))
	do(handler, request(t))
	require.Equal(t, 20.0, b.charged(t, perPlan.For("ada")))
	require.Equal(t, 20.0, b.charged(t, everyone.Global()))
	require.Equal(t, 1.0, b.charged(t, perUser.For("ada")))
}

func TestSettleIsDoneOnceByMany(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.within(t, limits(planLimit), func(ctx context.Context, a *httplimit.Admission) {
		ctx, cancel := context.WithCancel(ctx)
		cancel() // a settlement outlives the request
		var group errgroup.Group
		for range 8 {
			group.Go(func() error { return a.Settle(ctx, 25, perPlan) })
		}
		require.NoError(t, group.Wait())
	})
	require.Equal(t, 25.0, b.charged(t, perPlan.For("ada")))
}

func TestSettleRefusesWhatCannotBe(t *testing.T) {
	t.Parallel()
	b := setup(t)
	never := httplimit.Limit{Limit: everyone, Global: true, When: func(*http.Request) bool { return false }}
	b.within(t, limits(planLimit, never), func(ctx context.Context, a *httplimit.Admission) {
		for _, actual := range []float64{-1, math.NaN(), math.Inf(1)} {
			require.ErrorIs(t, a.Settle(ctx, actual, perPlan), ratelimit.ErrInvalidCost)
		}
		require.ErrorIs(t, a.Settle(ctx, 1, perPlan, perUser), httplimit.ErrNoLimit)
		require.NoError(t, a.Settle(ctx, 5, everyone), "the rule did not apply")
		require.ErrorIs(t, a.Settle(ctx, 1e300, perPlan), ratelimit.ErrCostExceedsCapacity)
		require.NoError(t, a.Settle(ctx, 7, perPlan), "after an error it can be settled again")
	})
	require.Equal(t, 7.0, b.charged(t, perPlan.For("ada")))
	require.Zero(t, b.charged(t, everyone.Global()))
}

// TestNothingIsGivenBackToALaterWindow promises that tokens of a window that has ended are gone, and that the
// overrun is taken from the current one.
func TestNothingIsGivenBackToALaterWindow(t *testing.T) {
	t.Parallel()
	rule := httplimit.Limit{Limit: windowed, Key: user, Cost: httplimit.FixedCost(4)}
	for actual, charged := range map[float64]float64{1: 5, 6: 7} { // beside the 5 of the next window
		b := setup(t)
		b.clock.Set(ten.Add(time.Hour - time.Microsecond)) // the window ends while the handler works
		b.within(t, limits(rule), func(ctx context.Context, a *httplimit.Admission) {
			b.clock.Set(ten.Add(time.Hour))
			b.take(t, windowed.For("ada").Cost(5))
			require.NoError(t, a.Settle(ctx, actual, windowed))
		})
		require.Equal(t, charged, b.charged(t, windowed.For("ada")))
	}
}
