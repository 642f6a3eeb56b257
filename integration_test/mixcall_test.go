package integration_test

import (
	"context"
	"math/rand/v2"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// mixCall is a call: what it costs of each kind, 0 where it does not ask it.
type mixCall struct {
	costs [mixKinds]int64
	upTo  int // of how many units as many are taken as there are; 0: what it costs
	check bool
}

// mixReply is what a call was told.
type mixReply struct {
	ratelimit.Decision
	taken int
	lease ratelimit.Lease
}

// requests returns what the call asks of buckets of a key, in any order, and of which kinds they are.
func (c mixCall) requests(limits []ratelimit.Limit, key string, random *rand.Rand) (requests []ratelimit.Request, kinds []int) {
	kinds = random.Perm(mixKinds)
	n := 0
	for _, kind := range kinds {
		if cost := c.costs[kind]; cost > 0 {
			requests = append(requests, limits[kind].For(key).Cost(float64(cost)))
			kinds[n] = kind
			n++
		}
	}
	return requests, kinds[:n]
}

// call makes the call.
func (c mixCall) call(ctx context.Context, l *ratelimit.Limiter, requests []ratelimit.Request) (r mixReply, err error) {
	switch {
	case c.check:
		r.Decision, err = l.Check(ctx, requests...)
	case c.upTo > 0:
		r.taken, r.Decision, err = l.TakeUpTo(ctx, c.upTo, requests...)
	case c.costs[mixHeld] > 0:
		r.lease, err = l.Acquire(ctx, requests...)
		r.Decision = r.lease.Decision
	default:
		r.Decision, err = l.Take(ctx, requests...)
	}
	return r, err
}
