package ratelimit

import (
	"context"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/slots"
)

// TestLeaseFromContext promises that the work finds the innermost lease, and none without a lease.
func TestLeaseFromContext(t *testing.T) {
	t.Parallel()
	l, err := New(&answering{}, Config{})
	require.NoError(t, err)
	_, found := LeaseFromContext(t.Context())
	require.False(t, found)
	held, release := l.Keep(t.Context(), Lease{})
	_, found = LeaseFromContext(held)
	require.False(t, found)
	require.NoError(t, held.Err())
	release()
	require.Equal(t, context.Canceled, held.Err())
}

// FuzzLeaseID checks that Acquire could have written every accepted ID, and that it is safe in a statement.
func FuzzLeaseID(f *testing.F) {
	f.Add("")
	f.Add("L1")
	f.Add("L1AAAAAA")
	f.Add((&slots.ID{Fence: 7}).String())
	f.Add((&slots.ID{Fence: math.MaxInt64, Of: []slots.Share{{Row: bucket.Key{Name: "jobs"}, Plan: "", Slots: 1, Length: 1000}}}).String())
	f.Add((&slots.ID{Fence: 7, Of: []slots.Share{{Row: bucket.Key{Name: "jobs", Key: "k"}, Plan: "pro", Slots: 1, Length: 1000}, {Row: bucket.Key{Name: "jobs", Key: "l"}, Plan: "", Slots: 3, Length: 1000}}}).String())
	f.Add((&slots.ID{Fence: 7, Of: []slots.Share{{Row: bucket.Key{Name: "b"}, Plan: "", Slots: 1, Length: 1000}, {Row: bucket.Key{Name: "a"}, Plan: "", Slots: 1, Length: 1000}}}).String())
	f.Add((&slots.ID{Fence: 7, Of: []slots.Share{{Row: bucket.Key{Name: "jobs", Key: "\x00"}, Plan: "", Slots: 1001, Length: 1}}}).String())
	f.Fuzz(func(t *testing.T, text string) {
		id, err := parseLeaseID(text)
		if err != nil {
			require.ErrorIs(t, err, ErrInvalidLease)
			require.Nil(t, id)
			require.Less(t, len(err.Error()), 300)
			return
		}
		require.Equal(t, text, id.String())
		require.Positive(t, id.Fence)
		require.LessOrEqual(t, len(id.Of), maxRequests)
		for i, of := range id.Of {
			_, err := storedKey(nil, &Request{limit: limitOf(of.Row.Name, madeElsewhere{}, bucket.Terms{}), key: of.Row.Key, stored: true})
			require.NoError(t, err)
			_, err = NewLimit(of.Row.Name, Concurrency{Most: 1, Lease: time.Duration(of.Length) * time.Microsecond})
			require.NoError(t, err)
			require.LessOrEqual(t, of.Slots, int64(maxSlots))
			require.GreaterOrEqual(t, of.Slots, int64(0))
			if i > 0 {
				require.Negative(t, id.Of[i-1].Row.Compare(of.Row))
			}
		}
	})
}
