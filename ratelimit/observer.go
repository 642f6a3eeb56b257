package ratelimit

import (
	"context"
	"time"
)

// Observer is told what the calls of a Limiter did, for logs, metrics and traces. Observe runs on the
// goroutine that noticed, before the call returns to its caller: it must be quick, must not call the Limiter,
// and may run on many goroutines at once. For a panic see [Config.Observer]. ctx carries the values of the call's context, and may have ended.
//
// Events of a transaction of InTx are reported when it has ended. If it rolled back, its refusals, failed calls and lost leases are
// reported, and what was undone is not. An attempt that lost a conflict or its connection reports a Conflicted in place of its events, and
// a transaction that fails because of that a Failed. Events of a transaction that you began are reported at once, with Pending set.
// No event holds a key.
type Observer interface {
	Observe(ctx context.Context, event Event)
}

// Event is one of [Decided], [Settlement], [Leased], [Failed], [Conflicted], [Batched], [Queued], [Pruned], [Mended],
// [Redefined], [PlanWithoutRule], [Answered], [RulesLoaded], [PriceChanged] and [Prefetched]. More may be added: ignore those you do not know.
type Event interface{ event() }

// Decided is a decision: allowed or refused. Refused is not failed.
type Decided struct {
	// Verb is "take", "check", "reserve" or "acquire".
	Verb string
	// Decision is what the caller was told.
	Decision Decision
	// Delay is how long after the decision reserved work may run; 0 unless the verb reserves.
	Delay time.Duration
	// Began is when the call was made, on this process's clock, and Elapsed how long it took, as its caller
	// saw it.
	Began   time.Time
	Elapsed time.Duration
	// Shadow is whether the caller only wants to know; see [WithShadow].
	Shadow bool
	// Cached is whether the decision came from the deny cache.
	Cached bool
	// Pending is whether it was made in a transaction that may still be rolled back.
	Pending bool
}

// Settlement is the difference between what was reserved of one limit and what was used, when a reservation
// is settled, cancelled or expires.
type Settlement struct {
	// Limit is the limit's name.
	Limit string
	// Delta is what was charged beyond the reservation; below zero it was given back.
	Delta float64
	// Pending is as in Decided.
	Pending bool
}

// Leased is what RenewLease or Release made of a lease on slots of one limit.
type Leased struct {
	// Verb is "renew_lease" or "release".
	Verb string
	// Limit is the limit's name.
	Limit string
	// Slots is how many slots the lease is on.
	Slots int
	// Lost is whether the lease was not held any more, so that the work may have run beside others.
	Lost bool
	// Pending is as in Decided.
	Pending bool
}

// Failed is a call that ended in an error which is not its caller's: the request was neither allowed nor
// refused. errors.Is(Err, ErrContended) tells contention from a store that does not work.
type Failed struct {
	// Verb is the call in lower case, as in Decided, and "transaction" for InTx.
	Verb string
	// Limit is the name of the first limit of the call; empty for a transaction and for a call on a reservation.
	Limit string
	// Err is what the caller got.
	Err error
	// Began is when the call was made, and Elapsed how long it took.
	Began   time.Time
	Elapsed time.Duration
	// Shadow is as in Decided.
	Shadow bool
}

// Conflicted is an attempt that lost against a concurrent transaction and is made again.
type Conflicted struct {
	// Verb is as in Failed.
	Verb string
	// Attempt counts the attempts of the call, from 1.
	Attempt int
	// Err is the conflict.
	Err error
}

// Batched is a statement that decided for several calls at once.
type Batched struct {
	// Calls is how many calls were in the batch.
	Calls int
	// Elapsed is how long the database took.
	Elapsed time.Duration
}

// Queued is a wait for earlier transactions that want the same bucket: those of this process, or with Config.SharedQueues
// those of all processes.
type Queued struct {
	// Waited is how long.
	Waited time.Duration
}

// Pruned is a run of Prune that has ended.
type Pruned struct {
	// Buckets is how many rows it deleted.
	Buckets int
	// Elapsed is how long it took.
	Elapsed time.Duration
}

// Mended is a bucket that refused a call because a wrong clock had left its ts in the future, and that counts
// from the present again.
type Mended struct {
	// Limit is the name of the bucket's limit.
	Limit string
}

// Redefined is a limit that a Limiter was used with under two policies, which share the buckets of the name: whoever comes
// last decides how large they are. It is told once for each name, whatever becomes of the call, and mostly a mistake: a name
// used twice. Where one name is to have several policies, as plans, give it rules in [Config.Policies]. Without an Observer,
// slog's default logger has a warning instead.
type Redefined struct {
	// Limit is the name of both.
	Limit string
	// Before and Policy are what the name was used with first, and now.
	Before, Policy Policy
}

