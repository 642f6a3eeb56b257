package bucket_test

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/bucket/buckettest"
)

// A bucket holds its capacity at most, and gives its last token.
func TestABucketGivesItsCapacityAndNoMore(t *testing.T) {
	t.Parallel()
	const now = int64(1_000_000_000)
	terms := buckettest.TokenBucket(1, time.Second, 10)
	s := terms.Full(now)
	later := now + int64(time.Hour/time.Microsecond)
	require.InDelta(t, 10, buckettest.Tokens(terms, s, later), 0)
	s, allowed := buckettest.Take(terms, s, later, 10, 0)
	require.True(t, allowed)
	_, allowed = buckettest.Take(terms, s, later, 0.001, 0)
	require.False(t, allowed)
}

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
func TestATSInsideAWindowCountsAsItsBegin(t *testing.T) {
	t.Parallel()
	const minute = int64(time.Minute / time.Microsecond)
	terms := bucket.Terms{Kind: bucket.Steps{}, Capacity: 10, Rate: 10, Steps: 1, Step: minute, Shards: 1}
	inside := bucket.State{Value: 2, TS: minute / 2}
	require.InDelta(t, 2, buckettest.Tokens(terms, inside, minute-1), 0)
	require.InDelta(t, 10, buckettest.Tokens(terms, inside, minute), 0)
}

// A credit that comes too late writes no row, whether or not the rows exist.
func TestALateCreditWritesNoRow(t *testing.T) {
	t.Parallel()
	asks := []bucket.Ask{{Terms: buckettest.Over(buckettest.FixedWindow(8, time.Hour, 8, opening), 2)}}
	p := bucket.NewPage(asks)
	p.Now = opening + int64(3*time.Hour/time.Microsecond)
	p.Put(0, bucket.State{Value: 1, TS: opening}, false)
	p.Put(1, bucket.State{}, true)
	p.Settle(asks)
	p.Charge(&asks[0], -2, opening)
	require.False(t, p.HasChanged())
	p.Charge(&asks[0], -2, p.Now)
	require.True(t, p.HasChanged())
}

// A later call on the same page does not change the rows of an earlier answer.
func TestAnAnswerKeepsItsRows(t *testing.T) {
	t.Parallel()
	asks := []bucket.Ask{{Terms: buckettest.Over(buckettest.FixedWindow(8, time.Hour, 8, opening), 2), Cost: 2}}
	p := bucket.NewPage(asks)
	p.Now = opening
	p.Put(0, bucket.State{Value: 4, TS: opening}, false)
	p.Put(1, bucket.State{Value: 4, TS: opening}, false)
	first := p.Take(asks, nil)
	require.True(t, first[0].Allowed)
	rows := slices.Clone(first[0].Rows)
	require.True(t, p.Take(asks, nil)[0].Allowed)
	require.Equal(t, rows, first[0].Rows)
}
