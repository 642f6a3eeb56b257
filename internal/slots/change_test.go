package slots

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/memstore"
	"github.com/pgratelimit/pgratelimit/internal/store"
)

// owner begins transactions in memory.
type owner struct {
	store.Owner
	pool memstore.Pool
}

func (o owner) InOwnTx(ctx context.Context, from *store.Session, fn func(tx *store.Session) error) error {
	return pgx.BeginFunc(ctx, o.pool, func(tx pgx.Tx) error {
		bound := from.BoundTo(tx, o)
		return fn(&bound)
	})
}

// A renewal extends the leases on all rows of a call and returns the first end. If one of them is lost, it extends none.
func TestARenewalExtendsAllLeasesOfACallOrNone(t *testing.T) {
	t.Parallel()
	const minute = int64(time.Minute / time.Microsecond)
	now := int64(1_600_000_000_000_000)
	pool := memstore.NewPool(nil)
	s := store.NewInMemory(store.Options{Schema: store.DefaultSchema, AsOf: func() *int64 { return new(now) }}).OnPool(pool, owner{pool: pool})
	slot := func(name string, lease int64) bucket.Ask {
		return bucket.Ask{
			Key: bucket.Key{Name: name, Key: "ada"}, Cost: 1,
			Terms: bucket.Terms{Capacity: 2, Rate: 1, Steps: 1, Step: 1, Shards: 1, Kind: bucket.Concurrent{Lease: lease}},
		}
	}
	call := &store.Call{Question: store.Question{Verb: "acquire", Asks: []bucket.Ask{slot("a", 2*minute), slot("b", minute)}}}
	require.NoError(t, s.Decide(t.Context(), call))
	require.True(t, bucket.AllAllowed(call.Answers))
	lease, found := call.Asks[0].NewLease(&call.Answers[0])
	require.True(t, found)

	now += minute / 2
	renewal := Leases{Asks: call.Asks, Fence: lease.Fence, Lengths: []int64{2 * minute, minute}}
	require.NoError(t, renewal.Change(t.Context(), &s))
	require.False(t, renewal.AnyLost())
	require.Equal(t, now+minute, renewal.EndUs)

	end := now + 2*minute
	release := Leases{Asks: call.Asks[1:], Fence: lease.Fence, Lengths: []int64{minute}, Release: true}
	require.NoError(t, release.Change(t.Context(), &s))
	now += minute / 2
	require.NoError(t, renewal.Change(t.Context(), &s))
	require.Equal(t, []bool{false, true}, renewal.Lost)
	rows, err := s.Look(t.Context(), call.Asks[:1], nil)
	require.NoError(t, err)
	require.Equal(t, []bucket.Held{{Fence: lease.Fence, End: end, Slots: 1}}, rows[0].State.Leases())
}
