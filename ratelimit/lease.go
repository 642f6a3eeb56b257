package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/arg"
	"github.com/pgratelimit/pgratelimit/internal/engine/batch"
	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
	"github.com/pgratelimit/pgratelimit/internal/engine/slots"
	"github.com/pgratelimit/pgratelimit/internal/engine/store"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
)

// The verbs on leases, as events name them.
const (
	verbRenewLease = "renew_lease"
	verbRelease    = "release"
)

// Lease is the answer to Acquire: slots that are held until you release them, or until the lease ends.
//
// Renew a lease every third of the policy's Lease, so that two more attempts are possible if one fails. A holder that
// works on after Until, for example because its process was suspended, does so beside other holders. If a write must
// not happen twice, or out of order, store the highest Fence with it and reject lower ones. Then a holder that lost its
// slot without noticing writes nothing.
type Lease struct {
	// Decision says whether the slots were free. After a refusal, RetryAfter is an upper bound: the time until enough
	// leases have ended, if no holder releases slots earlier. The Decision of RenewLease has no States.
	Decision
	// ID identifies the lease to RenewLease and Release: up to 60,000 characters of A-Z, a-z, 0-9, - and _, usually below
	// 100, or none after a refusal. Any process that knows it can release the lease. It isn't signed, so don't accept IDs
	// from clients, and it contains the limits' names and the stored keys, in the clear unless Config.HashKey is set.
	ID string
	// Fence is the fencing number, higher than that of every earlier lease on the same buckets. If the lease was acquired
	// in a transaction, use it only after the commit: if the transaction rolls back and the database's clock steps back,
	// the same or a lower number can be given again.
	Fence int64
	// Until is the end of the lease on the database's clock, unless it is renewed.
	Until time.Time

	asked time.Time // the time of the call on this process's clock; the lease began later
}

