// Package event has what a Limiter and the packages around it report to a [ratelimit.Observer], for logs, metrics and
// traces. [ratelimit.Decided], which has the decision on a call, is an event too. No event contains a key.
//
// The packages sloglimit, promlimit and otellimit receive all of them, so most programs don't need this package:
//
//	func (c *counter) Observe(ctx context.Context, e event.Event) {
//		if failed, ok := e.(event.Failed); ok {
//			c.failures.WithLabelValues(failed.Verb).Inc()
//		}
//	}
package event

import (
	"fmt"
	"time"
)

// Event is a type of this package, or a [ratelimit.Decided]. Ignore those that you don't know, because more may be
// added.
type Event interface{ IsEvent() }

// Settlement is the difference between the reserved and the actual cost of one limit, when a reservation is settled or
// cancelled, or expires.
type Settlement struct {
	// Limit is the limit's name.
	Limit string
	// Delta is the number of tokens charged beyond the reservation. If it is negative, tokens were returned.
	Delta float64
	// Pending is as in [ratelimit.Decided].
	Pending bool
}

// LeaseChanged is the result of RenewLease or Release for a lease on slots of one limit.
type LeaseChanged struct {
	// Verb is "renew_lease" or "release".
	Verb string
	// Limit is the limit's name.
	Limit string
	// Slots is the number of slots of the lease.
	Slots int
	// Lost reports whether the lease was no longer held, so that the work may have run beside other holders.
	Lost bool
	// Pending is as in [ratelimit.Decided].
	Pending bool
}

// Failed is a call that returned an error its caller can't be blamed for. The request was neither allowed nor refused.
// errors.Is(Err, ratelimit.ErrContended) tells contention from a database that doesn't work.
//
// It includes calls whose context ended before the answer. If errors.Is(Err, context.Canceled), the caller left, and
// Elapsed is how long it had waited; if that's long, the database stalls or a row is held. Sleeping for a turn in
// take.Wait, or for a slot in package waitlist, isn't such a wait.
type Failed struct {
	// Verb is the call in lower case, with underscores between words: "take", "charge_until". It is "transaction" for
	// InTx.
	Verb string
	// Limit is the name of the first limit of the call. It is empty for a transaction and for a call on a reservation.
	Limit string
	// Err is the error that the caller got.
	Err error
	// Began is the time of the call, and Elapsed its duration.
	Began   time.Time
	Elapsed time.Duration
}

// Transacted is a transaction of InTx that committed, or that fn rolled back by returning an error. It comes after the
// events of its calls. A transaction that failed is a Failed.
type Transacted struct {
	// Committed reports whether it committed.
	Committed bool
	// Attempts is how often fn ran: more than once after conflicts and lost connections.
	Attempts int
	// Began is the time of the call of InTx, and Elapsed its duration with all attempts.
	Began   time.Time
	Elapsed time.Duration
}

// Conflicted is an attempt that conflicted with a concurrent transaction. The call tries again, unless its attempts or
// its time are used up.
type Conflicted struct {
	// Verb is as in Failed.
	Verb string
	// Attempt counts the attempts of the call, from 1.
	Attempt int
	// Err is the conflict.
	Err error
}

// Batched is a statement that decided several calls together.
type Batched struct {
	// Calls is the number of calls in the batch.
	Calls int
	// Elapsed is the time that the database took.
	Elapsed time.Duration
}

// QueueWait is a wait in the queue of a bucket, behind transactions of this or other processes.
type QueueWait struct {
	// Waited is the duration of the wait.
	Waited time.Duration
}

// Pruned is a completed run of Prune.
type Pruned struct {
	// Buckets is the number of rows it deleted.
	Buckets int
	// Elapsed is the time it took.
	Elapsed time.Duration
}

// ClockRepaired is a bucket that refused a call because a wrong clock had written a ts in the future. From now on it
// counts from the present.
type ClockRepaired struct {
	// Limit is the name of the bucket's limit.
	Limit string
}

