package ratelimit

import (
	"context"
	"fmt"
	"math"
)

// Borrow returns a request that takes from own, a guarantee, or otherwise from pool, which holds the unused share of all
// guarantees. For example, a pool of 100 a second serves tenants with guarantees of 50, 30 and 20. Each tenant can use its
// guarantee at any time, and all tenants share the rest.
//
//	d, err := limiter.Take(ctx, ratelimit.Borrow(Guarantee.For(tenant), Pool.Global()))
//
// If own has enough tokens, they are taken from own, and the same number is charged to the pool, even below zero. Otherwise, if
// the pool has enough, they are taken from the pool alone, and State.Borrowed is set. Otherwise the request is refused, with
// the shorter of the two waits. So a tenant that returns is served from its guarantee at once, and borrowers wait for the pool.
//
// The sum of the guarantees should be at most the rate of the pool. Then all tenants together take at most the rate of the pool
// times t in any span t, plus the capacities of the pool and of the guarantees.
//
// The cost is the cost of own, which you can also set on the result with [Request.Cost]. The cost of pool is ignored. The
// decision has two states for the request, first of own and then of pool. Both count towards the 64 limits of a call. Several
// requests of a call can borrow from one pool, and the call can also take from the pool directly. The direct request is decided
// first.
//
// Borrow is for Take, Check and TakeUpTo. Other calls return ErrInvalidRequest before any SQL, because they cannot know which
// bucket paid. Own and pool must be a [TokenBucket], a [FixedWindow] or a [CalendarWindow]. If a rule puts the pool in shadow
// or turns it off, nothing is refused. If a rule puts own in shadow or turns it off, the pool alone decides. A pause of either
// refuses.
func Borrow(own, pool Request) Request {
	pool.cost = 0
	if own.pool != nil {
		pool.pool = own.pool // every call rejects a pool with a pool
	}
	own.pool = &pool
	return own
}

// askPool adds the pool of the request that was added last.
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
		if _, adapts := limit.Policy().(Adaptive); adapts || !limit.terms().Kind.Owes() {
			return s, fmt.Errorf("%w: Borrow with %q, which is %v: use token buckets, fixed windows or calendar windows",
				ErrInvalidRequest, limit.Name(), limit.Policy())
		}
	}
	a.Lender, p.of[asked.ask].lends = &lender, true
	if s.mode == Shadow && of.mode == On { // then neither own nor the pool refuses
		of.mode, of.spared, a.Unenforced = Shadow, true, true
	}
	return s, nil
}

// checkBorrow returns an error if the verb does not support a request that borrows.
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

// checkBorrowers returns an error if a bucket both borrows and is named by another request. All requests must have been added.
// A pool that no request names directly can owe tokens for the guarantees.
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

// lender returns the index of the bucket that bucket i borrows from, or -1 if the call does not ask it.
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

// checkBorrowed returns an error if neither bucket i nor its pool can ever hold the cost.
func (p *plan) checkBorrowed(i int) error {
	a, j := &p.asks[i], p.lender(i)
	if j < 0 || a.Cost <= a.Terms.Capacity { // without a pool in the call, no cost is too large
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
