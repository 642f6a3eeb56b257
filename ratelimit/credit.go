package ratelimit

import (
	"context"
	"fmt"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/store"
)

// Credit gives tokens back without a reservation: the costs of the requests are added, up to each
// capacity. It trusts the caller that they were taken, and is not idempotent; where either matters,
// reserve and settle. In a transaction it is undone with it.
func (l *Limiter) Credit(ctx context.Context, requests ...Request) error {
	return adjust(ctx, l, "credit", -1, requests, func(*bucket.Ask) int64 { return bucket.MaxInstant })
}

// Refund is Credit for what the same requests took at an instant, which is the At of that Decision: what they
// took from a fixed window comes back only until the window has ended, because the next one never missed it.
func (l *Limiter) Refund(ctx context.Context, at time.Time, requests ...Request) error {
	taken := clampInstant(at)
	return adjust(ctx, l, "refund", -1, requests, func(a *bucket.Ask) int64 { return a.Terms.RefundUntil(taken) })
}

// Charge takes what the requests cost whatever the buckets hold, below zero if need be, and later requests
// wait until it is repaid: for a cost that is known only when the work is done, where Take had asked for
// less. It is not idempotent. In a transaction it is undone with it.
func (l *Limiter) Charge(ctx context.Context, requests ...Request) error {
	return adjust(ctx, l, "charge", 1, requests, func(*bucket.Ask) int64 { return bucket.MaxInstant })
}

// adjust charges the costs of the requests times sign, or credits them up to the step that until says.
func adjust(ctx context.Context, l *Limiter, verb string, sign float64, requests []Request, until func(*bucket.Ask) int64) error {
	c, err := l.begin(ctx, verb, costless(requests))
	if err != nil {
		return err
	}
	costs, err := actualCosts(ctx, l, verb, requests)
	if err != nil {
		return during(verb, err)
	}
	charge := store.Charge{Asks: c.Asks, Amounts: make([]float64, len(c.Asks)), Until: make([]int64, len(c.Asks))}
	for i := range c.Asks {
		charge.Amounts[i], charge.Until[i] = sign*costs[c.Asks[i].Key].cost, until(&c.Asks[i])
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
		key, err := storedKey(l.config.HashKey, r)
		if err != nil {
			return nil, err
		}
		var now int64
		s := l.subjectOf(ctx, verb, r, key, &now)
		if err := checkCost(&s.limit, r.cost, bucket.MaxTokens); err != nil {
			return nil, err
		}
		k, a := bucket.Key{Name: r.limit.name, Key: key}, actualCost{r.cost, s, s.limit.termsFor(key)}
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
