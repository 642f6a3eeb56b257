package bucket_test

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
	"github.com/pgratelimit/pgratelimit/internal/engine/bucket/buckettest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
)

func TestUsageOfAWindowCarriesOver(t *testing.T) {
	t.Parallel()
	const now = opening + 6*minute
	quota := func(n float64) bucket.Terms { return buckettest.FixedWindow(n, time.Hour, n, 0) }
	for name, test := range map[string]struct {
		value, of, capacity float64
		left                float64
		again               float64 // under 10,000 afterwards
	}{
		"Raised":           {100, 1000, 10_000, 9100, 9100},
		"RaisedAndUsedUp":  {0, 1000, 10_000, 9000, 9000},
		"Unused":           {1000, 1000, 10_000, 10_000, 10_000},
		"Lowered":          {9900, 10_000, 1000, 900, 9900},
		"LoweredBelowUsed": {5000, 10_000, 1000, 0, 5000},
		"Owing":            {-50, 1000, 10_000, 8950, 8950},
		"OwingAndLowered":  {-50, 1000, 500, -50, 8950},
		"Same":             {100, 1000, 1000, 100, 9100},
	} {
		terms, larger := quota(test.capacity), quota(10_000)
		s := terms.Settle(bucket.State{Value: test.value, TS: terms.Begin(now), Capacity: test.of})
		require.InDelta(t, test.left, s.Value, 1e-9, name)
		require.Equal(t, s, terms.Settle(s), "%s: settled once", name)
		require.InDelta(t, test.again, larger.Settle(s).Value, 1e-9, name)
		next := buckettest.Tokens(terms, s, now+60*minute)
		require.InDelta(t, test.capacity+min(test.left, 0), next, 1e-9, "%s: the next window has its own tokens, less what is owed", name)
	}
}

// A bucket's tokens stay as they are, because a request on the other plan would bring the difference back, and no more.
func TestTokensOfATokenBucketDoNotFollowThePlan(t *testing.T) {
	t.Parallel()
	free, pro := buckettest.TokenBucket(10, time.Hour, 10), buckettest.TokenBucket(1000, time.Hour, 1000)
	s, allowed := buckettest.Take(free, free.Full(opening), opening, 10, 0)
	require.True(t, allowed)
	for range 10 {
		s = free.Settle(pro.Settle(s))
		require.Zero(t, buckettest.Tokens(pro, s, opening))
	}
}

// Requests of a key are on any of its plans, in any order. In one window no more is taken than the largest quota,
// whatever is reserved, cancelled and settled in between, and a debt is repaid.
func TestPlansThatAlternateTakeNoMoreThanTheLargestQuota(t *testing.T) {
	t.Parallel()
	testkit.EachSeed(t, func(t *testing.T, seed uint64) {
		t.Helper()
		refused, clamped := 0, 0
		for history := range testkit.Sized[uint64](300, 3000) {
			r := rand.New(rand.NewPCG(seed, history))
			var plans []bucket.Terms
			largest := 0.0
			for range 2 + r.IntN(3) {
				n := float64(1 + r.IntN(20))
				plans, largest = append(plans, buckettest.FixedWindow(n, time.Hour, n, 0)), max(largest, n)
			}
			memory, now, window := newRows(), opening, opening
			type open struct{ cost float64 }
			var reserved []open
			taken := 0.0 // in this window, and not given back
			for range 60 {
				if now += int64(r.Uint64N(uint64(8 * minute))); plans[0].Begin(now) != window {
					taken, window = max(0, taken-largest), plans[0].Begin(now)
					reserved = nil // tokens of an ended window are not given back
				}
				ask := bucket.Ask{Key: bucket.Key{Name: "quota", Key: "ada"}, Terms: plans[r.IntN(len(plans))], Cost: float64(1 + r.IntN(12))}
				if ask.Cost = min(ask.Cost, ask.Terms.Capacity); r.IntN(4) == 0 {
					ask.MinBalance = -float64(r.IntN(10))
				}
				if len(reserved) > 0 && r.IntN(3) == 0 { // settle one at no more than it cost
					given := reserved[0].cost * float64(r.IntN(5)) / 4
					memory.change(ask, now, func(p *bucket.Ledger, a *bucket.Ask) { p.Charge(a, -given, now) })
					taken, reserved = taken-given, reserved[1:]
					continue
				}
				answer := memory.take(ask, now)
				if !answer.Allowed {
					refused++
					continue
				}
				taken += ask.Cost
				if r.IntN(2) == 0 {
					reserved = append(reserved, open{cost: ask.Cost})
				}
				require.LessOrEqual(t, taken, largest-min(ask.MinBalance, 0)+1e-9, "history %d", history)
				for _, s := range memory.rows {
					if s.Capacity > ask.Terms.Capacity {
						clamped++
					}
				}
			}
		}
		require.NotZero(t, refused)
		require.NotZero(t, clamped)
	})
}

// rows are the rows of buckets, on which calls are decided as an engine does.
type rows struct{ rows map[bucket.Key]bucket.State }

func newRows() rows { return rows{make(map[bucket.Key]bucket.State)} }

func (m rows) ledger(asks []bucket.Ask, now int64) *bucket.Ledger {
	p := bucket.NewLedger(asks)
	p.Now = now
	for i := range p.Rows {
		s, found := m.rows[p.Rows[i].Key]
		p.Put(i, s, !found)
	}
	p.SetNow(asks)
	p.Settle(asks)
	return p
}

func (m rows) save(p *bucket.Ledger) {
	p.Changes(func(k bucket.Key, s bucket.State) { m.rows[k] = s })
}

func (m rows) take(a bucket.Ask, now int64) bucket.Answer {
	asks := []bucket.Ask{a}
	p := m.ledger(asks, now)
	answer := p.Take(asks, nil)[0]
	m.save(p)
	return answer
}

func (m rows) change(a bucket.Ask, now int64, change func(p *bucket.Ledger, a *bucket.Ask)) {
	asks := []bucket.Ask{a}
	p := m.ledger(asks, now)
	change(p, &asks[0])
	m.save(p)
}
