package integration_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket/buckettest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// leaseHistory is a bucket of slots that programs of two versions use, and what it holds exactly.
type leaseHistory struct {
	*testing.T

	b        *bundle
	random   *rand.Rand
	key      string
	limiters [2]*ratelimit.Limiter
	limits   [2]ratelimit.Limit
	policies [2]buckettest.SlotPolicy
	model    buckettest.ExactSlots
	leases   []ratelimit.Lease
	now      int64
	highest  int64
}

func newLeaseHistory(t *testing.T, b *bundle, seed uint64) *leaseHistory {
	t.Helper()
	h := &leaseHistory{T: t, b: b, random: rand.New(rand.NewPCG(seed, 23)), key: fmt.Sprint("model ", seed), now: clockNoon.UnixMicro()}
	for i := range h.limits {
		most := 1 + h.random.IntN(6)
		length := time.Duration(1000+h.random.Int64N(int64(time.Hour/time.Microsecond))) * time.Microsecond
		h.limits[i] = ratelimit.Define("modelled", ratelimit.Concurrency{Most: most, Lease: length})
		h.policies[i] = buckettest.SlotPolicy{Most: int64(most), Length: length.Microseconds()}
		h.limiters[i] = b.with(t, ratelimit.Config{AsOf: func() time.Time { return time.UnixMicro(h.now) }, NoBatching: i == 1})
		_, err := h.limiters[i].Value(t.Context(), h.limits[i].For(h.key)) // from here on it knows the policy
		require.NoError(t, err)
	}
	return h
}

// advance moves the clock as slotsHistory of package bucket does.
func (h *leaseHistory) advance() {
	const minute = int64(time.Minute / time.Microsecond)
	switch h.random.IntN(10) {
	case 0:
	case 1, 2:
		h.now += h.random.Int64N(20 * minute)
	case 3, 4, 5, 6:
		if n := len(h.leases); n > 0 {
			until := h.leases[n-1-h.random.IntN(min(n, 4))].Until.UnixMicro()
			h.now = max(h.now, min(until, h.now+2*1440*minute)+h.random.Int64N(3)-1)
		}
	case 7:
		h.now += h.random.Int64N(minute / 10)
	case 8:
		h.now -= h.random.Int64N(minute)
	default:
		if h.random.IntN(20) == 0 {
			h.now += (h.random.Int64N(5) - 2) * 100 * 1440 * minute
		}
	}
}

// step makes a call: by itself, or in a transaction that is committed or rolled back.
func (h *leaseHistory) step() {
	h.advance()
	version := h.random.IntN(2)
	how := h.random.IntN(6)
	if how > 1 {
		require.NoError(h, h.call(h.limiters[version], version, true))
		return
	}
	before, leases, highest := h.model, h.leases, h.highest
	tx, err := h.b.db().BeginTx(h.Context(), pgx.TxOptions{IsoLevel: pgx.Serializable})
	require.NoError(h, err)
	err = h.call(h.limiters[version].WithTx(tx), version, how == 0)
	if err == nil && how == 0 {
		err = tx.Commit(h.Context())
		if err == nil {
			return
		}
	}
	requireConflict(h, err)
	if rollback := tx.Rollback(h.Context()); !errors.Is(rollback, pgx.ErrTxClosed) {
		require.NoError(h, rollback)
	}
	h.model, h.leases, h.highest = before, leases, highest
}

// requireConflict fails t if err is any error but a serialization failure. A SERIALIZABLE transaction can conflict with
// transactions of other databases: the server summarizes old ones when it has no memory left for them.
func requireConflict(t require.TestingT, err error) {
	if sqlstate(err) != "40001" {
		require.NoError(t, err)
	}
}

// call makes a call of a version, and compares its result with the model. stays is whether the call is not rolled back. It returns
// a serialization failure, and fails for any other unexpected error.
func (h *leaseHistory) call(l *ratelimit.Limiter, version int, stays bool) error {
	policy, request := h.policies[version], h.limits[version].For(h.key)
	var of ratelimit.Lease
	if n := len(h.leases); n > 0 {
		of = h.leases[n-1-h.random.IntN(min(n, 10))]
	}
	chance := h.random.IntN(20)
	switch {
	case chance == 0:
		if err := l.Reset(h.Context(), request); err != nil {
			return err
		}
		h.model.Fill(h.now, policy)
	case chance == 1:
		v, err := l.Value(h.Context(), request)
		if err != nil {
			return err
		}
		require.Equal(h, float64(policy.Most-h.model.Held(h.now)), v.Tokens)
	case chance < 6 && of.ID != "":
		renewed, err := l.RenewLease(h.Context(), of.ID)
		if sqlstate(err) == "40001" {
			return err
		}
		end, held := h.model.Renew(h.now, policy, of.Fence)
		if !held {
			require.ErrorIs(h, err, ratelimit.ErrLeaseLost)
			break
		}
		require.NoError(h, err)
		require.Equal(h, end, renewed.Until.UnixMicro())
		require.Equal(h, of.Fence, renewed.Fence)
	case chance < 10 && of.ID != "":
		err := l.Release(h.Context(), of.ID)
		if sqlstate(err) == "40001" {
			return err
		}
		if h.model.Release(h.now, policy, of.Fence) {
			require.NoError(h, err)
		} else {
			require.ErrorIs(h, err, ratelimit.ErrLeaseLost)
		}
	default:
		return h.acquire(l, policy, request, stays)
	}
	return nil
}

func (h *leaseHistory) acquire(l *ratelimit.Limiter, policy buckettest.SlotPolicy, request ratelimit.Request, stays bool) error {
	slots := 1 + h.random.Int64N(1+h.random.Int64N(policy.Most))
	lease, err := l.Acquire(h.Context(), request.Cost(float64(slots)))
	if err != nil {
		return err
	}
	fence, end, wait := h.model.Acquire(h.now, policy, slots)
	require.Equal(h, wait == 0, lease.Allowed)
	require.Equal(h, wait, lease.RetryAfter)
	require.Equal(h, float64(max(0, policy.Most-h.model.Held(h.now))), lease.Remaining)
	if !lease.Allowed {
		require.Empty(h, lease.ID)
		return nil
	}
	require.Equal(h, fence, lease.Fence)
	require.Equal(h, end, lease.Until.UnixMicro())
	require.Greater(h, fence, h.highest)
	if stays {
		h.highest = fence
	}
	h.leases = append(h.leases[max(0, len(h.leases)-20):len(h.leases):len(h.leases)], lease)
	return nil
}

// TestLeasesAgreeWithTheExactModel makes random calls on rows in Postgres, and compares each answer with to the exact model.
func TestLeasesAgreeWithTheExactModel(t *testing.T) {
	t.Parallel()
	b := setup(t)
	testsize.EachSeed(t, func(t *testing.T, seed uint64) {
		h := newLeaseHistory(t, b, seed)
		for range testsize.Of(300, 2500) {
			h.step()
		}
	})
}
