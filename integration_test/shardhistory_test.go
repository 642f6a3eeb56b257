package integration_test

import (
	"context"
	"errors"
	"maps"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// The answers of concurrent takes, reservations and credits on a sharded bucket must be linearizable for a bucket on one row. The
// clock stands still during the calls and moves between two phases. Full rows gain nothing, and no answer says which rows are full.
// So the model keeps the least and the most possible tokens until an answer says more. All numbers are quarters of tokens, and
// exact in float64.
const (
	quartersFull = 4 * 16
	quartersOwed = 4 * 8
)

// shardedHistories are a bucket that gains a token a second on so many rows.
func shardedHistories() map[string]ratelimit.Policy {
	bucket := ratelimit.TokenBucket{Rate: 1, Period: time.Second, Capacity: quartersFull / 4, MaxReserved: quartersOwed / 4}
	window := ratelimit.FixedWindow{Rate: 1, Period: time.Second, Capacity: quartersFull / 4, MaxReserved: quartersOwed / 4, Start: clockNoon}
	onRows, windowOnRows := bucket, window
	onRows.Shards, windowOnRows.Shards = 8, 8
	return map[string]ratelimit.Policy{"TokenBucket": bucket, "FixedWindow": window, "TokenBucketOn8": onRows, "FixedWindowOn8": windowOnRows}
}

// shardedCall is what one operation does to the bucket: it takes or gives quarters.
type shardedCall struct {
	decides bool // whether it may be refused
	cost    float64
	lowest  float64
	undone  bool // whether the tokens taken are returned at once
	reads   bool // whether the answer has the tokens before the call
	arrives [2]float64
	ends    shardedEnd // the reservation that it ends
}

// shardedEnd is how one of the reservations of a history ends: with actual quarters, or cancelled.
type shardedEnd struct {
	is        bool
	number    int // of the reservation
	cancelled bool
	cost      float64
	actual    float64
}

// shardedReply is the answer to it.
type shardedReply struct {
	allowed bool
	held    float64
	refused bool // the reservation has ended otherwise
}

// shardedState is the least and the most that the bucket may hold, and how reservations have ended.
type shardedState struct {
	least, most float64
	cancelled   map[int]bool
}

func shardedModel() porcupine.Model {
	return porcupine.Model{
		Init: func() any { return shardedState{quartersFull, quartersFull, nil} },
		Step: func(state, input, output any) (bool, any) {
			s, call, told := state.(shardedState), input.(shardedCall), output.(shardedReply)
			switch need := call.lowest + call.cost; {
			case call.reads:
				return s.least <= told.held && told.held <= s.most, shardedState{told.held, told.held, s.cancelled}
			case call.ends.is:
				return s.end(call.ends, told.refused)
			case call.arrives[1] > 0:
				return true, shardedState{min(quartersFull, s.least+call.arrives[0]), min(quartersFull, s.most+call.arrives[1]), s.cancelled}
			case call.decides && !told.allowed:
				return s.least < need, shardedState{s.least, min(s.most, math.Nextafter(need, math.Inf(-1))), s.cancelled}
			case call.decides && s.most < need:
				return false, s
			case call.decides:
				s.least = max(s.least, need)
			}
			if call.undone {
				return true, s
			}
			return true, s.give(-call.cost)
		},
		Equal: reflect.DeepEqual,
	}
}

func (s shardedState) give(quarters float64) shardedState {
	return shardedState{min(quartersFull, s.least+quarters), min(quartersFull, s.most+quarters), s.cancelled}
}

// end ends a reservation, once, and in one of the two ways.
func (s shardedState) end(e shardedEnd, refused bool) (possible bool, after shardedState) {
	if cancelled, ended := s.cancelled[e.number]; ended {
		return refused == (cancelled != e.cancelled), s
	}
	after = s.give(e.cost - e.actual)
	after.cancelled = maps.Clone(s.cancelled)
	if after.cancelled == nil {
		after.cancelled = map[int]bool{}
	}
	after.cancelled[e.number] = e.cancelled
	return !refused, after
}

// shardedHistory is what callers do with one bucket.
type shardedHistory struct {
	*bundle

	limit ratelimit.Limit
	rows  float64

	mu       sync.Mutex
	reserved []shardedReservation // in this phase: of a window that is over nothing is given back
	numbers  int
}

type shardedReservation struct {
	number int
	cost   float64
	id     string
}

func TestHistoryOfAShardedBucketIsLinearizable(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "hundreds of calls; TestHistoryOfAllKindsIsLinearizable has some of each kind")
	const callers, each, phases = 8, 20, 4
	for name, policy := range shardedHistories() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			var clock *clock
			b.limiter, clock = b.stopped(t)
			h := &shardedHistory{bundle: b, limit: ratelimit.Define("history", policy), rows: 1}
			if name[len(name)-1] == '8' {
				h.rows = 8
			}
			var r recorder[shardedCall, shardedReply]
			var history []porcupine.Operation
			passing := testsize.Rand(t)
			for range phases {
				history = append(history, r.recordAll(t, callers, each, func(_ int, random *rand.Rand) operation[shardedCall, shardedReply] {
					return h.draw(random)
				})...)
				seconds := 2 * (1 + passing.IntN(4))
				clock.unixMicro.Add(int64(seconds) * mixSecond)
				arrives := 4 * float64(seconds)
				passes := shardedCall{arrives: [2]float64{arrives / h.rows, arrives}}
				history = append(history, porcupine.Operation{Input: passes, Call: r.events.Add(1), Output: shardedReply{}, Return: r.events.Add(1)})
				h.reserved = nil
			}
			decisions := slices.DeleteFunc(slices.Clone(history), func(o porcupine.Operation) bool { return !o.Input.(shardedCall).decides })
			requireBoth(t, decisions, func(told shardedReply) bool { return told.allowed })
			requireLinearizable(t, shardedModel(), history)
		})
	}
}

