package ratelimit

import (
	"context"
	"fmt"
	"math"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
	"github.com/pgratelimit/pgratelimit/internal/engine/store"
)

// Credit returns the requests' costs to their buckets, up to each capacity, without a reservation. It trusts you that
// they were taken, and a second call returns them again; if either matters, reserve and settle. A rollback undoes it.
func (l *Limiter) Credit(ctx context.Context, requests ...Request) error {
	return adjust(ctx, l, "credit", -1, requests, bucket.Whenever)
}

// CreditTaken is Credit for tokens that the same requests took at a time, their Decision's At. A fixed or calendar
// window gets its tokens back only until it ends, because the next window didn't miss them.
func (l *Limiter) CreditTaken(ctx context.Context, at time.Time, requests ...Request) error {
	return adjust(ctx, l, "credit_taken", -1, requests, clampInstant(at))
}

// Charge takes the requests' costs even if the buckets have too few tokens, so later requests wait until the debt is
// repaid. Use it if you learn the cost only after the work, and Take has taken less. A second call charges again. A
// rollback undoes it.
func (l *Limiter) Charge(ctx context.Context, requests ...Request) error {
	return adjust(ctx, l, "charge", 1, requests, bucket.Whenever)
}

// ChargeUntil empties a bucket so far that it gives no tokens before a time on the database's clock, and returns when
// its debt will be repaid. That is until, or a microsecond or two later if the rate is a fraction. It's later if the
// bucket already owed more, in which case nothing is charged, and for a window it's the window's start. Concurrent
// calls with the same until don't add up, at any isolation level. A time in the past charges nothing.
//
// The request's cost doesn't matter. ChargeUntil returns ErrInvalidRequest for a [SlidingWindow] and a [Concurrency],
// which can't owe, and for a time so far ahead that the debt would exceed 1e12 tokens. Otherwise it returns Charge's
// errors. A rollback undoes it.
func (l *Limiter) ChargeUntil(ctx context.Context, until time.Time, request Request) (end time.Time, err error) {
	const verb = "charge_until"
	c, err := l.begin(ctx, verb, costless([]Request{request}))
	if err != nil {
		return end, err
	}
	limit, instant := request.limit, clampInstant(until.Add(time.Microsecond-1))
	switch t := &c.Asks[0].Terms; {
	case !t.Kind.Owes():
		return end, during(verb, fmt.Errorf("%w: %q is %v, which owes no tokens; charge a token bucket or a window",
			ErrInvalidRequest, limit.Name(), limit.Policy()))
	case c.plan.of[0].mode == Off: // it takes no tokens
		instant = math.MinInt64
	case t.Rate*float64(instant-l.config.estimate())/(float64(t.Step)*t.Steps) > bucket.MaxTokens:
		return end, during(verb, fmt.Errorf("%w: until %v %q would owe more than %g tokens; name an earlier time",
			ErrInvalidRequest, until, limit.Name(), bucket.MaxTokens))
	}
	rows, _ := c.plan.rows(true)
	c.change = func(ctx context.Context, s *store.Session) error {
		return s.ChargeLocked(ctx, rows, func(p *bucket.Ledger) (c store.Charge) {
			latest := bucket.MinInstant
			for i := range rows {
				amounts, until := p.ChargeUntil(&rows[i], instant)
				for _, amount := range amounts {
					c.Add(rows[i], amount, bucket.Whenever)
				}
				latest = max(latest, until)
			}
			end = time.UnixMicro(latest)
			return c
		})
	}
	if _, err = l.do(ctx, c); err != nil {
		return time.Time{}, err
	}
	return end, nil
}

// adjust charges the costs of the requests times sign. A negative sign credits them as tokens taken at the instant
// taken.
func adjust(ctx context.Context, l *Limiter, verb string, sign float64, requests []Request, taken int64) error {
	c, err := l.begin(ctx, verb, costless(requests))
	if err != nil {
		return err
	}
	costs, err := actualCosts(ctx, l, verb, requests)
	if err != nil {
		return during(verb, err)
	}
	amounts := make([]float64, len(c.Asks))
	for i := range c.Asks {
		if c.plan.of[i].mode != Off { // no tokens were taken from one that is off, so none are returned
			amounts[i] = sign * costs[c.Asks[i].Key].cost
		}
	}
	c.plan.pickRows(l)
	c.change = func(ctx context.Context, s *store.Session) error { return c.plan.charge(ctx, s, amounts, taken) }
	_, err = l.do(ctx, c)
	return err
}

// actualCosts checks the requests of Settle, Credit, CreditTaken and Charge, and returns the sum of their costs for
// each bucket. The costs can exceed the capacity, because the bucket can owe them.
func actualCosts(ctx context.Context, l *Limiter, verb string, actual []Request) (map[bucket.Key]actualCost, error) {
	costs := make(map[bucket.Key]actualCost, len(actual))
	for i := range actual {
		r := &actual[i]
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
		k, a := bucket.Key{Name: r.limit.Name(), Key: key}, actualCost{r.cost, s, termsFor(d.terms, d.name, key)}
		if same, found := costs[k]; found {
			if same.terms != a.terms && !same.subject.isRuledAs(&s) {
				return nil, fmt.Errorf("%w: the call names one bucket of %q under two policies; give the name one policy",
					ErrInvalidRequest, k.Name)
			}
			a.cost += same.cost
		}
		costs[k] = a
	}
	return costs, nil
}

// actualCost is the actual cost of work for a bucket, with the limit and its terms.
type actualCost struct {
	cost    float64
	subject subject
	terms   bucket.Terms
}
