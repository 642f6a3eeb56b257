package store

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
)

// A renewal extends the leases on all rows of a call and returns the first end. Where one of them is lost it extends none.
func TestARenewalExtendsAllLeasesOfACallOrNone(t *testing.T) {
	t.Parallel()
	const minute = int64(time.Minute / time.Microsecond)
	now := opening
	s := newSession(postgrestest.New(t), func() *int64 { return new(now) })
	slots := func(name string, lease int64) limit {
		return limit{name, bucket.Terms{Capacity: 2, Rate: 1, Steps: 1, Step: 1, Shards: 1, Rule: bucket.Concurrent{Lease: lease}}}
	}
	long, short := slots("a", 2*minute), slots("b", minute)
	call := taking(long.ask("ada", 1), short.ask("ada", 1))
	require.NoError(t, s.decideOne(t.Context(), call))
	require.True(t, bucket.AllAllowed(call.Answers))
	lease, found := call.Asks[0].NewLease(&call.Answers[0])
	require.True(t, found)

	now += minute / 2
	renewal := Leases{Asks: call.Asks, Fence: lease.Fence, Lengths: []int64{2 * minute, minute}}
	require.NoError(t, s.ChangeLeases(t.Context(), &renewal))
	require.False(t, renewal.AnyLost())
	require.Equal(t, now+minute, renewal.EndUs)

	end := now + 2*minute
	require.NoError(t, s.ChangeLeases(t.Context(), &Leases{Asks: call.Asks[1:], Fence: lease.Fence, Lengths: []int64{minute}, Release: true}))
	now += minute / 2
	require.NoError(t, s.ChangeLeases(t.Context(), &renewal))
	require.Equal(t, []bool{false, true}, renewal.Lost)
	rows, err := s.Look(t.Context(), call.Asks[:1], nil)
	require.NoError(t, err)
	require.Equal(t, []bucket.Held{{Fence: lease.Fence, End: end, Slots: 1}}, rows[0].State.Leases())
}
