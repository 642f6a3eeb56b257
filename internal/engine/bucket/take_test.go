package bucket_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
	"github.com/pgratelimit/pgratelimit/internal/engine/bucket/buckettest"
)

// A clock that steps back, and then goes on, credits no time twice.
func TestAClockThatStepsBackCreditsNoTimeTwice(t *testing.T) {
	t.Parallel()
	const now, back = int64(1_000_000_000), int64(5 * time.Second / time.Microsecond)
	terms := buckettest.TokenBucket(1, time.Second, 10)
	s, allowed := buckettest.Take(terms, terms.Full(now), now, 5, 0)
	require.True(t, allowed)
	s, allowed = buckettest.Take(terms, s, now-back, 1, 0)
	require.True(t, allowed)
	require.InDelta(t, 4, buckettest.Tokens(terms, s, now), 0)
}

// A ts inside a window counts as the begin of that window, so that the next window brings its tokens.
func TestATimestampInsideAWindowCountsAsItsStart(t *testing.T) {
	t.Parallel()
	const minute = int64(time.Minute / time.Microsecond)
	terms := bucket.Terms{Kind: bucket.Steps{}, Capacity: 10, Rate: 10, Steps: 1, Step: minute}
	inside := bucket.State{Value: 2, TS: minute / 2}
	require.InDelta(t, 2, buckettest.Tokens(terms, inside, minute-1), 0)
	require.InDelta(t, 10, buckettest.Tokens(terms, inside, minute), 0)
}

// A credit that comes too late writes no row, whether or not the row exists.
func TestALateCreditWritesNoRow(t *testing.T) {
	t.Parallel()
	for _, absent := range []bool{false, true} {
		asks := []bucket.Ask{{Terms: buckettest.FixedWindow(8, time.Hour, 8, opening)}}
		p := bucket.NewLedger(asks)
		p.Now = opening + int64(3*time.Hour/time.Microsecond)
		p.Put(0, bucket.State{Value: 1, TS: opening, Capacity: 8}, absent)
		p.Settle(asks)
		p.Charge(&asks[0], -2, opening)
		require.False(t, p.HasChanged())
		p.Charge(&asks[0], -2, p.Now)
		require.True(t, p.HasChanged())
	}
}

func TestFixClock(t *testing.T) {
	t.Parallel()
	for name, terms := range map[string]bucket.Terms{
		"TokenBucket": buckettest.TokenBucket(10, time.Minute, 10),
		"FixedWindow": buckettest.FixedWindow(10, time.Hour, 10, opening),
	} {
		fixed := terms.FixClock(bucket.State{Value: -3, TS: bucket.MaxInstant}, opening)
		require.Equal(t, bucket.State{Value: -3, TS: opening}, fixed, "%s keeps the value", name)
		require.Equal(t, fixed, terms.FixClock(fixed, opening), "%s is fixed once", name)
		require.Equal(t, fixed, terms.FixClock(fixed, opening-minute), name)
		last := bucket.State{Value: 1, TS: opening + minute}
		require.Equal(t, last, terms.FixClock(last, opening), "%s: up to the tolerance the clock is trusted", name)
		last.TS++
		require.Equal(t, bucket.State{Value: 1, TS: opening}, terms.FixClock(last, opening), name)
	}
}

// table has the rows of buckets.
type table map[bucket.Key]bucket.State

// take decides on a call at an instant, as an engine does.
func (rows table) take(asks []bucket.Ask, now int64) (answers []bucket.Answer) {
	rows.change(asks, now, func(p *bucket.Ledger) { answers = p.Take(asks, nil) })
	return answers
}

func (rows table) change(asks []bucket.Ask, now int64, change func(p *bucket.Ledger)) {
	p := bucket.NewLedger(asks)
	p.Now = now
	for i := range p.Rows {
		s, found := rows[p.Rows[i].Key]
		p.Put(i, s, !found)
	}
	p.SetNow(asks)
	p.Settle(asks)
	change(p)
	p.Changes(func(k bucket.Key, s bucket.State) { rows[k] = s })
}

