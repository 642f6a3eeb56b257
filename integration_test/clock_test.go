package integration_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// steady gains a hundred tokens a second, and is never full or empty while a test runs.
var steady = ratelimit.Define("steady", ratelimit.TokenBucket{Rate: 100, Period: time.Second, Capacity: 1e6})

// In a long transaction a decision is made at its own time, not at the time of the BEGIN.
func TestLongTransactionDecidesAtThePresent(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for _, level := range levels {
		t.Run(level.name, func(t *testing.T) {
			t.Parallel()
			key := t.Name()
			takeOne(t, b.limiter, steady.For(key).Cost(5e5))
			before := b.row(t, "steady", key)
			old := b.begin(t, level.level)
			for range 99 {
				takeOne(t, b.limiter, steady.For(key))
			}
			meanwhile, err := b.limiter.Take(t.Context(), steady.For(key))
			require.NoError(t, err)
			d, err := b.limiter.WithTx(old).Take(t.Context(), steady.For(key))
			require.NoError(t, err)
			require.True(t, d.Allowed)
			require.True(t, d.At.After(meanwhile.At))
			require.NoError(t, old.Commit(t.Context()))
			after := b.row(t, "steady", key)
			require.GreaterOrEqual(t, after.TS, before.TS, "ts does not go back")
			arrived := float64(after.TS-before.TS) * 100 / 1e6
			require.InDelta(t, before.Value+arrived-101, after.Value, 1e-6, "every instant is credited once")
		})
	}
}

// A call in a transaction that waits for a row gets the tokens that arrive meanwhile, and a refusal is of the instant
// at which the row was locked.
func TestACallThatWaitsGetsWhatArrivesMeanwhile(t *testing.T) {
	t.Parallel()
	const period = 300 * time.Millisecond
	b := setup(t)
	first := ratelimit.Define("first", ratelimit.TokenBucket{Rate: 1, Period: period})
	for name, requests := range map[string][]ratelimit.Request{
		"TokenBucket":   {first.For("one")},
		"SlidingWindow": {ratelimit.Define("sliding", ratelimit.SlidingWindow{Rate: 1, Period: period}).For("one")},
		"Several":       {first.For("several"), steady.For("several")},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			holder := b.begin(t, pgx.ReadCommitted)
			held, err := b.limiter.WithTx(holder).Take(t.Context(), requests...)
			require.NoError(t, err)
			require.True(t, held.Allowed)
			waiter := b.begin(t, pgx.ReadCommitted)
			var pid uint32
			require.NoError(t, waiter.QueryRow(t.Context(), `SELECT pg_backend_pid()`).Scan(&pid))
			decided := make(chan ratelimit.Decision)
			go func() {
				d, err := b.limiter.WithTx(waiter).Take(t.Context(), requests...)
				assert.NoError(t, err)
				decided <- d
			}()
			eventually(t, "the call waits, and its token arrives", func() bool {
				var there bool
				require.NoError(t, b.pool.QueryRow(t.Context(), `SELECT clock_timestamp() > $2 AND EXISTS (
					SELECT FROM pg_stat_activity WHERE pid = $1 AND wait_event_type = 'Lock')`, pid, held.At.Add(2*period)).Scan(&there))
				return there
			})
			require.NoError(t, holder.Commit(t.Context()))
			require.True(t, (<-decided).Allowed)
		})
	}
}

// clock is a clock that a test sets.
type clock struct{ unixMicro atomic.Int64 }

func (c *clock) set(instant time.Time) { c.unixMicro.Store(instant.UnixMicro()) }
func (c *clock) now() time.Time        { return time.UnixMicro(c.unixMicro.Load()) }

var clockNoon = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// A clock may stand anywhere that a row can count from, the zero time included: no statement fails for it and takes
// the caller's transaction with it.
func TestTheFirstInstantIsNotSpecial(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for name, limit := range map[string]ratelimit.Limit{
		"Bucket":  ratelimit.Define("bucket", ratelimit.PerMinute(4)),
		"Spread":  ratelimit.Define("spread", ratelimit.FixedWindow{Rate: 4, Period: time.Hour, Capacity: 12}),
		"Sharded": ratelimit.Define("sharded", ratelimit.FixedWindow{Rate: 4, Period: time.Hour, Capacity: 12, Shards: 2}),
		"Start":   ratelimit.Define("start", ratelimit.FixedWindow{Rate: 4, Period: century, Start: clockNoon}),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			now := time.Time{}
			limiter := b.with(t, ratelimit.Config{AsOf: func() time.Time { return now }})
			request := limit.For(t.Name())
			tx := b.begin(t, pgx.ReadCommitted)
			bound := limiter.WithTx(tx)
			takeAll(t, bound, request)
			d, err := bound.Take(t.Context(), request)
			require.NoError(t, err)
			require.False(t, d.Allowed)
			now = now.Add(d.RetryAfter - time.Microsecond)
			requireRefused(t, bound, []ratelimit.Request{request})
			now = now.Add(time.Microsecond)
			requireAllowed(t, taking(request), bound)
			r, err := bound.Reserve(t.Context(), request.Cost(4))
			require.NoError(t, err)
			require.NoError(t, bound.Settle(t.Context(), r.ID, request.Cost(5)))
			require.NoError(t, bound.Charge(t.Context(), request))
			require.NoError(t, bound.Reset(t.Context(), request))
			require.NoError(t, tx.Commit(t.Context()))
			require.InDelta(t, limit.Capacity(), tokens(t, limiter, request), 0)
		})
	}
}