// draw returns an operation on the bucket.
func (h *shardedHistory) draw(random *rand.Rand) operation[shardedCall, shardedReply] {
	cost := float64(1 + random.IntN(6))
	if random.IntN(4) == 0 {
		cost = float64(1 + random.IntN(quartersFull/2))
	}
	request := h.limit.For("key").Cost(cost / 4)
	call := shardedCall{decides: true, cost: cost}
	switch random.IntN(14) {
	case 0:
		call.undone = true
		return operation[shardedCall, shardedReply]{call, func(ctx context.Context) (shardedReply, error) { return h.takeAndUndo(ctx, request) }}
	case 1:
		call.undone = true
		return operation[shardedCall, shardedReply]{call, func(ctx context.Context) (shardedReply, error) {
			d, err := h.limiter.Check(ctx, request)
			return shardedReply{allowed: d.Allowed}, err
		}}
	case 2:
		return operation[shardedCall, shardedReply]{shardedCall{reads: true}, func(ctx context.Context) (shardedReply, error) {
			v, err := h.limiter.Value(ctx, request)
			return shardedReply{held: v.Tokens * 4}, err
		}}
	case 3, 4:
		call.lowest = -quartersOwed
		return operation[shardedCall, shardedReply]{call, func(ctx context.Context) (shardedReply, error) { return h.reserve(ctx, request, cost) }}
	case 5:
		return operation[shardedCall, shardedReply]{shardedCall{cost: cost}, func(ctx context.Context) (shardedReply, error) {
			return shardedReply{}, h.limiter.Charge(ctx, request)
		}}
	case 6:
		return operation[shardedCall, shardedReply]{shardedCall{cost: -2 * cost}, func(ctx context.Context) (shardedReply, error) {
			return shardedReply{}, h.limiter.Credit(ctx, request.Cost(cost/2))
		}}
	case 7, 8, 9:
		if o, ok := h.end(random, request); ok {
			return o
		}
	}
	caller := callers()[random.IntN(len(callers()))]
	return operation[shardedCall, shardedReply]{call, func(ctx context.Context) (shardedReply, error) {
		d, err := caller.take(ctx, h.db(), h.limiter, request)
		return shardedReply{allowed: d.Allowed}, err
	}}
}

func (h *shardedHistory) takeAndUndo(ctx context.Context, request ratelimit.Request) (told shardedReply, err error) {
	undone := errors.New("undone")
	err = h.limiter.InTx(ctx, func(tx pgx.Tx) error {
		d, err := h.limiter.WithTx(tx).Take(ctx, request)
		told.allowed = d.Allowed
		return errors.Join(err, undone)
	})
	if errors.Is(err, undone) && !ratelimit.IsRetryable(err) {
		err = nil
	}
	return told, err
}

func (h *shardedHistory) reserve(ctx context.Context, request ratelimit.Request, cost float64) (shardedReply, error) {
	r, err := h.limiter.Reserve(ctx, request)
	if err == nil && r.Allowed {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.numbers++
		h.reserved = append(h.reserved, shardedReservation{h.numbers, cost, r.ID})
	}
	return shardedReply{allowed: r.Allowed}, err
}

// end returns an operation that ends one of the last reservations. Another caller may have ended it, or end it meanwhile.
func (h *shardedHistory) end(random *rand.Rand, request ratelimit.Request) (o operation[shardedCall, shardedReply], ok bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.reserved) == 0 {
		return o, false
	}
	r := h.reserved[max(0, len(h.reserved)-1-random.IntN(3))]
	e := shardedEnd{is: true, number: r.number, cancelled: random.IntN(2) == 0, cost: r.cost}
	if !e.cancelled {
		e.actual = float64(random.IntN(2 * int(r.cost)))
	}
	return operation[shardedCall, shardedReply]{shardedCall{ends: e}, func(ctx context.Context) (shardedReply, error) {
		var err error
		if e.cancelled {
			err = h.limiter.Cancel(ctx, r.id)
		} else {
			err = h.limiter.Settle(ctx, r.id, request.Cost(e.actual/4))
		}
		if errors.Is(err, ratelimit.ErrReservationEnded) {
			return shardedReply{refused: true}, nil
		}
		return shardedReply{}, err
	}}, true
}
