package ratelimit

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/store"
)

// Credit gives tokens back without a reservation: the costs of the requests are added, up to each
// capacity. It trusts the caller that they were taken, and is not idempotent; where either matters,
// reserve and settle. In a transaction it is undone with it.
func (l *Limiter) Credit(ctx context.Context, requests ...Request) error {
	return adjust(ctx, l, "credit", -1, requests, bucket.Whenever)
}

// Refund is Credit for what the same requests took at an instant, which is the At of that Decision: what they
// took from a fixed window comes back only until the window has ended, because the next one never missed it. What an [Adaptive]
// limit has charged comes back with [Request.Price].
func (l *Limiter) Refund(ctx context.Context, at time.Time, requests ...Request) error {
	return adjust(ctx, l, "refund", -1, requests, clampInstant(at))
}

// Charge takes what the requests cost whatever the buckets hold, below zero if need be, and later requests
// wait until it is repaid: for a cost that is known only when the work is done, where Take had asked for
// less. It is not idempotent. In a transaction it is undone with it.
func (l *Limiter) Charge(ctx context.Context, requests ...Request) error {
	return adjust(ctx, l, "charge", 1, requests, bucket.Whenever)
}

// adjust charges the costs of the requests times sign, or credits them as what was taken at an instant.
func adjust(ctx context.Context, l *Limiter, verb string, sign float64, requests []Request, taken int64) error {
	c, err := l.begin(ctx, verb, costless(requests))
	if err != nil {
		return err
	}
	costs, err := actualCosts(ctx, l, verb, requests)
	if err != nil {
		return during(verb, err)
	}
	charge := store.Charge{Asks: c.Asks, Amounts: make([]float64, len(c.Asks)), Taken: slices.Repeat([]int64{taken}, len(c.Asks))}
	for i := range c.Asks {
		charge.Amounts[i] = sign * costs[c.Asks[i].Key].cost
		if c.plan.of[i].mode == Off { // nothing is taken from it, so nothing is given back
			charge.Amounts[i] = 0
		}
	}
	c.change = func(ctx context.Context, s *store.Session) error { return s.Charge(ctx, charge) }
	_, err = l.do(ctx, c)
	return err
}

// actualCosts checks the requests of Settle and Credit and returns their costs, added up where one bucket is
// named twice. They may be above what the limit can hold, as debts may.
func actualCosts(ctx context.Context, l *Limiter, verb string, actual []Request) (map[bucket.Key]actualCost, error) {
	costs := make(map[bucket.Key]actualCost, len(actual))
	for i := range actual {
		r := &actual[i]
		if r.pool != nil {
			return nil, checkBorrow(r, verb)
		}
		key, err := storedKey(l.config.HashKey, r)
		if err != nil {
			return nil, err
		}
		var now int64
		s, d := subjectOf(ctx, l, verb, r, key, &now)
		if err := checkCost(&d, r.cost, bucket.MaxTokens); err != nil {
			return nil, err
		}
		if !d.plain {
			if err := checkVerb(s.limit, verb, r.cost); err != nil {
				return nil, err
			}
		}
		if err := checkPrice(r); err != nil {
			return nil, err
		}
		cost := r.cost
		if r.price != 0 && verb != "settle" && s.mayHaveCharged(r) {
			cost *= r.price
		}
		k, a := bucket.Key{Name: r.limit.Name(), Key: key}, actualCost{cost, s, termsFor(d.terms, d.name, key)}
		if same, found := costs[k]; found {
			if same.terms != a.terms && !same.subject.isRuledAs(&s) {
				return nil, fmt.Errorf("%w: the call names one bucket of %q under two policies; give the name one policy", ErrInvalidRequest, k.Name)
			}
			a.cost += same.cost
		}
		costs[k] = a
	}
	return costs, nil
}

// actualCost is what work cost, and the terms of the limit that it is told with.
type actualCost struct {
	cost    float64
	subject subject
	terms   bucket.Terms
}
