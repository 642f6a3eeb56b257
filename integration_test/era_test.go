package integration_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// eraRules is a source of policies: the rule of each name.
type eraRules map[string]*ratelimit.Ruling

func (r eraRules) RulingFor(limit ratelimit.Limit, _, _ string) *ratelimit.Ruling {
	return r[limit.Name()]
}

func (r eraRules) RulingsOf(name string) []*ratelimit.Ruling {
	if rule := r[name]; rule != nil {
		return []*ratelimit.Ruling{rule}
	}
	return nil
}

// eraChange is a rule: a policy, and from changeInstant on another one.
type eraChange struct {
	before, after ratelimit.Policy
	onChange      ratelimit.OnChange
}

// changeInstant is the instant at which the limits of these tests change.
var changeInstant = clockNoon

// rule returns the rule for a limit.
func (c eraChange) rule(t *testing.T, limit ratelimit.Limit) *ratelimit.Ruling {
	t.Helper()
	rule, err := ratelimit.NewRuling(limit, ratelimit.RulingConfig{Name: "changing", Eras: []ratelimit.Era{
		{Policy: c.before}, {From: changeInstant, Policy: c.after, OnChange: c.onChange},
	}})
	require.NoError(t, err)
	return rule
}

// changing returns a desk whose limits change at noon. The clock stands at a second before.
func (b *bundle) changing(t *testing.T, config ratelimit.Config, changes map[string]eraChange) *desk {
	t.Helper()
	rules := eraRules{}
	for name, c := range changes {
		rules[name] = c.rule(t, changingLimit(name))
	}
	config.Policies = rules
	d := b.desk(t, config)
	d.at(-time.Second)
	return d
}

// changingLimit is the definition of a limit in the code, which its rule replaces.
func changingLimit(name string) ratelimit.Limit {
	return ratelimit.Define(name, ratelimit.TokenBucket{Rate: 1e9, Period: time.Second})
}

// slowly is a policy that holds capacity tokens and gains less than a thousandth of one during a test.
func slowly(capacity float64, shards int) ratelimit.TokenBucket {
	return ratelimit.TokenBucket{Rate: capacity, Period: century, Capacity: capacity, Shards: shards}
}

// faster is slowly at twice the rate.
func faster(capacity float64, shards int) ratelimit.TokenBucket {
	return ratelimit.TokenBucket{Rate: 2 * capacity, Period: century, Capacity: capacity, Shards: shards}
}

// plant writes a row of a bucket of the changing limit, as earlier calls could have left it.
func (b *bundle) plant(t *testing.T, key string, shard int, value float64, ts time.Time) {
	t.Helper()
	b.exec(t, fmt.Sprintf(`INSERT INTO %s.buckets (name, key, shard, value, ts) VALUES ('limit', $1, $2, $3, $4)`, b.schema),
		key, shard, value, ts.UnixMicro())
}

// admitted makes concurrent callers take one token at a time, each so often, and returns the number of tokens that they got.
func admitted(t *testing.T, limiter *ratelimit.Limiter, request ratelimit.Request, callers, each int) (given int) {
	t.Helper()
	counts := make([]int, callers)
	require.NoError(t, atonce.Do(callers, func(worker int) error {
		for range each {
			d, err := limiter.Take(t.Context(), request)
			if err != nil {
				return err
			}
			if d.Allowed {
				counts[worker]++
			}
		}
		return nil
	}))
	for _, n := range counts {
		given += n
	}
	return given
}

// jumping returns a clock that shows an instant before the change for a number of reads, and an instant after the change from then on.
func jumping(reads int64) func() time.Time {
	var n atomic.Int64
	return func() time.Time {
		if n.Add(1) <= reads {
			return changeInstant.Add(-time.Microsecond)
		}
		return changeInstant.Add(time.Microsecond)
	}
}