// Acquire takes a lease on slots of limits with a [Concurrency] policy, as many of each as its request costs, and the
// costs of requests for other limits. It takes everything or nothing. Release returns the slots, but not those tokens.
//
// If you don't release the slots, for example because the process dies, they're held until the lease ends. All limits
// of a call share one lease, with one ID and one fencing number. The lease ends for each limit as its policy says, and
// Until is the earliest end. Acquire returns ErrInvalidRequest if no request is for slots, or if a rule replaces a
// limit's slots by tokens, ErrInvalidCost for a number of slots that is 0 or not whole, and Take's other errors.
//
// Outside a transaction a refusal locks nothing. In a transaction, a rollback undoes the lease, and other calls for the
// bucket wait until the transaction ends, so commit before the work begins. After ErrCommitUnknown or a lost
// connection, the slots may be held until the lease ends. If ctx or Config.Timeout ends a call outside a transaction,
// slots that it gets afterwards are released in the background; other limits' tokens stay taken.
//
// A limit that is off, or that refuses only in shadow, holds no slot. If no limit of the call holds one, Fence is the
// decision's time in microseconds since 1970, and RenewLease and Release accept the ID and do nothing.
func (l *Limiter) Acquire(ctx context.Context, requests ...Request) (Lease, error) {
	asked := time.Now()
	c, err := l.begin(ctx, verbAcquire, requests)
	if err != nil {
		return Lease{}, err
	}
	if !c.plan.asksForSlots(requests) {
		return Lease{}, fmt.Errorf("%w: acquire without a Concurrency limit, so there is no slot to lease; add one, or "+
			"call Take", ErrInvalidRequest)
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

// leaveGrace is how long a call that takes slots goes on after its caller has left. If it's at the server and needs no
// row that another transaction holds, it ends by then.
const leaveGrace = time.Second

// sendLease sends a call that takes slots. If its time is over, it returns at once, and the call goes on without its
// caller and then releases what it got: an interrupted call can have taken slots for a lease that nobody knows.
func sendLease(ctx context.Context, l *Limiter, c *store.Call) error {
	ctx, expire := l.config.bounded(ctx)
	defer expire()
	if ctx.Done() == nil {
		return l.batcher.Do(ctx, c.Queueable())
	}
	if !l.batcher.Begin() {
		return ErrClosed
	}
	own := &store.Call{Question: c.Question}
	own.Asks, own.Leases = slices.Clone(c.Asks), true
	detached, cancel := context.WithCancel(context.WithoutCancel(ctx))
	type result struct {
		err      error
		panicked any
	}
	answered, left := make(chan result), make(chan struct{})
	go func() {
		defer l.batcher.End()
		defer cancel()
		r := result{err: batch.ErrAbandoned}
		defer func() { // also after runtime.Goexit
			r.panicked = recover()
			select {
			case answered <- r:
			case <-left:
				if r.err == nil && bucket.AllAllowed(own.Answers) {
					releaseUnknown(context.WithoutCancel(ctx), l, own)
				}
			}
		}()
		r.err = l.batcher.Do(detached, own.Queueable())
	}()
	select {
	case r := <-answered:
		if r.panicked != nil {
			panic(r.panicked)
		}
		copy(c.Asks, own.Asks)
		c.Answers = own.Answers
		return r.err
	case <-ctx.Done():
		close(left)
		l.batcher.Withdraw(&own.Call)
		time.AfterFunc(leaveGrace, cancel)
		return ctx.Err()
	}
}

// releaseUnknown releases the lease of a call whose caller has left. Hooks of the program may panic.
func releaseUnknown(ctx context.Context, l *Limiter, c *store.Call) {
	defer func() { _ = recover() }()
	id := slots.ID{}
	for i := range c.Asks {
		a := &c.Asks[i]
		if taken, found := a.NewLease(&c.Answers[i]); found {
			rule, _ := a.Terms.Kind.(bucket.Concurrent)
			id.Fence, id.Of = taken.Fence, append(id.Of, slots.Share{Row: a.Key, Slots: taken.Slots, Length: rule.Lease})
		}
	}
	if len(id.Of) > 0 {
		_ = l.Release(ctx, id.String()) // the Observer learns of an error
	}
}

// checkSlotsKept returns an error if an Acquire needs slots of a limit, but a rule replaces them by tokens. A limit
// that is off needs no slots, and guards follow the rule.
func checkSlotsKept(ctx context.Context, r *Request, s *subject) error {
	if s.mode == Off || s.limit.holds() || !r.limit.holds() || arg.FollowsRules(ctx) {
		return nil
	}
	return fmt.Errorf("%w: acquire of %q, which has no slots, because a rule makes it %v; call Take, or change the rule",
		ErrInvalidRequest, s.limit.Name(), s.limit.Policy())
}

// asksForSlots reports whether a request is for slots, by the rule or by the definition in the code.
func (p *plan) asksForSlots(requests []Request) bool {
	for i := range requests {
		if requests[i].limit.holds() || p.limitOf(i).holds() {
			return true
		}
	}
	return false
}

func (p *plan) limitOf(i int) Limit {
	if known := p.asked[i].known; known != nil {
		return known.Limit
	}
	return p.of[p.asked[i].ask].limit
}

func (c *call) lease(requests []Request, d Decision) Lease {
	id := slots.ID{Fence: max(d.At.UnixMicro(), 1)}
	first := int64(0) // the earliest end
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
			if rule, holds := terms.Kind.(bucket.Concurrent); holds {
				of.Length = rule.Lease
			}
		}
		if at := &c.plan.asked[i]; at.known == nil {
			a := &c.Asks[at.ask]
			if taken, found := a.NewLease(&c.Answers[at.ask]); found {
				rule, _ := a.Terms.Kind.(bucket.Concurrent)
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

// RenewLease extends a lease, so that it ends no earlier than the policy's Lease from now. The policy is the limit's
// rule, or otherwise the one that this Limiter last used; if there is neither, the lease gets its old length. ID and
// Fence don't change.
//
// It returns ErrLeaseLost, and extends nothing, if the lease has ended, was released, or was reset with its bucket, on
// any of its limits: stop the work. It returns ErrInvalidLease for an invalid ID. After any other error the lease ends
// at its previous end, or later. A rollback undoes it.
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

// Release returns a lease's slots. Tokens that Acquire took from other limits stay taken.
//
// It returns ErrLeaseLost if one of the limits' leases was no longer held, because it had ended, was released before,
// or was reset with its bucket. The work may then have run beside other holders. The slots that were held are still
// returned. It returns ErrInvalidLease for an invalid ID. After any other error, the slots are free when the lease ends
// at the latest. A rollback undoes it.
//
// Like every call, Release waits for the bucket's row for at most Config.Timeout.
func (l *Limiter) Release(ctx context.Context, id string) error {
	_, _, err := withLease(ctx, l, verbRelease, id)
	return err
}

// withLease releases or renews a lease, in the caller's transaction if l is bound to one.
func withLease(ctx context.Context, l *Limiter, verb, id string) (*slots.ID, *slots.Leases, error) {
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
		err = explained(ctx, l, fmt.Sprintf("%s %q", verb, name), err)
		l.reports.failed(ctx, event.Failed{Verb: verb, Limit: name, Err: err}, began)
		return nil, nil, err
	}
	for i := range leases.Asks {
		a := &leases.Asks[i]
		l.reports.tell(ctx, event.LeaseChanged{
			Verb: verb, Limit: a.Key.Name, Slots: int(a.Cost), Lost: leases.Lost[i],
			Pending: l.reports.pending(),
		})
	}
	if leases.AnyLost() {
		return nil, nil, during(fmt.Sprintf("%s %q", verb, leases.FirstLost()),
			fmt.Errorf("%w: it has ended, or was released or reset before", ErrLeaseLost))
	}
	return parsed, leases, nil
}

// changeLeases changes the rows of leases within Config.Timeout.
func changeLeases(ctx context.Context, l *Limiter, verb string, leases *slots.Leases) error {
	ctx, cancel := l.config.bounded(ctx)
	defer cancel()
	if err := l.pass(ctx, verb, false, true); err != nil {
		return err
	}
	if l.pool == nil {
		return l.session.OrSpoil(ctx, leases.Change(ctx, &l.session))
	}
	if c := leases.One(); c != nil && leases.Release && !l.batcher.IsClosed() {
		err := l.batcher.Do(ctx, (&store.Call{Question: store.Question{Verb: verb, Asks: leases.Asks}, Lease: c}).Queueable())
		if isOver := errors.Is(err, ErrClosed) || errors.Is(err, ErrOverloaded); !isOver && (err != nil || leases.Take(*c)) {
			return err
		}
	}
	return l.session.Change(ctx, verb, func(ctx context.Context, s *store.Session) error { return leases.Change(ctx, s) })
}

// leasesOf returns the leases of an ID, with the current terms of their limits as far as this Limiter knows them.
func leasesOf(ctx context.Context, l *Limiter, verb string, id *slots.ID) *slots.Leases {
	leases := &slots.Leases{Fence: id.Fence, Release: verb == verbRelease, NowUs: l.config.estimate()}
	shortest := int64(0)
	for _, of := range id.Of {
		policy := Concurrency{Slots: maxSlots, Lease: time.Duration(of.Length) * time.Microsecond}
		limit, err := NewLimit(of.Row.Name, policy)
		if err != nil { // the ID was checked
			continue
		}
		if last := l.policies.last(of.Row.Name); last != nil {
			limit = *last
		}
		if rule := ruleFor(ctx, l, verb, limit, of.Plan, of.Row.Key); rule != nil {
			limit = rule.holding(l.config.estimate()).limit
		}
		length := of.Length
		if rule, holds := limit.terms().Kind.(bucket.Concurrent); holds {
			length = rule.Lease
		}
		if shortest == 0 || length < shortest {
			shortest = length
		}
		if of.Slots > 0 {
			leases.Asks = append(leases.Asks, bucket.Ask{
				Key: of.Row, Terms: limit.termsFor(of.Row.Key),
				Cost: float64(of.Slots),
			})
			leases.Lengths = append(leases.Lengths, length)
		}
	}
	leases.EndUs = leases.NowUs + shortest // if no slots are held
	return leases
}

// parseLeaseID parses and checks a lease ID.
func parseLeaseID(text string) (*slots.ID, error) {
	id, err := slots.Parse(text, func(of *slots.Share) bool {
		return validName.MatchString(of.Row.Name) && isText(of.Row.Key) && isText(of.Plan)
	})
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalidLease, err)
	}
	return id, nil
}

// StoredLeaseID returns the ID of the lease with a fencing number on the request's bucket, for tools that read leases
// from the table and release them. Make the request with [Limit.ForStoredKey] or [Limit.Global]. An Acquire for several
// limits has one lease on each of their buckets, and the ID is for one of them. The error wraps ErrInvalidLease for a
// fence below 1, and ErrInvalidRequest for a key that isn't in the stored form.
func StoredLeaseID(request Request, fence int64) (string, error) {
	switch {
	case request.limit.isZero() || !request.stored && !request.global:
		return "", fmt.Errorf("%w: the lease of %v; name the bucket with ForStoredKey", ErrInvalidRequest, request)
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
