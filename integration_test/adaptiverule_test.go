package integration_test

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// upstreamRule gives the limit "upstream" a rule with these policies, one a minute from noon on.
func (m *market) upstreamRule(t *testing.T, policies ...ratelimit.Policy) eraRules {
	t.Helper()
	eras := make([]ratelimit.Era, len(policies))
	for i, policy := range policies {
		eras[i] = ratelimit.Era{Policy: policy, From: clockNoon.Add(time.Duration(i) * time.Minute), Name: fmt.Sprint("era ", i)}
	}
	rule, err := ratelimit.NewRuling(upstreamInCode, ratelimit.RulingConfig{Eras: eras})
	require.NoError(t, err)
	return eraRules{"upstream": rule}
}

// upstreamInCode is what the code says of that limit.
var upstreamInCode = ratelimit.Define("upstream", ratelimit.Adaptive{Contract: hoard(1e6), Apply: true})

// A rule that changes an adaptive limit changes the price exactly from its instant on. A reservation is settled, and a decision is
// credited, at its original price, also if the limit has changed.
func TestAdaptiveWhoseRuleChanges(t *testing.T) {
	t.Parallel()
	m := newMarket(t)
	adapts := func(contract ratelimit.Policy, floor float64, apply bool) ratelimit.Policy {
		return ratelimit.Adaptive{Contract: contract, Floor: floor, Apply: apply}
	}
	daily := ratelimit.CalendarWindow{Rate: 1000, Resets: ratelimit.Daily, Zone: "Europe/Berlin"}
	for name, test := range map[string]struct {
		before, after ratelimit.Policy
		told, charged [2]float64 // prices, at a share of a quarter
	}{
		"Contract":    {adapts(hoard(1000), 0, true), adapts(hoard(3000), 0, true), [2]float64{4, 4}, [2]float64{4, 4}},
		"HigherFloor": {adapts(hoard(1000), 0.1, true), adapts(hoard(1000), 0.5, true), [2]float64{4, 2}, [2]float64{4, 2}},
		"LowerFloor":  {adapts(hoard(1000), 0.5, true), adapts(hoard(1000), 0.1, true), [2]float64{2, 4}, [2]float64{2, 4}},
		"TurnedOn":    {adapts(hoard(1000), 0, false), adapts(hoard(1000), 0, true), [2]float64{4, 4}, [2]float64{1, 4}},
		"TurnedOff":   {adapts(hoard(1000), 0, true), adapts(hoard(1000), 0, false), [2]float64{4, 4}, [2]float64{4, 1}},
		"ToABucket":   {adapts(hoard(1000), 0, true), hoard(1000), [2]float64{4, 1}, [2]float64{4, 1}},
		"FromABucket": {hoard(1000), adapts(hoard(1000), 0, true), [2]float64{1, 4}, [2]float64{1, 4}},
		"ToACalendar": {adapts(hoard(1000), 0, true), adapts(daily, 0, true), [2]float64{4, 4}, [2]float64{4, 4}},
		"ToAWindow":   {adapts(daily, 0, true), ratelimit.FixedWindow{Rate: 1000, Period: ratelimit.Day, Start: clockNoon.Add(-time.Hour)}, [2]float64{4, 1}, [2]float64{4, 1}},
	} {
		t.Run(name, func(t *testing.T) { // not parallel: they share the clock
			for _, c := range testsize.Of(callers()[3:], callers()) {
				request := upstreamInCode.For(name + c.name).Cost(3)
				m.set(clockNoon)
				m.share(t, "upstream", name+c.name, 0.25)
				rules := m.upstreamRule(t, adapts(hoard(1000), 0, true), test.before, test.after)
				m.limiter = m.with(t, ratelimit.Config{AsOf: m.now, Policies: rules})
				learn(t, m.limiter, request, 4) // while the first era holds, of which nothing is taken
				left := 1000.0
				take := func(at time.Duration, era int) ratelimit.Decision {
					m.set(clockNoon.Add(at))
					d, err := c.take(t.Context(), m.db(), m.limiter, request)
					require.NoError(t, err)
					require.True(t, d.Allowed)
					require.Equal(t, fmt.Sprint("era ", era), d.States[0].Rule)
					require.InDelta(t, test.told[era-1], d.States[0].Price, 1e-9)
					require.InDelta(t, 3, d.States[0].Cost, 0)
					require.InDelta(t, test.charged[era-1], d.States[0].Charged, 1e-9)
					left -= 3 * test.charged[era-1]
					m.holds(t, request, left)
					return d
				}
				first := take(time.Minute, 1)
				var ids [2]string
				for i := range ids {
					r, err := m.limiter.Reserve(t.Context(), request)
					require.NoError(t, err)
					require.True(t, r.Allowed)
					ids[i] = r.ID
					left -= 3 * test.charged[0]
				}
				take(2*time.Minute-time.Microsecond, 1)
				take(2*time.Minute, 2)
				require.NoError(t, m.limiter.Settle(t.Context(), ids[0], request.Cost(5)))
				left -= 2 * test.charged[0]
				m.holds(t, request, left)
				require.NoError(t, m.limiter.Cancel(t.Context(), ids[1]))
				left += 3 * test.charged[0]
				m.holds(t, request, left)
				require.NoError(t, errOf(m.limiter.Renew(t.Context(), ids[1])))
				left -= 3 * test.charged[0]
				m.holds(t, request, left)
				require.NoError(t, m.limiter.CreditTaken(t.Context(), first.At, request.Price(first.States[0].Charged)))
				left += 3 * test.charged[0]
				m.holds(t, request, left)
			}
		})
	}
}