// PolicyConflict is a limit name that a Limiter has used with two policies. They share the name's buckets, and the
// latest call decides the capacity, so it's usually a mistake: one name for two limits. If a name should have several
// policies, such as plans, use rules in [ratelimit.Config.Policies]. It's reported once for each name, even if the call
// fails, and without an Observer as a warning to slog's default logger.
type PolicyConflict struct {
	// Limit is the name.
	Limit string
	// Before is the first policy of the name, and Policy the new one.
	Before, Policy fmt.Stringer
}

// PlanWithoutRule is a request whose plan has no stored rule, although other plans of the limit have one, usually
// because the program forgot or misspelled [ratelimit.Request.Plan]. The rule without a plan decided, or else the
// definition in the code, and the bucket was cut down to that capacity. Package rules reports each limit and plan once,
// up to 16 plans of a limit.
type PlanWithoutRule struct {
	// Limit is the name of the limit.
	Limit string
	// Plan is the plan of the request; "" if it has none.
	Plan string
}

// Answered is a guard's answer to a request, for example package httplimit's in front of a handler. The decisions of
// its limits are also reported, as a [ratelimit.Decided] or a [Failed].
type Answered struct {
	// Route is the program's name for the guarded handler. It can be empty.
	Route string
	// Limit is the name of the first limit that refused, or of the first limit of the request. It is empty if none is
	// known.
	Limit string
	// Result is "allowed", "refused", "bad_key", "bad_cost", "too_costly", "bad_request" (Envoy or a client of ratelimit
	// serve asked for what its limits can't do), "failed_closed" (no decision, and the request was rejected),
	// "failed_open" (no decision, and the request was admitted), "cancelled", or "unlimited" (no limit applies to the
	// request, or to a part of it, for example because a name is misspelled). Later the same request can report "credited"
	// or "credit_failed", or "lease_lost" if it lost its slot.
	Result string
	// Shadow reports whether the guard only observes, so that the result had no effect.
	Shadow bool
	// Err is the reason, if there is one. Errors of the program's own functions are unchanged, so they can contain keys.
	Err error
}

// RulesLoaded is a load of stored rules by package rules.
type RulesLoaded struct {
	// Version is the version of the rules in effect after the load. If the load failed, it is the version of the previous
	// rules.
	Version int64
	// Rules and Overrides are their numbers. Overrides that ended lately count.
	Rules, Overrides int
	// Elapsed is the duration of the load.
	Elapsed time.Duration
	// Late is how long the latest change had been in effect before this process learned of it, and used the previous
	// rules. 0 means in time.
	Late time.Duration
	// Err is why the load failed, or, if Kept is above 0, why some rows could not be read.
	Err error
	// Kept is the number of rows that could not be read. The rows before them stay in effect.
	Kept int
}

// RulesChecked is a look at the tables by package rules that found the loaded rules up to date.
type RulesChecked struct {
	// Version is the version of the rules.
	Version int64
}

// ShareChanged is a new share of its contract that package adaptive allows a limit's key. Each process that uses the
// key reports it when it reads the share, at most an epoch late.
type ShareChanged struct {
	// Limit is the limit's name.
	Limit string
	// Before is the old share, and Share the new one. 1 is the whole contract.
	Before, Share float64
	// Applied reports whether the share slows down requests. Otherwise it's only reported.
	Applied bool
	// Decided reports whether this process computed the share. One of all processes does.
	Decided bool
}

func (Settlement) IsEvent()      {}
func (LeaseChanged) IsEvent()    {}
func (Failed) IsEvent()          {}
func (Transacted) IsEvent()      {}
func (Conflicted) IsEvent()      {}
func (Batched) IsEvent()         {}
func (QueueWait) IsEvent()       {}
func (Pruned) IsEvent()          {}
func (ClockRepaired) IsEvent()   {}
func (PolicyConflict) IsEvent()  {}
func (PlanWithoutRule) IsEvent() {}
func (Answered) IsEvent()        {}
func (RulesLoaded) IsEvent()     {}
func (RulesChecked) IsEvent()    {}
func (ShareChanged) IsEvent()    {}
