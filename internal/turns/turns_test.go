package turns

import (
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// A process has queues only for buckets that are contended now, and needs memory only for these.
func TestQueuesAreBoundedAndForgotten(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	q := New("")
	q.Now, q.limit = func() time.Time { return now }, 3
	names := func(first, n int) (keys []bucket.Key) {
		for i := range n {
			keys = append(keys, bucket.Key{Name: "limit", Key: strconv.Itoa(first + i)})
		}
		return keys
	}
	require.Nil(t, q.join(names(0, 1)[0]), "nobody has met there")

	q.Conflict(names(0, 10))
	require.Len(t, q.of, 3)
	held := q.join(names(0, 1)[0])
	require.NotNil(t, held)
	require.True(t, held.wait(t.Context(), 0))
	require.False(t, held.wait(t.Context(), 0), "one at a time")

	now = now.Add(queueMemory + 1)
	require.Nil(t, q.join(names(1, 1)[0]), "it was a while ago")
	q.Conflict(names(20, 10))
	require.Len(t, q.of, 3)
	require.Same(t, held, q.of[names(0, 1)[0]], "somebody is in it")
	q.leave(held, true)

	now = now.Add(queueMemory + 1)
	q.Conflict(names(40, 3))
	require.Len(t, q.of, 3)
	require.Nil(t, q.join(names(0, 1)[0]))
}

// A transaction on several buckets takes its turn at the bucket where most transactions conflict. If that is a tie, all of them
// choose the same bucket.
func TestTheTurnIsAtTheBucketWhereMostMeet(t *testing.T) {
	t.Parallel()
	q := New("")
	first, second, all := bucket.Key{Name: "a"}, bucket.Key{Name: "b"}, bucket.Key{Name: "z"}
	_, in := q.joinHottest([]bucket.Key{first})
	require.Nil(t, in)
	q.Conflict([]bucket.Key{second, first})
	q.Conflict([]bucket.Key{second})
	for _, wanted := range [][]bucket.Key{{first, second, all}, {second, all, first}} {
		chosen, _ := q.joinHottest(wanted)
		require.Equal(t, first, chosen)
	}
	for range 10 {
		q.Conflict([]bucket.Key{second, all})
	}
	chosen, in := q.joinHottest([]bucket.Key{first, all})
	require.Equal(t, all, chosen)
	require.Same(t, q.of[all], in)
	require.Equal(t, 1, in.users)
}
