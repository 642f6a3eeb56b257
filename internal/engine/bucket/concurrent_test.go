package bucket_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
	"github.com/pgratelimit/pgratelimit/internal/engine/bucket/buckettest"
)

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
