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
			memory, now, window := table{}, opening, opening
			var reserved []float64 // costs
			taken := 0.0           // in this window, and not given back
			for range 60 {
				if now += int64(r.Uint64N(uint64(8 * minute))); plans[0].Begin(now) != window {
					taken, window = max(0, taken-largest), plans[0].Begin(now)
					reserved = nil // tokens of an ended window are not given back
				}
				asks := []bucket.Ask{{Terms: plans[r.IntN(len(plans))], Cost: float64(1 + r.IntN(12))}}
				ask := &asks[0]
				if ask.Cost = min(ask.Cost, ask.Terms.Capacity); r.IntN(4) == 0 {
					ask.MinBalance = -float64(r.IntN(10))
				}
				if len(reserved) > 0 && r.IntN(3) == 0 { // settle one at no more than it cost
					given := reserved[0] * float64(r.IntN(5)) / 4
					memory.change(asks, now, func(p *bucket.Ledger) { p.Charge(ask, -given, now) })
					taken, reserved = taken-given, reserved[1:]
					continue
				}
				if !memory.take(asks, now)[0].Allowed {
					refused++
					continue
				}
				taken += ask.Cost
				if r.IntN(2) == 0 {
					reserved = append(reserved, ask.Cost)
				}
				require.LessOrEqual(t, taken, largest-min(ask.MinBalance, 0)+1e-9, "history %d", history)
				for _, s := range memory {
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
