package integration_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
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
	verbs := map[string]func(r ratelimit.Request) verb{
		"Take":      func(r ratelimit.Request) verb { return taking(r) },
		"TakeOfTwo": func(r ratelimit.Request) verb { return taking(r, roomy.For("other")) },
		"Reserve":   func(r ratelimit.Request) verb { return reserving(r) },
		"Charge": func(r ratelimit.Request) verb {
			return func(ctx context.Context, l *ratelimit.Limiter) (bool, error) { return true, l.Charge(ctx, r) }
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
					requireAllowed(t, call(request), limiter)
					d.at(2 * time.Second)
					want := test.want
					written := int64(0) // by the call
					for _, row := range b.rows(t, key) {
						written = max(written, row.TS)
					}
					if time.UnixMicro(written).Before(changeInstant) {
						want = test.before
					}
					require.InDelta(t, want-1, tokens(t, d.limiter, request), 1e-3, "after %d readings of the clock", reads)
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
	ctx := t.Context()
	ways := map[string]struct {
		back     float64
		reserves bool
		give     func(l *ratelimit.Limiter, id string, at time.Time, request ratelimit.Request) error
	}{
		"Settle": {3, true, func(l *ratelimit.Limiter, id string, _ time.Time, request ratelimit.Request) error {
			return l.Settle(ctx, id, request.Cost(taken-3))
		}},
		"Cancel": {taken, true, func(l *ratelimit.Limiter, id string, _ time.Time, _ ratelimit.Request) error {
			return l.Cancel(ctx, id)
		}},
		"Expire": {taken, true, func(l *ratelimit.Limiter, _ string, _ time.Time, _ ratelimit.Request) error {
			return errOf(l.Expire(ctx))
		}},
		"CreditTaken": {taken, false, func(l *ratelimit.Limiter, _ string, at time.Time, request ratelimit.Request) error {
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
					require.NoError(t, of.give(jumper, id, d.clock.now(), request))
					d.at(time.Second)
					require.InDelta(t, capacity-spent-taken+of.back, tokens(t, d.limiter, request), 1e-3, "%s, when the clock was read %d times before the change", way, reads)
				}
			}
		})
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

// wrongClock makes Limiters in a process whose clock differs from the server's.
type wrongClock struct {
	bundle *bundle
	ahead  bool
}

// limiter returns a Limiter whose limit has a rule with two eras: byProcess is in effect by the clock of the process, and byServer by the
// server's. By the clock of the process, the rule changes in 30 seconds or changed 30 seconds ago.
func (w wrongClock) limiter(t *testing.T, limit ratelimit.Limit, byProcess, byServer ratelimit.Era) *ratelimit.Limiter {
	t.Helper()
	eras, distance := []ratelimit.Era{byProcess, byServer}, 30*time.Second
	if w.ahead {
		eras, distance = []ratelimit.Era{byServer, byProcess}, -30*time.Second
	}
	eras[1].From = time.Now().Add(distance)
	rule, err := ratelimit.NewRuling(limit, ratelimit.RulingConfig{Eras: eras})
	require.NoError(t, err)
	return w.bundle.with(t, ratelimit.Config{Policies: eraRules{limit.Name(): rule}, RefusalCache: refusalEntries})
}

// onWrongClocks runs a test in processes whose clocks are behind and ahead of the server's: their time is virtual, and begins in 2000.
func onWrongClocks(t *testing.T, test func(t *testing.T, w wrongClock)) {
	t.Helper()
	for name, sleep := range map[string]time.Duration{"Behind": 0, "Ahead": 200 * 365 * ratelimit.Day} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url := postgrestest.NewDatabase(t)
			synctest.Test(t, func(t *testing.T) {
				time.Sleep(sleep)
				pool, err := pgxpool.New(t.Context(), url)
				require.NoError(t, err)
				t.Cleanup(pool.Close)
				test(t, wrongClock{&bundle{pool: pool}, sleep > 0})
			})
		})
	}
}

// eachPairOfModes runs a test for each pair of modes of a limit of two tokens: the mode by the clock of the process, and by the server's.
func eachPairOfModes(test func(limit ratelimit.Limit, byProcess, byServer ratelimit.Era)) {
	modes := []ratelimit.Mode{ratelimit.On, ratelimit.Shadow, ratelimit.Off}
	for _, byProcess := range modes {
		for _, byServer := range modes {
			limit := ratelimit.Define(string("is-"+byProcess+"-"+byServer), ratelimit.TokenBucket{Rate: 12, Period: century, Capacity: 2, MaxReserved: 9})
			test(limit, ratelimit.Era{Mode: byProcess}, ratelimit.Era{Mode: byServer})
		}
	}
}