// TestAWrongClock promises that what a clock did that was ahead delays tokens by at most a period and a minute, and
// that a reset ends it.
func TestAWrongClock(t *testing.T) {
	t.Parallel()
	months := &listed{}
	for i := -9; i < 9; i++ {
		months.begins = append(months.begins, time.UnixMicro(opening).UTC().AddDate(0, i, 1-time.UnixMicro(opening).UTC().Day()).UnixMicro())
	}
	for name, c := range map[string]struct {
		terms  bucket.Terms
		period time.Duration
	}{
		"TokenBucket":   {buckettest.TokenBucket(10, time.Minute, 10), time.Minute},
		"FixedWindow":   {buckettest.FixedWindow(10, 30*24*time.Hour, 10, opening), 30 * 24 * time.Hour},
		"Windows":       {bucket.Terms{Kind: bucket.Steps{}, Windows: months, Capacity: 10, Rate: 10, Steps: 1}, 31 * 24 * time.Hour},
		"SlidingWindow": {slidingTerms(10, 6*time.Hour.Microseconds(), 4), 30 * time.Hour}, // and a slice
	} {
		for _, ahead := range []time.Duration{time.Second, time.Minute, time.Minute + time.Second, time.Hour, 20 * 24 * time.Hour, 40 * 24 * time.Hour, 5000 * time.Hour} {
			for _, now := range []int64{opening, opening + time.Hour.Microseconds() - 1, opening + 26*24*time.Hour.Microseconds()} {
				asks := []bucket.Ask{{Key: bucket.Key{Name: "limit"}, Terms: c.terms.At(now + ahead.Microseconds()), Cost: c.terms.Capacity}}
				memory := table{}
				require.True(t, memory.take(asks, now+ahead.Microseconds())[0].Allowed, name)
				asks[0].Terms = c.terms.At(now)
				refused := memory.take(asks, now)[0]
				told := asks[0].Tell(&refused, 0, &bucket.Snapshot{})
				require.False(t, told.Allowed, "%s: a clock that steps back credits nothing", name)
				require.LessOrEqual(t, told.RetryAfter, c.period+time.Minute, "%s, %v ahead", name, ahead)

				p := bucket.NewLedger(asks)
				p.Now = now
				p.Put(0, refused.State, false)
				p.Fill(asks)
				reset, fresh := p.Take(asks, nil)[0], asks[0].Decide(bucket.Answer{State: asks[0].Terms.Full(now), Now: now})
				require.Equal(t, asks[0].Tell(&fresh, 0, &bucket.Snapshot{}).FullAfter, asks[0].Tell(&reset, 0, &bucket.Snapshot{}).FullAfter,
					"%s, %v ahead: after a reset it is as new", name, ahead)
			}
		}
	}
}

func TestPhaseOf(t *testing.T) {
	t.Parallel()
	const hour = 60 * minute
	for _, start := range []int64{bucket.MinInstant, bucket.MinInstant + 1, -1, 0, 1, opening, opening + hour/3, bucket.MaxInstant} {
		for _, step := range []int64{1, 7, minute, hour, century} {
			phase := bucket.PhaseOf(start, step)
			require.GreaterOrEqual(t, phase, bucket.MinInstant)
			require.Less(t, phase, bucket.MinInstant+step)
			require.Zero(t, (start-phase)%step, "a step begins at start")
		}
	}
}

// TestWaitOfARowThatNeverRecovers is as long as any is said to be, however old the row is.
func TestWaitOfARowThatNeverRecovers(t *testing.T) {
	t.Parallel()
	const longest = time.Duration(bucket.Horizon) * time.Microsecond
	slow := buckettest.FixedWindow(7, bucket.MaxSpan, 7, opening-century/2)
	for _, terms := range []bucket.Terms{buckettest.TokenBucket(1, time.Second, 1), slow} {
		for _, ts := range []int64{bucket.MinInstant, opening - 2*bucket.Horizon, opening} {
			require.Equal(t, longest, buckettest.Wait(terms, bucket.State{Value: -1e300, TS: ts}, opening, 1, 0), "%d", ts)
		}
	}
	require.Equal(t, longest, buckettest.Wait(slow, bucket.State{Value: -91, TS: slow.Begin(opening)}, opening, 7, 0))
}

// TestMaxWait promises that an ask with a MaxWait is refused if the bucket would owe for longer, and allowed after the
// wait.
func TestMaxWait(t *testing.T) {
	t.Parallel()
	window, tokens := buckettest.FixedWindow(2, 24*time.Hour, 2, opening), buckettest.TokenBucket(3, time.Second, 3)
	const forever = time.Duration(bucket.Horizon) * time.Microsecond
	for name, test := range map[string]struct {
		terms        bucket.Terms
		before, cost float64 // taken
		within, want time.Duration
	}{
		"AWindowInItsLastMinute":     {window, 0, 3, time.Minute, 24*time.Hour - time.Minute},
		"AWindowThatIsSoon":          {window, 0, 3, 24 * time.Hour, 0},
		"ATokenBucket":               {tokens, 3, 2, 500 * time.Millisecond, 166_667 * time.Microsecond},
		"ATokenBucketThatIsSoon":     {tokens, 3, 2, 666_667 * time.Microsecond, 0},
		"ATokenBucketThatIsTooSmall": {tokens, 0, 7, time.Second, forever},
		"TooMuchIsOwed":              {tokens, 9, 7, time.Minute, time.Second},
		"NothingOwed":                {tokens, 0, 3, time.Microsecond, 0},
	} {
		full := bucket.Answer{Now: opening, State: test.terms.Full(opening)}
		r := (&bucket.Ask{Terms: test.terms, Cost: test.before, MinBalance: -10}).Decide(full)
		a := bucket.Ask{Terms: test.terms, Cost: test.cost, MinBalance: -10, AllowDebt: true, MaxWait: test.within}
		r = a.Decide(r)
		require.Equal(t, test.want == 0, r.Allowed, name)
		require.Equal(t, test.want, a.Tell(&r, a.MinBalance, &bucket.Snapshot{}).RetryAfter, name)
		if test.want == 0 {
			require.LessOrEqual(t, a.ReadyAfter(r), test.within, name)
		} else if test.want < forever {
			r.Now += test.want.Microseconds() - 1
			require.False(t, a.Decide(r).Allowed, name)
			r.Now++
			require.True(t, a.Decide(r).Allowed, name)
		}
	}
}

