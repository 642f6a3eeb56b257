package ratelimit

import (
	"context"
	"fmt"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/rulekind"
	"github.com/pgratelimit/pgratelimit/internal/slots"
	"github.com/pgratelimit/pgratelimit/internal/store"
)

// The verbs on leases, as observers are told them.
const (
	verbRenewLease = "renew_lease"
	verbRelease    = "release"
)

// Lease is the answer to Acquire: slots that are held until they are given back, or until the lease ends.
//
// A holder renews its lease in time: every third of the policy's Lease leaves it two more tries. One that works on after
// Until does so beside others, as a process may that was paused. What must not be written twice, or in the wrong order,
// compares Fence: where it keeps the highest number that it has seen, and refuses lower ones, a holder that has lost its
// slot without noticing writes nothing.
type Lease struct {
	// Decision is whether the slots were free. When it is refused, RetryAfter is an upper bound: the wait until enough
	// leases have ended, where nobody gives slots back earlier. That of RenewLease has no States.
	Decision
	// ID names the lease to RenewLease and Release: up to 60,000 characters of A-Z, a-z, 0-9, - and _, mostly below 100. It
	// is empty when the call was refused. Any process can release a lease whose ID it knows. The limits' names are in it and
	// the keys as stored: in the clear, unless Config.HashKey is set. It is not signed: do not take IDs from clients.
	ID string
	// Fence is the fencing number: higher than that of any lease before on the same buckets. What a transaction has acquired that
	// is rolled back was no lease: after a step back of the database's clock its number may come again, or a lower one. So let
	// it out of a transaction when that has committed.
	Fence int64
	// Until is when the lease ends, on the database's clock, unless it is renewed.
	Until time.Time

	asked time.Time // when it was asked for, on this process's clock: it had not begun before
}

// Acquire takes a lease on slots of limits with a [Concurrency] policy, as many of each as the request costs, and what the
// requests for other limits cost: all of it or nothing. Those tokens stay taken when the slots are given back.
//
// Give the slots back with Release. Without it, as when the process dies, they are held until the lease ends. All limits of
// one call have one lease, with one ID and one fencing number. It ends for each limit as its policy says; Until is
// the earliest end. Acquire returns ErrInvalidRequest when no request is for slots, and when a rule makes tokens of the slots of
// a limit. Costs that are not whole, or 0, are an error, too.
//
// Outside a transaction a refusal locks nothing. In a transaction the lease is undone with it, and others wait for the bucket's row
// until it ends: commit before the work begins. Errors are those of Take. With ErrCommitUnknown, or a connection that fails, the
// slots may be held until the lease ends.
//
// A limit that is off, or that refuses in shadow only, has no slot held of it. Where none is, Fence is the instant of the
// decision in microseconds since 1970, and the ID is good for RenewLease and Release, which have nothing to do then.
func (l *Limiter) Acquire(ctx context.Context, requests ...Request) (Lease, error) {
	asked := time.Now()
	c, err := l.begin(ctx, verbAcquire, requests)
	if err != nil {
		return Lease{}, err
	}
	if !c.plan.asksForSlots(requests) {
		return Lease{}, fmt.Errorf("%w: acquire of no slots, as no limit of the call has a Concurrency policy; add one, or call Take", ErrInvalidRequest)
	}
	c.Look = c.plan.costless
	d, err := l.do(ctx, c)
	if err != nil || !d.Allowed {
		return Lease{Decision: d}, err
	}
	lease := c.lease(requests, d)
	lease.asked = asked
	return lease, nil
}

// checkSlotsKept returns an error when an Acquire needs slots of a limit that has none, because a rule makes it one of tokens. A limit
// that is off needs none, and guards follow the rule.
func checkSlotsKept(ctx context.Context, r *Request, s *subject) error {
	if s.mode == Off || s.limit.terms().Holds() || !r.limit.terms().Holds() || rulekind.IsFollowed(ctx) {
		return nil
	}
	return fmt.Errorf("%w: acquire of %q, which has no slots, because a rule makes it %v; call Take, or change the rule",
		ErrInvalidRequest, s.limit.Name(), s.limit.Policy())
}

// asksForSlots reports whether one of the requests is for slots: by the rule, or by the definition in the code where the rule is off.
func (p *plan) asksForSlots(requests []Request) bool {
	for i := range requests {
		if requests[i].limit.terms().Holds() || p.limitOf(i).terms().Holds() {
			return true
		}
	}
	return false
}