// TestTheModeOfARuleFollowsTheServersClock checks that the server's clock chooses the mode, in a batch and in a transaction. The mode is
// in the answer, it decides, and each token is taken once.
func TestTheModeOfARuleFollowsTheServersClock(t *testing.T) {
	t.Parallel()
	other := ratelimit.Define("other", hoard(100))
	onWrongClocks(t, func(t *testing.T, w wrongClock) {
		t.Helper()
		eachPairOfModes(func(limit ratelimit.Limit, byProcess, byServer ratelimit.Era) {
			l := w.limiter(t, limit, byProcess, byServer)
			for key, requests := range map[string][]ratelimit.Request{
				limit.Name() + "one": {limit.For(limit.Name() + "one")},
				limit.Name() + "two": {limit.For(limit.Name() + "two"), other.For(limit.Name() + "two")},
			} {
				takes := func(l *ratelimit.Limiter) {
					for i := range 4 {
						d, err := l.Take(t.Context(), requests...)
						require.NoError(t, err, key)
						require.Equal(t, byServer.Mode != ratelimit.On || i < 2, d.Allowed, "%v, take %d", key, i)
						require.Equal(t, byServer.Mode == ratelimit.Off || i < 2, d.States[0].Allowed, "%v, take %d", key, i)
						require.Equal(t, byServer.Mode, d.States[0].Mode, "%v, take %d", key, i)
						require.Equal(t, byServer.Mode == ratelimit.Off, d.States[0].NotAsked, "%v, take %d", key, i)
					}
				}
				taken := map[ratelimit.Mode]float64{ratelimit.On: 2, ratelimit.Shadow: 2}[byServer.Mode]
				others := map[ratelimit.Mode]float64{ratelimit.On: 2, ratelimit.Shadow: 4, ratelimit.Off: 4}[byServer.Mode]
				check := func(times float64) {
					require.InDelta(t, 2-taken, tokens(t, l, limit.For(key)), 1e-6, key)
					if len(requests) > 1 {
						require.InDelta(t, 100-times*others, tokens(t, l, other.For(key)), 1e-6, key)
					}
				}
				takes(l)
				check(1)
				require.NoError(t, l.Reset(t.Context(), limit.For(key)))
				require.NoError(t, l.InTx(t.Context(), func(tx pgx.Tx) error {
					takes(l.WithTx(tx))
					return nil
				}))
				check(2)
			}
		})
	})
}

// TestTheModesOfARuleCostNoRoundTrip promises that a rule that changes the mode of its limit costs no round trip, unless the limit
// is off and its mode changes within a minute.
func TestTheModesOfARuleCostNoRoundTrip(t *testing.T) {
	t.Parallel()
	fastPathOnly(t, "the general path takes more round trips")
	b, w := setupCounted(t)
	for name, test := range map[string]struct {
		first, second ratelimit.Mode
		change        time.Duration // from now
		want          int
	}{
		"Shadow":   {ratelimit.Shadow, ratelimit.On, time.Hour, 1},
		"On":       {ratelimit.On, ratelimit.Off, 40 * time.Second, 1},
		"Off":      {ratelimit.Off, ratelimit.On, time.Hour, 0},
		"OffLong":  {ratelimit.On, ratelimit.Off, -time.Hour, 0},
		"SoonOn":   {ratelimit.Off, ratelimit.On, 40 * time.Second, 1},
		"LatelyOn": {ratelimit.On, ratelimit.Off, -10 * time.Second, 1},
	} {
		limit := ratelimit.Define(name, hoard(100))
		rule, err := ratelimit.NewRuling(limit, ratelimit.RulingConfig{Eras: []ratelimit.Era{{Mode: test.first}, {From: time.Now().Add(test.change), Mode: test.second}}})
		require.NoError(t, err)
		l := b.with(t, ratelimit.Config{NoBatching: true, Policies: eraRules{name: rule}})
		for range 2 { // the first call inserts the row and learns the kind of server
			require.NoError(t, l.Reset(t.Context(), limit.For(name)))
			_, err := l.Take(t.Context(), limit.For(name))
			require.NoError(t, err)
		}
		require.Equal(t, test.want, w.count(func() {
			_, err := l.Take(t.Context(), limit.For(name))
			require.NoError(t, err)
		}), name)
	}
}

// TestCallsInOneBatchAreMadeForSeveralModes: of the calls that share a statement, only calls whose limit is in another mode are
// repeated. No call takes twice or fails.
func TestCallsInOneBatchAreMadeForSeveralModes(t *testing.T) {
	t.Parallel()
	const callers, rounds = 20, 5
	other := ratelimit.Define("other", hoard(100000))
	onWrongClocks(t, func(t *testing.T, w wrongClock) {
		t.Helper()
		eachPairOfModes(func(limit ratelimit.Limit, byProcess, byServer ratelimit.Era) {
			l := w.limiter(t, limit, byProcess, byServer)
			before := tokens(t, l, other.For("shared"))
			var group errgroup.Group
			var taken atomic.Int64
			for caller := range callers {
				group.Go(func() error {
					for round := range rounds {
						own, shared := limit.For(fmt.Sprint("round ", round)), other.For("shared")
						requests := [][]ratelimit.Request{{shared}, {shared, own}, {own}}[caller%3]
						d, err := l.Take(t.Context(), requests...)
						if err != nil {
							return err
						}
						if d.Allowed && len(d.States) > 0 && d.States[0].Limit == other {
							taken.Add(1)
						}
					}
					return nil
				})
			}
			require.NoError(t, group.Wait())
			require.InDelta(t, before-float64(taken.Load()), tokens(t, l, other.For("shared")), 0.1)
		})
	})
}
