package ratelimit

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

func TestLeaseIDsAreReadAsTheyWereWritten(t *testing.T) {
	t.Parallel()
	var most leaseID
	most.fence = 1 << 62
	for i := range maxRequests {
		row := bucket.Key{Name: strings.Repeat("n", 63) + string(rune('0'+i)), Key: strings.Repeat("k", maxKeyBytes)}
		most.of = append(most.of, leaseOf{row, strings.Repeat("p", maxPlanBytes), maxSlots, bucket.MaxLease})
	}
	for name, id := range map[string]leaseID{
		"one":     {1795347039021027, []leaseOf{{bucket.Key{Name: "jobs", Key: "user 17"}, "", 1, 60_000_000}}},
		"global":  {7, []leaseOf{{bucket.Key{Name: "jobs"}, "pro", 0, 1000}}},
		"several": {7, []leaseOf{{bucket.Key{Name: "a", Key: "z"}, "", 2, 1000}, {bucket.Key{Name: "b", Key: "ü\n"}, "", 1, 2000}}},
		"nothing": {7, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			read, err := parseLeaseID(id.String())
			require.NoError(t, err)
			require.Equal(t, id, *read)
			require.Regexp(t, `^L1[A-Za-z0-9_-]+$`, id.String())
		})
	}
	require.LessOrEqual(t, len(most.String()), maxLeaseID)
	require.Less(t, maxLeaseID, 60_000)
	short := leaseID{time.Now().UnixMicro(), []leaseOf{{bucket.Key{Name: "jobs", Key: "user 17"}, "", 1, 60_000_000}}}
	require.Less(t, len(short.String()), 60)
}

// FuzzLeaseID holds every ID that is accepted to what Acquire writes, and to what a statement may be given.
func FuzzLeaseID(f *testing.F) {
	f.Add("")
	f.Add("L1")
	f.Add("L1AAAAAA")
	f.Add((&leaseID{fence: 7}).String())
	f.Add((&leaseID{math.MaxInt64, []leaseOf{{bucket.Key{Name: "jobs"}, "", 1, 1000}}}).String())
	f.Add((&leaseID{7, []leaseOf{{bucket.Key{Name: "jobs", Key: "k"}, "pro", 1, 1000}, {bucket.Key{Name: "jobs", Key: "l"}, "", 3, 1000}}}).String())
	f.Add((&leaseID{7, []leaseOf{{bucket.Key{Name: "b"}, "", 1, 1000}, {bucket.Key{Name: "a"}, "", 1, 1000}}}).String())
	f.Add((&leaseID{7, []leaseOf{{bucket.Key{Name: "jobs", Key: "\x00"}, "", 1001, 1}}}).String())
	f.Fuzz(func(t *testing.T, text string) {
		id, err := parseLeaseID(text)
		if err != nil {
			require.ErrorIs(t, err, ErrInvalidLease)
			require.Nil(t, id)
			require.Less(t, len(err.Error()), 300)
			return
		}
		require.Equal(t, text, id.String())
		require.Positive(t, id.fence)
		require.LessOrEqual(t, len(id.of), maxRequests)
		for i, of := range id.of {
			_, err := storedKey(nil, &Request{limit: limitOf(of.row.Name, madeElsewhere{}, bucket.Terms{}), key: of.row.Key, stored: true})
			require.NoError(t, err)
			_, err = NewLimit(of.row.Name, Concurrency{Most: 1, Lease: time.Duration(of.length) * time.Microsecond})
			require.NoError(t, err)
			require.LessOrEqual(t, of.slots, int64(maxSlots))
			require.GreaterOrEqual(t, of.slots, int64(0))
			if i > 0 {
				require.Negative(t, id.of[i-1].row.Compare(of.row))
			}
		}
	})
}