// limitOf returns the limit of the i-th request.
func (p *plan) limitOf(i int) Limit {
	if known := p.asked[i].known; known != nil {
		return known.Limit
	}
	return p.of[p.asked[i].ask].limit
}

// lease returns the lease that the call has taken, by the decision on it.
func (c *call) lease(requests []Request, d Decision) Lease {
	id := slots.ID{Fence: max(d.At.UnixMicro(), 1)}
	first := int64(0) // when the first of them ends
	ends := func(end int64) {
		if first == 0 || end < first {
			first = end
		}
	}
	held := false
	for i := range requests {
		of := slots.Share{Row: bucket.Key{Name: requests[i].limit.Name(), Key: c.plan.asked[i].key}}
		if c.plan.ruled {
			of.Plan = requests[i].plan
		}
		for _, terms := range []bucket.Terms{requests[i].limit.terms(), c.plan.limitOf(i).terms()} {
			if rule, holds := terms.Rule.(bucket.Concurrent); holds {
				of.Length = rule.Lease
			}
		}
		if at := &c.plan.asked[i]; at.known == nil {
			a := &c.Asks[at.ask]
			if taken, found := a.NewLease(&c.Answers[at.ask]); found {
				rule, _ := a.Terms.Rule.(bucket.Concurrent)
				of.Slots, of.Length, id.Fence, held = taken.Slots, rule.Lease, taken.Fence, true
				ends(taken.End)
			}
		}
		if of.Length > 0 {
			id.Of = append(id.Of, of)
		}
	}
	id.Sort()
	if !held {
		for _, of := range id.Of {
			ends(d.At.UnixMicro() + of.Length)
		}
	}
	return Lease{Decision: d, ID: id.String(), Fence: id.Fence, Until: time.UnixMicro(first)}
}

// RenewLease extends a lease, which then ends no earlier than the policy's Lease from now. The policy is the one that this
// Limiter last used each limit with, or the rule there is; where it was not used with one, the lease gets the length again
// that it had. ID and Fence stay as they are.
//
// It returns ErrLeaseLost when the lease has ended, was released, or was reset with its bucket, on any of its limits, and
// extends nothing then: stop the work. It returns ErrInvalidLease for what is no ID. On any other error the lease ends
// when it would have, or later. In a transaction it is undone with it.
func (l *Limiter) RenewLease(ctx context.Context, id string) (Lease, error) {
	asked := time.Now()
	parsed, leases, err := withLease(ctx, l, verbRenewLease, id)
	if err != nil {
		return Lease{}, err
	}
	return Lease{
		Decision: Decision{Allowed: true, At: time.UnixMicro(leases.NowUs)},
		ID:       id, Fence: parsed.Fence, Until: time.UnixMicro(leases.EndUs), asked: asked,
	}, nil
}

// Release gives the slots of a lease back. Tokens that the Acquire took from other limits stay taken.
//
// It returns ErrLeaseLost when the lease was not held any more on one of its limits, because it had ended, was released
// before, or was reset with its bucket: the work has run beside others, perhaps. What was still held is given back then,
// too. It returns ErrInvalidLease for what is no ID. After any other error the slots are free when the lease ends at the
// latest. In a transaction it is undone with it.
//
// A release waits for the bucket's row, as every call, for the time of Config.Timeout at most.
func (l *Limiter) Release(ctx context.Context, id string) error {
	_, _, err := withLease(ctx, l, verbRelease, id)
	return err
}

// withLease releases or renews a lease: in the caller's transaction when l is bound to one, else by itself.
func withLease(ctx context.Context, l *Limiter, verb, id string) (*slots.ID, *store.Leases, error) {
	if err := l.ready(ctx, verb); err != nil {
		return nil, nil, err
	}
	parsed, err := parseLeaseID(id)
	if err != nil {
		return nil, nil, during(verb, err)
	}
	leases := leasesOf(ctx, l, verb, parsed)
	if len(leases.Asks) == 0 { // nothing is held
		return parsed, leases, nil
	}
	began, name := l.reports.began(), leases.Asks[0].Key.Name
	if err := changeLeases(ctx, l, verb, leases); err != nil {
		err = during(fmt.Sprintf("%s %q", verb, name), l.explained(ctx, err))
		l.reports.failed(ctx, Failed{Verb: verb, Limit: name, Err: err}, began)
		return nil, nil, err
	}
	for i := range leases.Asks {
		a := &leases.Asks[i]
		l.reports.tell(ctx, Leased{Verb: verb, Limit: a.Key.Name, Slots: int(a.Cost), Lost: leases.Lost[i], Pending: l.reports.pending()})
	}
	if leases.AnyLost() {
		return nil, nil, during(fmt.Sprintf("%s %q", verb, leases.FirstLost()), fmt.Errorf("%w: it has ended, or was released or reset before", ErrLeaseLost))
	}
	return parsed, leases, nil
}