// PlanWithoutRule is a request whose plan has no stored rule, although other plans of the limit have one. Usually the program
// forgot or misspelled [Request.Plan]. The request was decided by the rule without a plan, or else by the definition in the
// code, and its bucket was cut down to that capacity. Package rules reports each limit and plan once, up to 16 plans of a limit.
type PlanWithoutRule struct {
	// Limit is the name of the limit.
	Limit string
	// Plan is the plan of the request; "" if it has none.
	Plan string
}

// Answered is what a guard in front of a handler, as of package httplimit, made of a request. What its limits
// decided is a Decided or a Failed besides.
type Answered struct {
	// Route is what is guarded, as the program calls it, and may be empty.
	Route string
	// Limit is the name of the first limit that it is about: that refused, or else was asked. Empty when none is known.
	Limit string
	// Result is "allowed", "refused", "bad_key", "bad_cost", "too_costly", "failed_closed" (there is no decision, and
	// the request was not let through), "failed_open" (it was) or "cancelled"; later there may be a "refunded", a
	// "refund_failed", or a "lease_lost", of one that lost the slot that it held.
	Result string
	// Shadow is whether it only would have happened.
	Shadow bool
	// Err is why, where there is a reason. Errors of the program's own functions are as they returned them, with
	// whatever these hold.
	Err error
}

// RulesLoaded is a load of the rules that are stored in tables, by package rules.
type RulesLoaded struct {
	// Version is that of the rules that decide from now on. When nothing could be loaded they are those of before.
	Version int64
	// Rules and Overrides are how many there are, with the overrides that ended lately.
	Rules, Overrides int
	// Elapsed is how long the load took.
	Elapsed time.Duration
	// Late is how long after its beginning the latest change was heard of: until then this process decided by what held
	// before. 0: in time.
	Late time.Duration
	// Err is why nothing could be loaded, or, where Kept is above 0, what is wrong with what was kept.
	Err error
	// Kept is how many rules and overrides cannot be read, and stay as they were.
	Kept int
}

// PriceChanged is the price of a key of an [Adaptive] limit that has changed, as this process has learnt. Each process that
// uses the key is told, and learns it at most an epoch late.
type PriceChanged struct {
	// Limit is the limit's name.
	Limit string
	// Before and Price are what a token cost and costs; 1 is the contract.
	Before, Price float64
	// Applied is whether it is charged, and not only told.
	Applied bool
	// Decided is whether this process has worked it out: of all processes one does.
	Decided bool
}

// Prefetched is what became of tokens that are taken ahead of a bucket; see TokenBucket.Prefetch. Of those that were taken, the
// ones that were neither returned nor lost were given out, or still are to be.
type Prefetched struct {
	// Limit is the limit's name.
	Limit string
	// Taken is how many were taken ahead, beside those that calls waited for.
	Taken float64
	// Returned is how many the bucket has been given back.
	Returned float64
	// Lost is how many were not used, and could not be given back without more being admitted than the limit promises, or at
	// all. What a process keeps that dies nobody tells.
	Lost float64
}

type shadowKey struct{}

// WithShadow marks calls with the returned context as trials of a limit that is not enforced yet: they take and
// answer as always, and an Observer can tell their refusals from those that turned somebody away.
func WithShadow(ctx context.Context) context.Context {
	return context.WithValue(ctx, shadowKey{}, true)
}

// inShadow reports whether WithShadow marked the context.
func inShadow(ctx context.Context) bool {
	shadow, _ := ctx.Value(shadowKey{}).(bool)
	return shadow
}

func (Decided) event()         {}
func (Settlement) event()      {}
func (Leased) event()          {}
func (Failed) event()          {}
func (Conflicted) event()      {}
func (Batched) event()         {}
func (Queued) event()          {}
func (Pruned) event()          {}
func (Mended) event()          {}
func (Redefined) event()       {}
func (PlanWithoutRule) event() {}
func (Answered) event()        {}
func (RulesLoaded) event()     {}
func (PriceChanged) event()    {}
func (Prefetched) event()      {}

// Observers returns an Observer that tells each of observers, in this order; nil ones are left out. It is
// nil when none is left, and so nobody.
func Observers(observers ...Observer) Observer {
	var told several
	for _, o := range observers {
		if !isNil(o) {
			told = append(told, o)
		}
	}
	switch len(told) {
	case 0:
		return nil
	case 1:
		return told[0]
	}
	return told
}

// recovering is an Observer whose panics are recovered.
type recovering struct{ Observer }

func (r recovering) Observe(ctx context.Context, event Event) {
	defer func() { _ = recover() }()
	r.Observer.Observe(ctx, event)
}

type several []Observer

func (s several) Observe(ctx context.Context, event Event) {
	for _, o := range s {
		o.Observe(ctx, event)
	}
}
