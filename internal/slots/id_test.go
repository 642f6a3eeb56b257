package slots

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// named accepts a share whose limit has a name.
func named(of *Share) bool { return of.Row.Name != "" }

func TestLeaseIDsAreReadAsTheyWereWritten(t *testing.T) {
	t.Parallel()
	var most ID
	most.Fence = 1 << 62
	for i := range MaxShares {
		row := bucket.Key{Name: strings.Repeat("n", 63) + string(rune('0'+i)), Key: strings.Repeat("k", maxText)}
		most.Of = append(most.Of, Share{row, strings.Repeat("p", maxText), MaxSlots, bucket.MaxLease})
	}
	for name, id := range map[string]ID{
		"one":     {1795347039021027, []Share{{bucket.Key{Name: "jobs", Key: "user 17"}, "", 1, 60_000_000}}},
		"global":  {7, []Share{{bucket.Key{Name: "jobs"}, "pro", 0, 1000}}},
		"several": {7, []Share{{bucket.Key{Name: "a", Key: "z"}, "", 2, 1000}, {bucket.Key{Name: "b", Key: "ü\n"}, "", 1, 2000}}},
		"nothing": {7, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			read, err := Parse(id.String(), named)
			require.NoError(t, err)
			require.Equal(t, id, *read)
			require.Regexp(t, `^L1[A-Za-z0-9_-]+$`, id.String())
		})
	}
	require.LessOrEqual(t, len(most.String()), maxID)
	require.Less(t, maxID, 60_000)
	short := ID{time.Now().UnixMicro(), []Share{{bucket.Key{Name: "jobs", Key: "user 17"}, "", 1, 60_000_000}}}
	require.Less(t, len(short.String()), 60)
}
