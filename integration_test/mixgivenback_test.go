package integration_test

import (
	"context"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// If this Limiter returns tokens, of any kind of limit, it drops the cached refusal: it never repeats a refusal that the table
// would not make.
func TestARememberedRefusalOfEveryKindIsForgotten(t *testing.T) {
	t.Parallel()
	b, now := setup(t), &clock{}
	now.set(springNight)
	limits, rules := answerable(t)
	limits = append(limits, ratelimit.Define("slots", ratelimit.Concurrency{Most: 4, Lease: 24 * time.Hour}))
	observed := &leaseEvents{}
	l := b.with(t, ratelimit.Config{AsOf: now.now, Policies: rules, RefusalCache: 1000, Observer: observed})
	for _, limit := range limits {
		if limit.Name() == "shadows" { // which refuses no call
			continue
		}
		_, holds := limit.Policy().(ratelimit.Concurrency)
		for _, several := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/Several=%v", limit.Name(), several), func(t *testing.T) { // not parallel: they share the observer
				request := limit.For(t.Name())
				requests := []ratelimit.Request{request}
				if several {
					requests = append(requests, roomy.For(t.Name()))
				}
				var lease ratelimit.Lease
				ask := func() bool {
					if holds {
						asked, err := l.Acquire(t.Context(), requests...)
						require.NoError(t, err)
						if asked.Allowed {
							lease = asked
						}
						return asked.Allowed
					}
					d, err := l.Take(t.Context(), requests...)
					require.NoError(t, err)
					return d.Allowed
				}
				empty := func() {
					for ask() {
					}
					observed.events = nil
					require.False(t, ask())
					require.False(t, ask())
					cached := 0
					for _, event := range observed.events {
						if decided, is := event.(ratelimit.Decided); is && decided.Cached {
							cached++
						}
					}
					require.Equal(t, map[bool]int{false: 2, true: 0}[holds], cached, "slots are given back by anybody")
				}
				ways := map[string]func() error{"Reset": func() error { return l.Reset(t.Context(), requests...) }}
				if holds {
					ways["Release"] = func() error { return l.Release(t.Context(), lease.ID) }
				} else {
					ways["Credit"] = func() error { return l.Credit(t.Context(), request) }
					ways["CreditTaken"] = func() error { return l.CreditTaken(t.Context(), now.now(), request) }
				}
				for name, giveBack := range ways {
					empty()
					require.NoError(t, giveBack(), name)
					require.True(t, ask(), name)
				}
				if r, err := l.Reserve(t.Context(), request); err == nil && r.Allowed {
					for name, end := range map[string]func(id string) error{
						"Cancel": func(id string) error { return l.Cancel(t.Context(), id) },
						"Settle": func(id string) error { return l.Settle(t.Context(), id, request.Cost(0)) },
					} {
						require.NoError(t, l.Reset(t.Context(), request))
						r, err = l.Reserve(t.Context(), request)
						require.NoError(t, err)
						empty()
						require.NoError(t, end(r.ID), name)
						require.True(t, ask(), name)
					}
				}
			})
		}
	}
}

// Wait takes available tokens at their price, and refuses at once if the tokens arrive after the deadline. It then reserves
// nothing. This holds for limits that a rule makes adaptive or calendar windows.
func TestWaitUnderRulesOfOtherKinds(t *testing.T) {
	t.Parallel()
	m := newMarket(t)
	daily := ratelimit.CalendarWindow{Rate: 100, Resets: ratelimit.Daily, Zone: "Europe/Berlin"} // at noon UTC eleven hours are left
	for name, test := range map[string]struct {
		policy ratelimit.Policy
		price  float64
		after  time.Duration // until there are 20 more
	}{
		"Calendar":       {daily, 1, 11 * time.Hour},
		"AdaptiveDaily":  {ratelimit.Adaptive{Contract: daily, Apply: true}, 4, 11 * time.Hour},
		"AdaptiveBucket": {ratelimit.Adaptive{Contract: ratelimit.TokenBucket{Rate: 100, Period: 50 * time.Hour}, Apply: true}, 4, 40 * time.Hour},
		"InShadow":       {ratelimit.Adaptive{Contract: ratelimit.TokenBucket{Rate: 100, Period: 50 * time.Hour}}, 1, 10 * time.Hour},
	} {
		t.Run(name, func(t *testing.T) { // not parallel: they share the clock
			m.set(clockNoon)
			request := upstreamInCode.For(name).Cost(20)
			m.share(t, "upstream", name, 0.25)
			m.limiter = m.with(t, ratelimit.Config{AsOf: m.now, Policies: m.upstreamRule(t, time.Hour, test.policy)})
			if _, adapts := test.policy.(ratelimit.Adaptive); adapts {
				learn(t, m.limiter, request, 4)
			}
			wait := func(deadline time.Duration) ratelimit.Decision {
				ctx, cancel := context.WithTimeout(t.Context(), deadline)
				defer cancel()
				d, err := m.limiter.Wait(ctx, request)
				require.NoError(t, err)
				return d
			}
			left := 100.0
			for range int(math.Floor(100 / (20 * test.price))) {
				require.True(t, wait(time.Minute).Allowed, "it is there")
				left -= 20 * test.price
				m.holds(t, request, left)
			}
			if left > 0 {
				require.NoError(t, m.limiter.Charge(t.Context(), request.Price(1).Cost(left)))
			}
			refused := wait(5 * time.Hour)
			require.False(t, refused.Allowed)
			m.holds(t, request, 0)
			require.Zero(t, m.count(t, `SELECT count(*) FROM ratelimit.reservations`), "nothing is left reserved")
			looked, err := m.limiter.CheckReserve(t.Context(), request)
			require.NoError(t, err)
			require.True(t, looked.Allowed)
			switch { // a window gives ahead of time what the next one brings
			case test.policy == ratelimit.Policy(daily), name == "AdaptiveDaily":
				require.Equal(t, test.after, looked.Delay())
			default:
				require.InDelta(t, test.after, looked.Delay(), float64(time.Millisecond))
			}
			if adaptive, adapts := test.policy.(ratelimit.Adaptive); adapts && adaptive.Apply {
				require.NoError(t, m.limiter.Reset(t.Context(), request))
				require.NoError(t, m.limiter.Report(t.Context(), request, ratelimit.Outcome{Throttled: true, RetryAfter: 2 * time.Hour}))
				paused := wait(time.Hour)
				require.False(t, paused.Allowed, "for longer than there is time")
				require.Equal(t, 2*time.Hour, paused.RetryAfter)
			}
		})
	}
}
