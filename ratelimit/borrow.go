package ratelimit

import (
	"context"
	"fmt"
	"math"
)

// Borrow returns a request that is paid from own, a guarantee, or else from pool, which has what others leave of theirs:
// of a pool of 100 a second and tenants with guarantees of 50, 30 and 20, each has his guarantee at any time, and what one
// leaves the others share.
//
//	d, err := limiter.Take(ctx, ratelimit.Borrow(Guarantee.For(tenant), Pool.Global()))
//
// When own has enough the tokens are taken from it, and the pool is charged as much, whatever it holds; it may owe then.
// Else, when the pool has enough, they are taken from the pool alone, and State.Borrowed says so. Else the request is
// refused, and may be allowed after the sooner of the two waits. So who comes back is served from his guarantee at once, and
// those who borrow wait for the pool. Let the guarantees add up to no more than the rate of the pool: in any span t all of
// them take no more than the pool's capacity, the capacities of the guarantees, and the pool's rate times t, together.
//
// The cost is that of own, and can be set afterwards with [Request.Cost]; that of pool does not matter. The decision has two
// states for the request, of own and then of pool, and both count towards the 64 limits of a call. In one call several
// requests may borrow from one pool, which may be asked for itself, too: that is decided first, and then the pool pays for
// those whose own buckets have too little.
//
// It is for Take, Check and TakeUpTo; others return ErrInvalidRequest before any SQL, as they cannot know who paid. Own
// and pool are a [TokenBucket], a [FixedWindow] or a [CalendarWindow], with Shards or without. A rule may put the pool in
// shadow or turn it off: it refuses nobody then. When it turns own off, or puts it in shadow, the pool decides alone. A
// pause of either refuses.
func Borrow(own, pool Request) Request {
	pool.cost = 0
	if own.pool != nil {
		pool.pool = own.pool // which no call takes, so that none pays from one of two pools
	}
	own.pool = &pool
	return own
}

// askPool adds the pool of a request that was added last.
func (p *plan) askPool(ctx context.Context, l *Limiter, verb string, r *Request) (subject, error) {
	own := p.asked[len(p.asked)-1].ask
	if err := checkBorrow(r, verb); err != nil {
		return subject{}, err
	}
	s, err := p.ask(ctx, l, verb, r.pool, false)
	if err != nil {
		return s, err
	}
	d := s.limit.definition()
	if err := checkCost(&d, r.cost, math.Inf(1)); err != nil {
		return s, err
	}
	asked := &p.asked[len(p.asked)-1]
	asked.cost = r.cost
	a, of, lender := &p.asks[own], &p.of[own], p.asks[asked.ask].Key
	switch {
	case own == asked.ask:
		return s, fmt.Errorf("%w: %q is to borrow from itself; name another limit or key as the pool", ErrInvalidRequest, lender.Name)
	case a.Lender != nil && *a.Lender != lender:
		return s, fmt.Errorf("%w: a bucket of %q is to borrow from two pools in one call; name one", ErrInvalidRequest, a.Key.Name)
	}
	for _, limit := range []Limit{of.limit, s.limit} {
		if _, adapts := limit.Policy().(Adaptive); adapts || limit.terms().Rule != nil {
			return s, fmt.Errorf("%w: Borrow with %q, which is %v: use token buckets, fixed windows or calendar windows",
				ErrInvalidRequest, limit.Name(), limit.Policy())
		}
	}
	a.Lender, p.of[asked.ask].lends = &lender, true
	if s.mode == Shadow && of.mode == On { // then neither refuses
		of.mode, of.spared, a.Unenforced = Shadow, true, true
	}
	return s, nil
}

// checkBorrow returns an error when a request that borrows cannot be part of a call of the verb.
func checkBorrow(r *Request, verb string) error {
	switch {
	case r.pool.pool != nil:
		return fmt.Errorf("%w: a Borrow of a Borrow; pass the request of one guarantee and that of one pool", ErrInvalidRequest)
	case verb == verbTake, verb == verbCheck:
		return nil
	}
	return fmt.Errorf("%w: %s of a Borrow, which is for Take, Check and TakeUpTo: name %q, or the pool %q, by itself",
		ErrInvalidRequest, verb, r.limit.Name(), r.pool.limit.Name())
}

// checkBorrowers checks, once all requests are added, that no bucket both borrows and is asked otherwise. A pool that is not
// asked for itself refuses nothing for that.
func (p *plan) checkBorrowers() error {
	if len(p.asked) > maxRequests {
		return fmt.Errorf("%w: the call asks for %d limits, of which a Borrow has two; it takes up to %d", ErrInvalidRequest, len(p.asked), maxRequests)
	}
	for i := range p.asks {
		a, of := &p.asks[i], &p.of[i]
		if a.Lender != nil && (of.direct || of.lends) {
			return fmt.Errorf("%w: a bucket of %q borrows and is asked otherwise in one call; make two calls of it", ErrInvalidRequest, a.Key.Name)
		}
		if of.lends && !of.direct {
			a.Lowest = -math.MaxFloat64
		}
	}
	return nil
}

// lender returns the index of the bucket that the i-th one borrows from, or -1 when that is not asked.
func (p *plan) lender(i int) int {
	for j := range p.asks {
		if p.asks[j].Key == *p.asks[i].Lender && !p.of[j].released {
			return j
		}
	}
	return -1
}

// passOn moves the cost of ask i to its pool, if that is in use.
func (p *plan) passOn(i int) {
	a := &p.asks[i]
	if a.Lender == nil {
		return
	}
	if j := p.lender(i); j >= 0 && p.of[j].mode != Off {
		p.asks[j].Cost, p.asks[j].Lowest = p.asks[j].Cost+a.Cost, 0
	}
	a.Lender = nil
}

// checkBorrowed returns an error when what the i-th bucket is asked can never be had, neither from it nor from its pool.
func (p *plan) checkBorrowed(i int) error {
	a, j := &p.asks[i], p.lender(i)
	if j < 0 || a.Cost <= a.Terms.Capacity { // a pool that is not asked limits nobody
		return nil
	}
	pool, borrowed := &p.asks[j], 0.0
	for k := range p.asks {
		if o := &p.asks[k]; o.Lender != nil && *o.Lender == pool.Key && o.Cost > o.Terms.Capacity {
			borrowed += o.Cost
		}
	}
	if pool.Cost+borrowed > pool.Terms.Capacity {
		return fmt.Errorf("%w: %v of %q, which can never give more than %v at once, nor can its pool %q give %v; lower the cost or raise a capacity",
			ErrCostExceedsCapacity, a.Cost, a.Key.Name, a.Terms.Capacity, pool.Key.Name, pool.Cost+borrowed)
	}
	return nil
}
