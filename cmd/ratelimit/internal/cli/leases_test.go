package cli_test

import (
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// lease is a lease that leases list and get print.
type lease struct {
	Fence        int64
	Slots        int
	Since, Until time.Time
}

// TestLeases promises that people see who holds slots, and can take them back.
func TestLeases(t *testing.T) {
	t.Parallel()
	f := setup(t)
	f.put(t, rules.Rule{Limit: "jobs", Policy: ratelimit.Concurrency{Most: 5, Lease: time.Hour}})
	set, err := rules.NewSet(f.pool, rules.Config{})
	require.NoError(t, err)
	require.NoError(t, set.Load(t.Context()))
	limiter := f.limiter(t, ratelimit.Config{Policies: set})
	jobs := ratelimit.Define("jobs", ratelimit.Concurrency{Most: 1})
	two, err := limiter.Acquire(t.Context(), jobs.For("acme").Cost(2))
	require.NoError(t, err)
	one, err := limiter.Acquire(t.Context(), jobs.For("acme"))
	require.NoError(t, err)
	shared, err := limiter.Acquire(t.Context(), jobs.Global())
	require.NoError(t, err)

	held := read[[]lease](t, f, 0, "leases", "list", "jobs", "acme")
	require.Len(t, held, 2)
	for i, want := range []ratelimit.Lease{two, one} {
		require.Equal(t, want.Fence, held[i].Fence)
		require.Equal(t, 2-i, held[i].Slots)
		require.True(t, want.Until.Equal(held[i].Until))
		require.WithinDuration(t, want.At, held[i].Since, time.Millisecond)
	}
	b := read[struct {
		Tokens float64
		Leases []lease
	}](t, f, 0, "get", "jobs", "acme")
	require.Equal(t, 2.0, b.Tokens)
	require.Equal(t, held, b.Leases)
	require.Contains(t, f.ok(t, "get", "jobs", "acme"), "held        2, since 2")
	require.Contains(t, f.ok(t, "leases", "list", "jobs", "bob", "--stored"), "nobody holds a slot")
	require.Contains(t, f.ok(t, "leases", "list", "jobs"), "FENCE")

	number := func(l ratelimit.Lease) string { return strconv.FormatInt(l.Fence, 10) }
	require.Contains(t, f.fails(t, 2, "leases", "release", "jobs", "acme", "--yes"), "give --fence")
	require.Contains(t, f.fails(t, 2, "leases", "release", "jobs", "acme", "--fence", number(two)), "give --yes")
	require.Contains(t, f.fails(t, 6, "leases", "release", "jobs", "acme", "--fence", "7", "--yes"), "there is no lease 7")
	require.Contains(t, f.ok(t, "leases", "release", "jobs", "acme", "--fence", number(two), "--yes"), "released: "+number(two))
	require.Contains(t, f.fails(t, 6, "leases", "release", "jobs", "acme", "--fence", number(two), "--yes"), "or it has ended")
	f.ok(t, "leases", "release", "jobs", "--fence", number(shared), "--yes")
	require.Contains(t, f.fails(t, 2, "leases"), "\n  release ")
	require.Len(t, read[[]lease](t, f, 0, "leases", "list", "jobs", "acme"), 1)
	require.ErrorIs(t, limiter.Release(t.Context(), two.ID), ratelimit.ErrLeaseLost, "the holder hears of it")
	require.NoError(t, limiter.Release(t.Context(), one.ID))
}

// TestLeasesOfHashedKeys promises that leases are found by the key and by its hash.
func TestLeasesOfHashedKeys(t *testing.T) {
	t.Parallel()
	f := setup(t)
	const secret = "0123456789abcdef"
	path := file(t, "secret", secret)
	limiter := f.limiter(t, ratelimit.Config{HashKey: []byte(secret)})
	request := ratelimit.Define("jobs", ratelimit.Concurrency{Most: 5, Lease: time.Hour}).For("ada")
	stored, err := limiter.StoredKey(request)
	require.NoError(t, err)
	for _, key := range [][]string{{"ada", "--hash-key-file", path}, {stored, "--stored"}} {
		held, err := limiter.Acquire(t.Context(), request)
		require.NoError(t, err)
		require.Len(t, read[[]lease](t, f, 0, append([]string{"leases", "list", "jobs"}, key...)...), 1)
		released := read[struct {
			Limit, Key string
			Fence      int64
		}](t, f, 0, append([]string{"leases", "release", "jobs", "--yes", "--fence", strconv.FormatInt(held.Fence, 10)}, key...)...)
		require.Equal(t, stored, released.Key)
		require.Equal(t, held.Fence, released.Fence)
		require.ErrorIs(t, limiter.Release(t.Context(), held.ID), ratelimit.ErrLeaseLost)
	}
}
