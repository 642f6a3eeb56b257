package integration_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// What many callers at once are told of one sharded bucket must be what one after the other could have been told
// of a bucket on one row. The clock of these tests stands still, and quarters of tokens are counted in integers.
const (
	quartersFull = 4 * 16
	quartersDebt = 4 * 8
)

var shardedHistory = ratelimit.Define("history", ratelimit.TokenBucket{
	Rate: 1, Period: time.Second, Capacity: quartersFull / 4, MaxReserved: quartersDebt / 4, Shards: 8,
})

// shardedCall is what one operation does to the bucket: it takes or gives quarters.
type shardedCall struct {
	decides bool // whether it may be refused
	cost    int  // below zero: given back, up to the capacity
	lowest  int
	undone  bool // whether what is taken is given back at once
	reads   bool // whether it is told how much there was
}

// shardedReply is what it was told.
type shardedReply struct {
	allowed bool
	held    int
}

func shardedModel() porcupine.Model {
	return porcupine.Model{
		Init: func() any { return quartersFull },
		Step: func(state, input, output any) (bool, any) {
			held, call, told := state.(int), input.(shardedCall), output.(shardedReply)
			after := min(quartersFull, held-call.cost)
			switch {
			case call.reads && told.held != held:
				return false, held
			case call.decides && told.allowed != (after >= call.lowest):
				return false, held
			case call.decides && !told.allowed, call.undone, call.reads:
				return true, held
			}
			return true, after
		},
	}
}

func TestHistoryOfAShardedBucketIsLinearizable(t *testing.T) {
	t.Parallel()
	const callers, each = 8, 40
	b := setup(t)
	b.limiter, _ = b.stopped(t)
	var r recorder[shardedCall, shardedReply]
	history := r.recordAll(t, callers, each, func(_ int, random *rand.Rand) operation[shardedCall, shardedReply] {
		asks, call := randomShardedCall(b, random)
		return operation[shardedCall, shardedReply]{asks, call}
	})
	decisions := slices.DeleteFunc(slices.Clone(history), func(o porcupine.Operation) bool { return !o.Input.(shardedCall).decides })
	requireBoth(t, decisions, func(told shardedReply) bool { return told.allowed })
	requireLinearizable(t, shardedModel(), history)
}

// randomShardedCall returns an operation on the bucket, and what it does.
func randomShardedCall(b *bundle, random *rand.Rand) (shardedCall, func(context.Context) (shardedReply, error)) {
	cost := 1 + random.IntN(6)
	if random.IntN(4) == 0 {
		cost = 1 + random.IntN(quartersFull/2)
	}
	request := shardedHistory.For("key").Cost(float64(cost) / 4)
	undone := errors.New("undone")
	call := shardedCall{decides: true, cost: cost}
	switch random.IntN(12) {
	case 0:
		call.undone = true
		return call, func(ctx context.Context) (told shardedReply, err error) {
			err = b.limiter.InTx(ctx, func(tx pgx.Tx) error {
				d, err := b.limiter.WithTx(tx).Take(ctx, request)
				told.allowed = d.Allowed
				return errors.Join(err, undone)
			})
			if errors.Is(err, undone) && !ratelimit.IsRetryable(err) {
				err = nil
			}
			return told, err
		}
	case 1:
		call.undone = true
		return call, func(ctx context.Context) (shardedReply, error) {
			d, err := b.limiter.Check(ctx, request)
			return shardedReply{allowed: d.Allowed}, err
		}
	case 2:
		return shardedCall{reads: true}, func(ctx context.Context) (shardedReply, error) {
			v, err := b.limiter.Value(ctx, request)
			return shardedReply{held: int(v.Tokens * 4)}, err
		}
	case 3:
		call.lowest = -quartersDebt
		return call, func(ctx context.Context) (shardedReply, error) {
			r, err := b.limiter.Reserve(ctx, request)
			return shardedReply{allowed: r.Allowed}, err
		}
	case 4:
		return shardedCall{cost: cost}, func(ctx context.Context) (shardedReply, error) {
			return shardedReply{}, b.limiter.Charge(ctx, request)
		}
	case 5, 6:
		return shardedCall{cost: -2 * cost}, func(ctx context.Context) (shardedReply, error) {
			return shardedReply{}, b.limiter.Credit(ctx, request.Cost(float64(cost)/2))
		}
	}
	caller := callers()[random.IntN(len(callers()))]
	return call, func(ctx context.Context) (shardedReply, error) {
		d, err := caller.take(ctx, b.db(), b.limiter, request)
		return shardedReply{allowed: d.Allowed}, err
	}
}
