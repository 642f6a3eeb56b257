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

// A sliding window has 60 slices, or the next smaller number that divides its period.
func TestSlicesOfASlidingWindow(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		period time.Duration
		slices int32
	}{
		{time.Minute, 60}, {time.Second, 50}, {999_983 * time.Microsecond, 1}, {time.Microsecond, 1}, {36525 * Day, 60},
	} {
		terms := Define("sliding", SlidingWindow{Rate: 5, Period: test.period}).terms()
		require.Equal(t, bucket.Sliding{Slices: test.slices}, terms.Kind)
		require.Equal(t, test.period.Microseconds()/int64(test.slices), terms.Step)
		require.False(t, terms.Reserves)
	}
	require.Equal(t, bucket.Sliding{Slices: 128}, Define("sliding", SlidingWindow{Rate: 5, Period: 128 * time.Second, Slices: 128}).terms().Kind)
}

// FuzzPolicyText promises a round trip: MarshalPolicy writes each policy that UnmarshalPolicy accepts. Reading that text gives a
// policy with the same decisions and the same text.
func FuzzPolicyText(f *testing.F) {
	for _, text := range []string{
		`{"rate":10,"period":"1m","capacity":0,"max_reserved":7,"shards":4}`, `{"rate":9,"period":"1s","max_reserved":"forbidden","prefetch":"100ms"}`,
		`{"kind":"fixed window","rate":5,"period":"1h","capacity":6,"max_reserved":0,"start":"2026-01-31T15:04:05.000678Z"}`,
		`{"kind":"sliding window","rate":100,"period":"1m","slices":30}`, `{"kind":"concurrency","most":5,"lease":"30s"}`,
		`{"kind":"calendar window","rate":100,"resets":"week","zone":"Europe/Berlin","first_weekday":"monday"}`,
		`{"kind":"calendar window","rate":100,"resets":"year","first_day":31,"first_month":"april","max_reserved":1}`,
		`{"rate":10,"period":"1m","adaptive":{"floor":0.5,"growth":0.1,"epoch":"1s","apply":true}}`,
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		policy, err := UnmarshalPolicy(text)
		if err != nil {
			require.ErrorIs(t, err, ErrInvalidLimit)
			return
		}
		written, err := MarshalPolicy(policy)
		require.NoError(t, err)
		again, err := UnmarshalPolicy(written)
		require.NoError(t, err)
		require.True(t, Define("a", policy).isAs(Define("a", again)), "%v is read as %v", policy, again)
		require.Equal(t, policy.String(), again.String())
		rewritten, err := MarshalPolicy(again)
		require.NoError(t, err)
		require.Equal(t, string(written), string(rewritten))
	})
}

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
