package integration_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// A credit at the instant at which a rule changes the kind of a limit counts once, by the policy before or after, and both allow
// it. A process whose clock is before the change does not apply a third policy.
func TestWhatIsGivenBackWhileTheKindChanges(t *testing.T) {
	t.Parallel()
	const capacity, spent, taken = 80.0, 40.0, 4.0
	day := ratelimit.FixedWindow{Rate: capacity, Period: ratelimit.Day, Start: clockNoon.Add(-6 * time.Hour)}
	hour := ratelimit.FixedWindow{Rate: capacity, Period: time.Hour, Start: clockNoon.Add(-30 * time.Minute)}
	dayOnRows := day
	dayOnRows.Shards = 4
	daily := ratelimit.CalendarWindow{Rate: capacity, Resets: ratelimit.Daily}
	slides := ratelimit.SlidingWindow{Rate: capacity, Period: ratelimit.Day}
	plain := slowly(capacity, 1)
	ways := map[string]struct {
		back     float64
		reserves bool
		give     func(ctx context.Context, l *ratelimit.Limiter, id string, at time.Time, request ratelimit.Request) error
	}{
		"Settle": {3, true, func(ctx context.Context, l *ratelimit.Limiter, id string, _ time.Time, request ratelimit.Request) error {
			return l.Settle(ctx, id, request.Cost(taken-3))
		}},
		"Cancel": {taken, true, func(ctx context.Context, l *ratelimit.Limiter, id string, _ time.Time, _ ratelimit.Request) error {
			return l.Cancel(ctx, id)
		}},
		"Expire": {taken, true, func(ctx context.Context, l *ratelimit.Limiter, _ string, _ time.Time, _ ratelimit.Request) error {
			_, err := l.Expire(ctx)
			return err
		}},
		"CreditTaken": {taken, false, func(ctx context.Context, l *ratelimit.Limiter, _ string, at time.Time, request ratelimit.Request) error {
			return l.CreditTaken(ctx, at, request.Cost(taken))
		}},
	}
	for name, c := range map[string]eraChange{
		"WindowsToABucket":  {before: day, after: plain},
		"ABucketToWindows":  {before: plain, after: day},
		"HoursToDays":       {before: hour, after: day},
		"ACalendarToTokens": {before: daily, after: plain},
		"WindowsOnRows":     {before: dayOnRows, after: slowly(capacity, 4)},
		"TokensToACalendar": {before: plain, after: daily},
		"SlidingToABucket":  {before: slides, after: plain},
		"WindowsToSliding":  {before: hour, after: slides},
		"SlidingToWindows":  {before: slides, after: day},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			representative(t, name, "WindowsOnRows", "TokensToACalendar")
			b := setup(t)
			for way, of := range ways {
				_, isSliding := c.before.(ratelimit.SlidingWindow)
				if of.reserves && isSliding {
					continue
				}
				for reads := range testsize.Of(int64(4), 12) {
					request := changingLimit("limit").For(fmt.Sprint(way, reads))
					rules := eraRules{"limit": c.rule(t, changingLimit("limit"))}
					d := b.desk(t, ratelimit.Config{Policies: rules, ReleaseExpired: true, ExpireAfter: time.Millisecond})
					d.at(-time.Second)
					require.NoError(t, d.limiter.Charge(t.Context(), request.Cost(spent)))
					var id string
					if of.reserves {
						id = d.reserve(t, request.Cost(taken)).ID
					} else {
						takeOne(t, d.limiter, request.Cost(taken))
					}
					jumper := d.with(t, ratelimit.Config{Policies: rules, AsOf: jumping(reads)})
					require.NoError(t, of.give(t.Context(), jumper, id, d.clock.now(), request))
					d.at(time.Second)
					require.InDelta(t, capacity-spent-taken+of.back, tokens(t, d.limiter, request), 1e-3, "%s, when the clock was read %d times before the change", way, reads)
				}
			}
		})
	}
}
