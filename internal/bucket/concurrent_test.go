package bucket_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/bucket/buckettest"
)

// concurrent are the terms of a limit of two slots, whose leases last a second.
var concurrent = bucket.Terms{
	Capacity: 2, Rate: 1, Steps: 1, Step: 1, Shards: 1, Kind: bucket.Concurrent{Lease: int64(time.Second / time.Microsecond)},
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
func TestALeaseOfAWrongClockEndsAsOneOfNow(t *testing.T) {
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
