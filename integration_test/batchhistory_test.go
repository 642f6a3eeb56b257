package integration_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/anishathalye/porcupine"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// What callers whose calls are folded, in two processes, are told about two buckets must be what one after the
// other could have been told, as in TestHistoryOfABucketIsLinearizable, whose bucket each of these is.

// pairQuestion is what one operation asks of the two buckets: nil where it asks nothing.
type pairQuestion [2]*question

// pairReply is what it was told of those it asked.
type pairReply struct {
	allowed bool
	of      [2]reply
}

func (o timing) pairModel() porcupine.Model {
	one := o.model()
	return porcupine.Model{
		Init: func() any { return [2]content{} },
		Step: func(state, input, output any) (bool, any) {
			was, asked, told := state.([2]content), input.(pairQuestion), output.(pairReply)
			after, enough := was, true
			for i := range asked {
				if asked[i] != nil {
					enough = enough && told.of[i].allowed
				}
			}
			if enough != told.allowed {
				return false, was
			}
			for i := range asked {
				if asked[i] == nil {
					continue
				}
				// One that had enough beside another that had not keeps what it was asked for.
				q, r := *asked[i], told.of[i]
				q.keeps = q.keeps && told.allowed
				possible, next := one.Step(was[i], q, r)
				if !possible {
					return false, was
				}
				after[i] = next.(content)
			}
			return true, after
		},
		Equal: func(a, b any) bool { return a == b },
	}
}

func TestHistoryOfBatchesIsLinearizable(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "hundreds of calls; TestHistoryOfAllKindsIsLinearizable has some of each kind")
	onEach(t, testHistoryOfBatchesIsLinearizable, onPostgres, inMemory, inPartitions)
}

func testHistoryOfBatchesIsLinearizable(t *testing.T, on backend) {
	for _, timing := range timings() {
		t.Run(timing.name, func(t *testing.T) {
			t.Parallel()
			const callers, each = 12, 40
			b := on.setup(t)
			processes := []pairHistory{{timing, timing.limiter(t, b)}, {timing, timing.limiter(t, b)}}
			var r recorder[pairQuestion, pairReply]
			history := r.recordAll(t, callers, each, func(caller int, random *rand.Rand) operation[pairQuestion, pairReply] {
				return processes[caller%4/3].draw(random)
			})
			requireBoth(t, history, func(told pairReply) bool { return told.allowed })
			requireLinearizable(t, timing.pairModel(), history)

			another := pairHistory{timing, timing.limiter(t, on.setup(t))}
			requireOnce(t, timing.pairModel(), another.ask([2]float64{1, 2}, pairTake))
		})
	}
}

// pairHistory is what the callers of one process do with the two buckets.
type pairHistory struct {
	timing
	limiter *ratelimit.Limiter
}

// draw returns an operation on one or both of the buckets.
func (h pairHistory) draw(random *rand.Rand) operation[pairQuestion, pairReply] {
	h.pass(random)
	kind := pairTake
	switch {
	case random.IntN(8) == 0:
		kind = pairCheck
	case random.IntN(6) == 0:
		kind = pairReserve
	}
	var costs [2]float64
	for i := range costs {
		if random.IntN(3) == 0 || i == 1 && costs[0] == 0 {
			costs[i] = float64(1+random.IntN(4*4)) / 4
		}
	}
	return h.ask(costs, kind)
}

// pairCall decides on requests, and says whether what it takes stays taken, and whether it may be owed.
type pairCall struct {
	decide     func(ctx context.Context, limiter *ratelimit.Limiter, requests []ratelimit.Request) (ratelimit.Decision, error)
	keeps, owe bool
}

var (
	pairTake = pairCall{keeps: true, decide: func(ctx context.Context, limiter *ratelimit.Limiter, requests []ratelimit.Request) (ratelimit.Decision, error) {
		return limiter.Take(ctx, requests...)
	}}
	pairCheck = pairCall{decide: func(ctx context.Context, limiter *ratelimit.Limiter, requests []ratelimit.Request) (ratelimit.Decision, error) {
		return limiter.Check(ctx, requests...)
	}}
	pairReserve = pairCall{keeps: true, owe: true, decide: func(ctx context.Context, limiter *ratelimit.Limiter, requests []ratelimit.Request) (ratelimit.Decision, error) {
		r, err := limiter.Reserve(ctx, requests...)
		return r.Decision, err
	}}
)

// ask asks for costs of the two buckets: nothing of one whose cost is 0.
func (h pairHistory) ask(costs [2]float64, kind pairCall) operation[pairQuestion, pairReply] {
	var asked pairQuestion
	var requests []ratelimit.Request
	var buckets []int
	for i, cost := range costs {
		if cost == 0 {
			continue
		}
		asked[i] = &question{cost: h.units(cost), keeps: kind.keeps}
		if kind.owe {
			asked[i].lowest = -h.units(historyMaxDebt)
		}
		requests = append(requests, h.limit().For(fmt.Sprint("key", i)).Cost(cost))
		buckets = append(buckets, i)
	}
	return operation[pairQuestion, pairReply]{asked, func(ctx context.Context) (pairReply, error) {
		d, err := kind.decide(ctx, h.limiter, requests)
		if err != nil {
			return pairReply{}, err
		}
		told := pairReply{allowed: d.Allowed}
		for n, i := range buckets {
			told.of[i] = h.reply(d, n)
		}
		return told, nil
	}}
}