const (
	opening = buckettest.Opening
	minute  = buckettest.Minute
	day     = buckettest.Day
	century = buckettest.Century
)

// changeAt returns the terms that hold after one change.
func changeAt(from int64, before, after bucket.Terms, change bucket.Change) bucket.Terms {
	return bucket.NewRevisions([]bucket.Revision{{Terms: before}, {From: from, Terms: after, Change: change}}).Holding(from)
}

// A reset has given back what was taken before it, so a credit of that gives nothing more.
func TestAResetGivesTokensBackOnce(t *testing.T) {
	t.Parallel()
	const from = opening + 10*minute
	for name, terms := range map[string]bucket.Terms{
		"TokenBucket": buckettest.TokenBucket(10, 24*time.Hour, 10), "FixedWindow": buckettest.FixedWindow(10, 24*time.Hour, 10, 0), "SlidingWindow": slidingTerms(10, 3600*second, 24),
	} {
		for taken, want := range map[int64]float64{from - 1: 5, from: 8} {
			ask := bucket.Ask{Terms: changeAt(from, terms, terms, bucket.Reset)}
			s, allowed := buckettest.Take(terms, terms.Full(opening), opening, 6, 0)
			require.True(t, allowed, name)
			p := bucket.NewLedger([]bucket.Ask{ask})
			p.Now = from + minute
			p.Put(0, s, false)
			p.Settle([]bucket.Ask{ask})
			p.Charge(&ask, 5, bucket.Whenever)
			p.Charge(&ask, -3, taken)
			require.InDelta(t, want, buckettest.Tokens(ask.Terms, p.State(&ask), p.Now), 0.01, name)
		}
	}
}

// By the clock of the call its limit has slots, or tokens. It stays so by the clock of the row, whose policy it
// otherwise follows.
func TestACallForSlotsStaysOne(t *testing.T) {
	t.Parallel()
	slots := bucket.Terms{Capacity: 3, Rate: 3, Steps: 1, Step: day, Kind: bucket.Concurrent{Lease: day}}
	tokens, more := buckettest.TokenBucket(10, time.Hour, 10), buckettest.TokenBucket(20, time.Hour, 20)
	revisions := bucket.NewRevisions([]bucket.Revision{{Terms: slots}, {From: day, Terms: tokens, Change: bucket.Reset}, {From: 2 * day, Terms: more}})
	require.Equal(t, 3.0, revisions.Holding(0).At(day).Capacity)
	require.Equal(t, 10.0, revisions.Holding(day).At(0).Capacity)
	require.Equal(t, 20.0, revisions.Holding(day).At(2*day).Capacity)
}

// A window takes tokens back until it ends. A bucket takes back no more than its capacity.
func TestCreditEndsWithTheWindowAndAtTheCapacity(t *testing.T) {
	t.Parallel()
	const second = int64(time.Second / time.Microsecond)
	terms := buckettest.FixedWindow(10, time.Second, 10, 0)
	s, allowed := buckettest.Take(terms, terms.Full(second), second, 4, 0)
	require.True(t, allowed)
	until := terms.Kind.CreditUntil(terms, second)
	for _, c := range []struct {
		now     int64
		amount  float64
		credits bool
		value   float64
	}{
		{second, 3, true, 9},
		{2*second - 1, 3, true, 9},
		{2*second - 1, 5, true, 10},
		{2 * second, 3, false, 6}, // the next window is full anyway
	} {
		after, credited := terms.Kind.Credit(terms, s, c.now, c.amount, 0, until)
		require.Equal(t, c.credits, credited, c)
		require.InDelta(t, c.value, after.Value, 0, c)
	}
}
