package bucket_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
	"github.com/pgratelimit/pgratelimit/internal/engine/bucket/buckettest"
)

// concurrent are the terms of a limit of two slots, whose leases last a second.
var concurrent = bucket.Terms{
	Capacity: 2, Rate: 1, Steps: 1, Step: 1, Kind: bucket.Concurrent{Lease: int64(time.Second / time.Microsecond)},
}

// A renewal never ends a lease earlier than before, and a lease counts until the instant of its end.
func TestARenewalNeverShortensALease(t *testing.T) {
	t.Parallel()
	const now, second = int64(1_000_000_000), int64(time.Second / time.Microsecond)
	s, allowed := buckettest.Take(concurrent, concurrent.Full(now), now, 1, 0)
	require.True(t, allowed)
	fence := s.Leases()[0].Fence
	for _, test := range []struct{ length, end int64 }{{second / 2, now + second}, {2 * second, now + 2*second}} {
		after, end, held := s.RenewLease(now, fence, test.length)
		require.True(t, held)
		require.Equal(t, test.end, end)
		require.Equal(t, []bucket.Held{{Fence: fence, End: test.end, Slots: 1}}, after.Leases())
	}
	require.InDelta(t, 1, buckettest.Tokens(concurrent, s, now+second-1), 0)
	require.InDelta(t, 2, buckettest.Tokens(concurrent, s, now+second), 0)
	_, _, held := s.RenewLease(now+second, fence, second)
	require.False(t, held)
}

// A lease that was granted by a clock that was a year ahead ends no later than a lease that is granted now.
func TestALeaseFromAFutureClockEndsAsIfAcquiredNow(t *testing.T) {
	t.Parallel()
	const now, second = int64(1_000_000_000), int64(time.Second / time.Microsecond)
	ahead := now + int64(365*24*time.Hour/time.Microsecond)
	s, allowed := buckettest.Take(concurrent, concurrent.Full(ahead), ahead, 2, 0)
	require.True(t, allowed)
	fixed := concurrent.FixClock(s, now)
	require.Equal(t, now, fixed.TS)
	require.Equal(t, now+second, fixed.Leases()[0].End)
	_, allowed = buckettest.Take(concurrent, fixed, now+second, 2, 0)
	require.True(t, allowed)
}

// A lease of several slots needs all of them, and after a Reset its fencing token is never granted again.
func TestALeaseOfSeveralSlotsNeedsAllOfThem(t *testing.T) {
	t.Parallel()
	const now = int64(1_000_000_000)
	one, allowed := buckettest.Take(concurrent, concurrent.Full(now), now, 1, 0)
	require.True(t, allowed)
	_, allowed = buckettest.Take(concurrent, one, now, 2, 0)
	require.False(t, allowed)
	reset := concurrent.Kind.Fill(concurrent, one, now)
	two, allowed := buckettest.Take(concurrent, reset, now, 2, 0)
	require.True(t, allowed)
	require.Greater(t, two.Leases()[0].Fence, one.Leases()[0].Fence)
}

// Another version of a program may define the limit as one of slots. Operations on its row under terms of another kind
// keep the leases.
func TestTermsOfOtherKindsLeaveLeasesAlone(t *testing.T) {
	t.Parallel()
	day := int64(24 * time.Hour / time.Microsecond)
	held := &bucket.Parts{Leases: []int64{7, 7, 5 * day, 2}}
	now := 3 * day
	for name, terms := range map[string]bucket.Terms{
		"Bucket":  {Kind: bucket.Steps{}, Capacity: 10, Rate: 10, Steps: float64(day), Step: 1},
		"Window":  {Kind: bucket.Steps{}, Capacity: 10, Rate: 10, Steps: 1, Step: day},
		"Sliding": {Capacity: 10, Rate: 10, Steps: 4, Step: day / 4, Kind: bucket.Sliding{Slices: 4}},
	} {
		for _, ts := range []int64{now - 1, now, now + 10*day} { // the last is from a clock that was wrong
			row := bucket.State{Value: 8, TS: ts, Parts: held}
			keeps := func(after bucket.State) {
				require.Equal(t, held.Leases, after.Parts.Leases, name)
				row = after
			}
			next, allowed := buckettest.Take(terms, row, now, 1, 0)
			require.True(t, allowed, name)
			keeps(next)
			next, allowed = buckettest.Take(terms, row, now, 11, 0)
			require.False(t, allowed, name)
			keeps(next)
			keeps(terms.Kind.Charge(terms, terms.FixClock(row, now), now, 3))
			keeps(buckettest.Credit(terms, row, now, 2, bucket.MaxInstant))
			keeps(terms.Kind.Fill(terms, row, now))
			require.InDelta(t, 10, buckettest.Tokens(terms, row, now), 0, name)
		}
	}
}

// A rule that makes another kind of a limit of slots ends its leases. When it is a limit of slots again, the fencing
// tokens continue.
func TestFencesGoOnAfterErasOfOtherKinds(t *testing.T) {
	t.Parallel()
	day := int64(24 * time.Hour / time.Microsecond)
	slots := bucket.Terms{Capacity: 3, Rate: 3, Steps: 1, Step: day, Kind: bucket.Concurrent{Lease: day}}
	for name, between := range map[string]bucket.Terms{
		"Bucket":  {Kind: bucket.Steps{}, Capacity: 10, Rate: 10, Steps: float64(day), Step: 1},
		"Sliding": {Capacity: 10, Rate: 10, Steps: 4, Step: day / 4, Kind: bucket.Sliding{Slices: 4}},
	} {
		revisions := bucket.NewRevisions([]bucket.Revision{{Terms: slots}, {From: 10 * day, Terms: between, Change: bucket.Reset}, {From: 20 * day, Terms: slots, Change: bucket.Reset}})
		fence := 100 * day // from a clock that was ahead
		s := bucket.State{Value: 1, TS: 10*day - 1, Parts: &bucket.Parts{Leases: []int64{fence, fence, 11 * day, 2}}}
		s = revisions.Holding(11 * day).Settle(s)
		require.Empty(t, s.Leases(), name)
		s, allowed := buckettest.Take(revisions.Holding(11*day), s, 11*day, 1, 0)
		require.True(t, allowed, name)
		terms := revisions.Holding(20 * day)
		s, allowed = buckettest.Take(terms, terms.Settle(s), 20*day, 1, 0)
		require.True(t, allowed, name)
		require.Greater(t, s.Leases()[0].Fence, fence, name)
	}
}