// A call that began before the change decides by the policy of the instant of its decision.
func TestTheChangeComesInTheMidstOfACall(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		change       eraChange
		rows         map[int]float64
		before, want float64 // what the bucket holds in the end without the call: when that was before the change, and after
	}{ // after a reset a call before the change costs nothing
		"FourRows":                  {eraChange{before: slowly(40, 4), after: faster(40, 4)}, map[int]float64{0: 0}, 30, 30},
		"FourRowsRaised":            {eraChange{before: slowly(40, 4), after: slowly(160, 4), onChange: ratelimit.ScaleTokens}, nil, 156 + 1, 160},
		"ResetToMoreRows":           {eraChange{before: slowly(40, 4), after: slowly(160, 8), onChange: ratelimit.ResetTokens}, map[int]float64{0: 0}, 160 + 1, 160},
		"ResetToFewerRows":          {eraChange{before: slowly(40, 8), after: slowly(40, 1), onChange: ratelimit.ResetTokens}, map[int]float64{5: 0, 6: 0}, 40 + 1, 40},
		"ResetFromOneRowWithout":    {eraChange{before: slowly(40, 1), after: slowly(160, 8), onChange: ratelimit.ResetTokens}, nil, 160 + 1, 160},
		"RaisedOneRowWithoutAnyYet": {eraChange{before: slowly(40, 1), after: slowly(160, 1)}, nil, 40, 160},
	}
	verbs := map[string]func(ctx context.Context, l *ratelimit.Limiter, r ratelimit.Request) (ratelimit.Decision, error){
		"Take": func(ctx context.Context, l *ratelimit.Limiter, r ratelimit.Request) (ratelimit.Decision, error) {
			return l.Take(ctx, r)
		},
		"TakeOfTwo": func(ctx context.Context, l *ratelimit.Limiter, r ratelimit.Request) (ratelimit.Decision, error) {
			return l.Take(ctx, r, roomy.For("other"))
		},
		"Reserve": func(ctx context.Context, l *ratelimit.Limiter, r ratelimit.Request) (ratelimit.Decision, error) {
			reservation, err := l.Reserve(ctx, r)
			return reservation.Decision, err
		},
		"Charge": func(ctx context.Context, l *ratelimit.Limiter, r ratelimit.Request) (ratelimit.Decision, error) {
			return ratelimit.Decision{Allowed: true}, l.Charge(ctx, r)
		},
	}
	for name, test := range tests {
		for verb, call := range verbs {
			t.Run(name+"/"+verb, func(t *testing.T) {
				t.Parallel()
				representative(t, name, "FourRows", "ResetToMoreRows")
				b := setup(t)
				for reads := range int64(6) {
					d := b.changing(t, ratelimit.Config{}, map[string]eraChange{"limit": test.change})
					rules := eraRules{"limit": test.change.rule(t, changingLimit("limit"))}
					limiter := b.with(t, ratelimit.Config{Policies: rules, AsOf: jumping(reads)})
					key := t.Name() + string(rune('a'+reads))
					for shard, value := range test.rows {
						b.plant(t, key, shard, value, changeInstant.Add(-time.Second))
					}
					request := changingLimit("limit").For(key)
					decision, err := call(t.Context(), limiter, request)
					require.NoError(t, err)
					require.True(t, decision.Allowed)
					d.at(2 * time.Second)
					value, err := d.limiter.Value(t.Context(), request)
					require.NoError(t, err)
					want := test.want
					written := int64(0) // by the call
					for _, row := range b.rows(t, key) {
						written = max(written, row.TS)
					}
					if time.UnixMicro(written).Before(changeInstant) {
						want = test.before
					}
					require.InDelta(t, want-1, value.Tokens, 1e-3, "after %d readings of the clock", reads)
				}
			})
		}
	}
}

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
		"Rows":              {before: slowly(capacity, 8), after: faster(capacity, 8)},
		"WindowsOnRows":     {before: dayOnRows, after: slowly(capacity, 4)},
		"TokensToACalendar": {before: plain, after: daily},
		"SlidingToABucket":  {before: slides, after: plain},
		"WindowsToSliding":  {before: hour, after: slides},
		"SlidingToWindows":  {before: slides, after: day},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			representative(t, name, "Rows", "WindowsOnRows", "TokensToACalendar")
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

// Concurrent callers get exactly the tokens that the bucket held, also if its number of rows has changed.
func TestCallersAtOnceGetWhatTheBucketHeld(t *testing.T) {
	t.Parallel()
	onEach(t, testCallersAtOnceGetWhatTheBucketHeld, onPostgres, inPartitions)
}

func testCallersAtOnceGetWhatTheBucketHeld(t *testing.T, on backend) {
	for name, shards := range map[string]int{"OneRow": 1, "FourRows": 4, "EightRows": 8} {
		for how, config := range map[string]ratelimit.Config{"Batches": {}, "NoBatching": {NoBatching: true}, "RefusalCache": {RefusalCache: refusalEntries}} {
			t.Run(name+how, func(t *testing.T) {
				t.Parallel()
				representative(t, name, "OneRow", "FourRows")
				d := on.setup(t).changing(t, config, map[string]eraChange{
					"limit": {before: slowly(80, shards), after: faster(80, shards)},
				})
				request := changingLimit("limit").For("key")
				for shard := range shards {
					if shard%2 == 0 {
						d.plant(t, "key", shard, 3, d.clock.now())
					}
				}
				held := tokens(t, d.limiter, request)
				d.at(0)
				require.Equal(t, int(held), admitted(t, d.limiter, request, 6, 25))
				d.at(time.Second)
				require.Zero(t, admitted(t, d.limiter, request, 2, 2))
			})
		}
	}
}

// Prune does not delete a row that owes tokens after a change, although it is full by the policy before.
func TestPruneForgivesNothingOwedThatAChangeScales(t *testing.T) {
	t.Parallel()
	tests := map[string]eraChange{
		"Scaled": {
			before: ratelimit.TokenBucket{Rate: 10, Period: time.Minute}, after: ratelimit.TokenBucket{Rate: 10, Period: time.Minute, Capacity: 1000},
			onChange: ratelimit.ScaleTokens,
		},
		"Added": {
			before: ratelimit.TokenBucket{Rate: 10, Period: time.Minute, Capacity: 1000}, after: ratelimit.TokenBucket{Rate: 10, Period: time.Minute},
			onChange: ratelimit.AddTokens,
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := setup(t).changing(t, ratelimit.Config{}, map[string]eraChange{"limit": test})
			request := changingLimit("limit").For("key")
			d.plant(t, "key", 0, -90, changeInstant.Add(-time.Second))
			for minutes := 1; minutes < 1200; minutes += 7 {
				d.at(time.Duration(minutes) * time.Minute)
				before := tokens(t, d.limiter, request)
				_, err := d.limiter.Prune(t.Context(), changingLimit("limit"))
				require.NoError(t, err)
				require.InDelta(t, before, tokens(t, d.limiter, request), 1e-6, "after %d minutes", minutes)
			}
		})
	}
}