// If a rule makes an adaptive limit another kind, the pause that its upstream requested ends for all calls. It continues if another
// rule makes the limit adaptive again.
func TestAPauseOfAnUpstreamWhoseRuleChanges(t *testing.T) {
	t.Parallel()
	onEach(t, testAPauseOfAnUpstreamWhoseRuleChanges, onPostgres, inMemory)
}

func testAPauseOfAnUpstreamWhoseRuleChanges(t *testing.T, on backend) {
	applied, shadow := ratelimit.Adaptive{Contract: hoard(1000), Apply: true}, ratelimit.Adaptive{Contract: hoard(1000)}
	for name, policy := range map[string]ratelimit.Policy{"ToABucket": hoard(1000), "TurnedOff": shadow} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newMarketOn(t, on)
			rules := m.upstreamRule(t, applied, policy, applied)
			m.limiter = m.with(t, ratelimit.Config{AsOf: m.now, Policies: rules})
			request := upstreamInCode.For("account")
			r, err := m.limiter.Reserve(t.Context(), request)
			require.NoError(t, err)
			require.NoError(t, m.limiter.Report(t.Context(), request, ratelimit.Outcome{Throttled: true, RetryAfter: time.Hour}))
			for _, step := range []struct {
				at     time.Duration
				paused bool
			}{{time.Minute - time.Microsecond, true}, {time.Minute, false}, {2*time.Minute - time.Microsecond, false}, {2 * time.Minute, true}} {
				m.set(clockNoon.Add(step.at))
				require.NoError(t, m.limiter.Report(t.Context(), request, ratelimit.Outcome{}), "a program reports whatever the rule says")
				slot, err := m.limiter.Start(t.Context(), r.ID) // before any other call that decides
				require.NoError(t, err)
				require.Equal(t, step.paused, slot.Wait > 0, "start after %v", step.at)
				made, err := m.limiter.CheckReserve(t.Context(), request)
				require.NoError(t, err)
				require.Equal(t, step.paused, made.ReadyAt.After(m.now()))
				d, err := m.limiter.Take(t.Context(), request)
				require.NoError(t, err)
				require.Equal(t, step.paused, !d.Allowed, "take after %v", step.at)
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
				m.limiter = m.with(t, ratelimit.Config{Policies: m.upstreamRule(t, policies...), AsOf: func() time.Time {
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