// A decision on a calendar is one round trip, also the first one, and takes no SIREAD lock.
func TestACalendarTakesOneRoundTripAndNoSIREADLock(t *testing.T) {
	t.Parallel()
	b, w := setupCounted(t)
	limit := func() ratelimit.Limit {
		return ratelimit.Define("month", ratelimit.CalendarWindow{Rate: 1000, Resets: ratelimit.Monthly, Zone: "Europe/Berlin"})
	}
	requireAllowed(t, taking(roomy.For("first")), b.limiter)
	for range 2 {
		require.Equal(t, 1, w.count(func() { requireAllowed(t, taking(limit().For("key")), b.limiter) }))
	}
	tx := b.begin(t, pgx.Serializable)
	bound := b.limiter.WithTx(tx)
	requireAllowed(t, taking(limit().For("key")), bound) // the statement is prepared
	require.Equal(t, 1, w.count(func() { requireAllowed(t, taking(limit().For("key")), bound) }))
	other := ratelimit.Define("other", ratelimit.CalendarWindow{Rate: 9, Resets: ratelimit.Yearly, Zone: "Asia/Tokyo"})
	requireAllowed(t, taking(limit().For("key"), other.For("key")), bound)
	require.Zero(t, sireads(t, tx))
	require.NoError(t, tx.Commit(t.Context()))
}

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

// changeInstant is the instant at which limits change in the tests.
var changeInstant = clockNoon

// rule returns the rule for a limit.
func (c eraChange) rule(t *testing.T, limit ratelimit.Limit) *ratelimit.Ruling {
	t.Helper()
	rule, err := ratelimit.NewRuling(limit, ratelimit.RulingConfig{Name: "changing", Revisions: []ratelimit.Revision{
		{Policy: c.before}, {EffectiveAt: changeInstant, Policy: c.after, OnChange: c.onChange},
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
	b.exec(t, fmt.Sprintf(`INSERT INTO %s.buckets (name, key, shard, value, ts, capacity) VALUES ('limit', $1, $2, $3::float8, $4, greatest($3::float8, 0))`, b.schema),
		key, shard, value, ts.UnixMicro())
}

// jumping returns a clock that shows an instant before the change for a number of reads, and an instant after the
// change from then on.
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
func TestAPolicyThatChangesDuringACall(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		change       eraChange
		rows         map[int]float64
		before, want float64 // what the bucket holds in the end without the call: when that was before the change, and after
	}{ // after a reset a call before the change costs nothing
		"FourRows":                  {eraChange{before: slowly(40, 4), after: faster(40, 4)}, map[int]float64{0: 0}, 30, 30},
		"FourRowsRaised":            {eraChange{before: slowly(40, 4), after: slowly(160, 4), onChange: ratelimit.ScaleTokens}, nil, 156 + 1, 160},
		"FourRowsReset":             {eraChange{before: slowly(40, 4), after: slowly(160, 4), onChange: ratelimit.ResetTokens}, map[int]float64{0: 0}, 160 + 1, 160},
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
				representative(t, name, "FourRows", "FourRowsReset")
				b := setup(t)
				for reads := range int64(6) {
					d := b.changing(t, ratelimit.Config{}, map[string]eraChange{"limit": test.change})
					rules := eraRules{"limit": test.change.rule(t, changingLimit("limit"))}
					limiter := b.with(t, ratelimit.Config{Policies: rules, AsOf: jumping(reads)})
					key := t.Name() + string(rune('a'+reads))
					for row, value := range test.rows {
						b.plant(t, key, test.change.before.(ratelimit.TokenBucket).Shards+row, value, changeInstant.Add(-time.Second))
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

// Prune does not delete a row that owes tokens after a change, although it is full by the policy before.
func TestPruneKeepsOwedTokensThatAChangeScales(t *testing.T) {
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
				require.NoError(t, errOf(d.limiter.Prune(t.Context(), changingLimit("limit"))))
				require.InDelta(t, before, tokens(t, d.limiter, request), 1e-6, "after %d minutes", minutes)
			}
		})
	}
}

// TestTheModesOfARuleCostNoRoundTrip promises that a rule that changes the mode of its limit costs no round trip, and
// that a limit that is off costs none at all.
func TestTheModesOfARuleCostNoRoundTrip(t *testing.T) {
	t.Parallel()
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
		"SoonOn":   {ratelimit.Off, ratelimit.On, 40 * time.Second, 0},
		"LatelyOn": {ratelimit.On, ratelimit.Off, -10 * time.Second, 0},
	} {
		limit := ratelimit.Define(name, hoard(100))
		rule, err := ratelimit.NewRuling(limit, ratelimit.RulingConfig{Revisions: []ratelimit.Revision{{Mode: test.first}, {EffectiveAt: time.Now().Add(test.change), Mode: test.second}}})
		require.NoError(t, err)
		l := b.with(t, ratelimit.Config{NoBatching: true, Policies: eraRules{name: rule}})
		for range 2 { // the first call inserts the row and learns the kind of server
			require.NoError(t, l.Reset(t.Context(), limit.For(name)))
			require.NoError(t, errOf(l.Take(t.Context(), limit.For(name))))
		}
		require.Equal(t, test.want, w.count(func() {
			require.NoError(t, errOf(l.Take(t.Context(), limit.For(name))))
		}), name)
	}
}