// changeLeases has the store change the rows, within the time of Config.Timeout.
func changeLeases(ctx context.Context, l *Limiter, verb string, leases *store.Leases) error {
	ctx, cancel := l.bounded(ctx)
	defer cancel()
	if err := l.pass(ctx, verb, false, true); err != nil {
		return err
	}
	if l.pool == nil {
		return l.session.OrSpoil(ctx, l.session.ChangeLeases(ctx, leases))
	}
	return l.session.Change(ctx, verb, func(ctx context.Context, s *store.Session) error { return s.ChangeLeases(ctx, leases) })
}

// leasesOf returns what the ID says is held, with the terms that the limits have now as far as this Limiter knows.
func leasesOf(ctx context.Context, l *Limiter, verb string, id *slots.ID) *store.Leases {
	leases := &store.Leases{Fence: id.Fence, Release: verb == verbRelease, NowUs: l.config.estimate()}
	shortest := int64(0)
	for _, of := range id.Of {
		policy := Concurrency{Most: maxSlots, Lease: time.Duration(of.Length) * time.Microsecond}
		limit, err := NewLimit(of.Row.Name, policy)
		if err != nil { // the ID was checked
			continue
		}
		if last, known := l.policies.last(of.Row.Name); known {
			limit = limitOf(of.Row.Name, limit.Policy(), last)
		}
		if rule := ruleFor(ctx, l, verb, limit, of.Plan, of.Row.Key); rule != nil {
			limit = rule.holding(l.config.estimate()).limit
		}
		length := of.Length
		if rule, holds := limit.terms().Rule.(bucket.Concurrent); holds {
			length = rule.Lease
		}
		if shortest == 0 || length < shortest {
			shortest = length
		}
		if of.Slots > 0 {
			leases.Asks = append(leases.Asks, bucket.Ask{Key: of.Row, Terms: limit.termsFor(of.Row.Key), Cost: float64(of.Slots)})
			leases.Lengths = append(leases.Lengths, length)
		}
	}
	leases.EndUs = leases.NowUs + shortest // where nothing is held
	return leases
}

// parseLeaseID returns what an ID says.
func parseLeaseID(text string) (*slots.ID, error) {
	id, err := slots.Parse(text, func(of *slots.Share) bool {
		return validName.MatchString(of.Row.Name) && isText(of.Row.Key) && isText(of.Plan)
	})
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalidLease, err)
	}
	return id, nil
}

// StoredLeaseID returns the ID of the lease with a fencing number on the bucket of a request, which is in the stored form:
// that of [Limit.ForStored], or [Limit.Global]. It is for tools that read leases in the table and release them. An Acquire
// for several limits has one lease on each of their buckets; this ID is that of one alone. It returns an error that wraps
// ErrInvalidLease for a number that no lease has, and ErrInvalidRequest for a key that is not in the stored form.
func StoredLeaseID(request Request, fence int64) (string, error) {
	switch {
	case request.limit.isZero() || !request.stored && !request.global:
		return "", fmt.Errorf("%w: the lease of %v; name the bucket with ForStored", ErrInvalidRequest, request)
	case fence < 1:
		return "", fmt.Errorf("%w: the fencing number is %d; use one that the table has", ErrInvalidLease, fence)
	}
	of := slots.Share{
		Row: bucket.Key{Name: request.limit.Name(), Key: request.key}, Plan: request.plan, Slots: 1,
		Length: Concurrency{}.lease().Microseconds(),
	}
	id := (&slots.ID{Fence: fence, Of: []slots.Share{of}}).String()
	_, err := parseLeaseID(id)
	return id, err
}
