package integration_test

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// A credit returns exactly the charge in the decision, also if a rule has changed the limit since.
func TestACreditAtAPriceIsOfWhatWasCharged(t *testing.T) {
	t.Parallel()
	m := newMarket(t)
	adapts := func(contract ratelimit.Policy, apply bool) ratelimit.Policy {
		return ratelimit.Adaptive{Contract: contract, Apply: apply}
	}
	daily := ratelimit.CalendarWindow{Rate: 10, Resets: ratelimit.Daily}
	for name, test := range map[string]struct {
		before, after ratelimit.Policy
		told, charged float64 // at a share of a quarter
	}{
		"TurnedOn":           {adapts(hoard(1000), false), adapts(hoard(1000), true), 4, 1},
		"TurnedOff":          {adapts(hoard(1000), true), adapts(hoard(1000), false), 4, 4},
		"Stays":              {adapts(hoard(1000), true), adapts(hoard(1000), true), 4, 4},
		"InShadow":           {adapts(hoard(1000), false), adapts(hoard(1000), false), 4, 1},
		"ToABucket":          {adapts(hoard(1000), true), hoard(1000), 4, 4},
		"FromABucket":        {hoard(1000), adapts(hoard(1000), true), 1, 1},
		"MoreThanTheWindow":  {adapts(daily, true), adapts(hoard(1000), true), 4, 10. / 3},
		"TheWindowToABucket": {adapts(daily, true), hoard(1000), 4, 10. / 3},
	} {
		t.Run(name, func(t *testing.T) { // not parallel: they share the clock
			for _, c := range testsize.Of(callers()[3:], callers()) {
				request := upstreamInCode.For(name + c.name).Cost(3)
				m.set(clockNoon)
				m.share(t, "upstream", name+c.name, 0.25)
				m.limiter = m.with(t, ratelimit.Config{AsOf: m.now, Policies: m.upstreamRule(t, time.Minute, adapts(hoard(1000), true), test.before, test.after)})
				learn(t, m.limiter, request, 4)
				m.set(clockNoon.Add(time.Minute))
				v, err := m.limiter.Value(t.Context(), request)
				require.NoError(t, err)
				d, err := c.take(t.Context(), m.db(), m.limiter, request)
				require.NoError(t, err)
				require.True(t, d.Allowed)
				require.InDelta(t, test.told, d.States[0].Price, 1e-9)
				require.InDelta(t, test.charged, d.States[0].Charged, 1e-9)
				m.holds(t, request, v.Tokens-3*test.charged)
				m.set(clockNoon.Add(2 * time.Minute))
				require.NoError(t, m.limiter.Charge(t.Context(), request.Price(0).Cost(200))) // so that it does not become full
				before, err := m.limiter.Value(t.Context(), request)
				require.NoError(t, err)
				require.NoError(t, m.limiter.CreditTaken(t.Context(), d.At, request.Price(d.States[0].Charged)))
				m.holds(t, request, before.Tokens+3*test.charged)
			}
		})
	}
}

// So it is of a call in the midst of which the rule turns the price on, or off.
func TestWhatIsChargedWhileAPriceIsTurnedOn(t *testing.T) {
	t.Parallel()
	applied, shadow := ratelimit.Adaptive{Contract: hoard(1000), Apply: true}, ratelimit.Adaptive{Contract: hoard(1000)}
	for name, policies := range map[string][]ratelimit.Policy{"On": {shadow, applied}, "Off": {applied, shadow}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m, charged := newMarket(t), map[float64]int{}
			m.share(t, "upstream", "account", 0.25)
			request := upstreamInCode.For("account").Cost(3)
			for reads := range int64(8) {
				var left atomic.Int64
				left.Store(1 << 40)
				m.limiter = m.with(t, ratelimit.Config{Policies: m.upstreamRule(t, time.Minute, policies...), AsOf: func() time.Time {
					if left.Add(-1) >= 0 {
						return clockNoon.Add(time.Minute - time.Microsecond)
					}
					return clockNoon.Add(time.Minute)
				}})
				learn(t, m.limiter, request, 4)
				require.NoError(t, m.limiter.Reset(t.Context(), request))
				require.NoError(t, m.limiter.Charge(t.Context(), request.Price(0).Cost(500)))
				left.Store(reads)
				d, err := m.limiter.Take(t.Context(), request)
				require.NoError(t, err)
				left.Store(0)
				m.holds(t, request, 500-3*d.States[0].Charged)
				require.NoError(t, m.limiter.CreditTaken(t.Context(), d.At, request.Price(d.States[0].Charged)))
				m.holds(t, request, 500)
				charged[d.States[0].Charged]++
			}
			require.Len(t, charged, 2, "of %v", charged)
		})
	}
}

// For a limit that has never charged a price none is given back.
func TestAPriceThatNobodyCharged(t *testing.T) {
	t.Parallel()
	m := newMarket(t)
	for _, policy := range []ratelimit.Policy{hoard(1000), ratelimit.Adaptive{Contract: hoard(1000)}} {
		request := ratelimit.Define("plain", policy).For("account").Cost(3).Price(4)
		require.NoError(t, m.limiter.Reset(t.Context(), request))
		require.NoError(t, m.limiter.Charge(t.Context(), request.Cost(500)))
		d, err := m.limiter.Take(t.Context(), request)
		require.NoError(t, err)
		require.InDelta(t, 1, d.States[0].Charged, 0)
		m.holds(t, request, 497)
		require.NoError(t, m.limiter.CreditTaken(t.Context(), d.At, request))
		m.holds(t, request, 500)
	}
}
