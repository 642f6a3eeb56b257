package integration_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// slotRace counts the slots that its callers hold.
type slotRace struct {
	limits [2]ratelimit.Limit // both have keys a, b and c
	brief  ratelimit.Limit    // whose leases nobody releases
	held   [2][3]atomic.Int64
	over   atomic.Int64
	got    atomic.Int64
	fences sync.Map
}

// TestNoSlotIsHeldTwice has callers take, renew and release leases on the same slots, alone, in batches and in
// transactions of an isolation level, some of which are rolled back, on one limit or two. Never are more slots held
// than there are, no fencing number is given twice, and in the end all slots are free.
func TestNoSlotIsHeldTwice(t *testing.T) {
	t.Parallel()
	for _, isolation := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		t.Run(string(isolation), func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			limiters := []*ratelimit.Limiter{b.limiter, b.unbatched(t), b.with(t, ratelimit.Config{})}
			r := &slotRace{limits: [2]ratelimit.Limit{daylong("few", 3), daylong("more", 4)}, brief: ratelimit.Define("brief", ratelimit.Concurrency{Slots: 2, Lease: 2 * time.Millisecond})}
			require.NoError(t, atonce.Do(8, func(caller int) error {
				random := rand.New(rand.NewPCG(uint64(caller), 7))
				for range testkit.Sized(25, 400) {
					if err := r.turn(t.Context(), b, isolation, limiters[random.IntN(len(limiters))], random); err != nil {
						return err
					}
				}
				return nil
			}))
			require.Zero(t, r.over.Load())
			require.Positive(t, r.got.Load())
			var wrong int
			require.NoError(t, b.pool.QueryRow(t.Context(), `
				SELECT count(*) FROM ratelimit.buckets AS b WHERE value < 0 OR name <> 'brief' AND value <> capacity
					OR value + (SELECT coalesce(sum(l.slots), 0) FROM ratelimit.leases AS l WHERE l.name = b.name AND l.key = b.key) <> capacity`).Scan(&wrong))
			require.Zero(t, wrong)
		})
	}
}

var errRollBack = errors.New("roll back")

// turn takes slots, perhaps renews them, and releases them.
func (r *slotRace) turn(ctx context.Context, b *bundle, isolation pgx.TxIsoLevel, l *ratelimit.Limiter, random *rand.Rand) error {
	key, both, slots := random.IntN(3), random.IntN(4) == 0, 1+random.IntN(3)/2
	requests := []ratelimit.Request{r.limits[0].For(fmt.Sprint(key)).Cost(float64(slots))}
	if both {
		requests = append(requests, r.limits[1].For(fmt.Sprint(key)))
	}
	undone := random.IntN(6) == 0
	in := func(call func(l *ratelimit.Limiter) error) error {
		if random.IntN(2) == 0 && !undone {
			return call(l)
		}
		_, err := atonce.Tx(ctx, b.db(), isolation, func(tx pgx.Tx) error {
			if err := call(l.WithTx(tx)); err != nil || !undone {
				return err
			}
			return errRollBack
		})
		return err
	}
	var lease ratelimit.Lease
	if err := in(func(l *ratelimit.Limiter) (err error) {
		lease, err = l.Acquire(ctx, requests...)
		return err
	}); err != nil || !lease.Allowed {
		if undone && errors.Is(err, errRollBack) {
			return nil
		}
		return err
	}
	r.got.Add(1)
	count := func(by int64) {
		if now := r.held[0][key].Add(by * int64(slots)); now > int64(r.limits[0].Capacity()) {
			r.over.Add(1)
		}
		if both && r.held[1][key].Add(by) > int64(r.limits[1].Capacity()) {
			r.over.Add(1)
		}
	}
	if _, twice := r.fences.LoadOrStore(fmt.Sprint(key, " ", lease.Fence), true); twice {
		return fmt.Errorf("the fencing number %d of key %d was given twice", lease.Fence, key)
	}
	count(1)
	if random.IntN(3) == 0 {
		if err := in(func(l *ratelimit.Limiter) error { return errOf(l.RenewLease(ctx, lease.ID)) }); err != nil && !errors.Is(err, errRollBack) {
			return err
		}
	}
	brief, err := l.Acquire(ctx, r.brief.For(fmt.Sprint(key)))
	if err != nil {
		return err
	}
	if _, twice := r.fences.LoadOrStore(fmt.Sprint("brief ", key, " ", brief.Fence), true); twice && brief.Allowed {
		return fmt.Errorf("the fencing number %d of key %d was given twice", brief.Fence, key)
	}
	count(-1)
	undone = false
	return in(func(l *ratelimit.Limiter) error { return l.Release(ctx, lease.ID) })
}
