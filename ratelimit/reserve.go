package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/reserved"
)

// ReservationState is the state of a reservation.
type ReservationState string

// The states of a reservation. It begins as Open. The other states are final, except that Renew opens it again.
const (
	Open      ReservationState = reserved.Open
	Settled   ReservationState = reserved.Settled
	Cancelled ReservationState = reserved.Cancelled
	Expired   ReservationState = reserved.Expired
)

// Reservation is the answer to Reserve: tokens that are taken now for work that runs later.
type Reservation struct {
	// Decision says whether the tokens were reserved. If not, the bucket would owe too much, and RetryAfter is the time until the same
	// call would be accepted.
	Decision
	// ID identifies the reservation to Start, Settle and other calls: a random UUID. It is empty if the reservation was
	// refused.
	ID string
	// ReadyAt is the instant, on the database's clock, from which the work may run: the latest instant of all limits. It is At
	// if the tokens were available, and the zero time if the reservation was refused.
	ReadyAt time.Time
	// StaleAt is the instant from which work that was not started has lost its turn; see [Limiter.Start]. It is the zero time
	// if Config.StaleAfter is 0.
	StaleAt time.Time
}

// Delay returns the time from the decision until the work may run. 0 means that it may run at once.
func (r Reservation) Delay() time.Duration {
	return max(0, r.ReadyAt.Sub(r.At))
}

// Reserve takes the cost of the requests, even if the tokens are not available yet, and returns when the work may run. The bucket
// owes the missing tokens: its value falls below zero, by at most the policy's MaxReserved. Later requests wait until the owed
// tokens are repaid. So work is served in the order of reservations, and small requests cannot starve a large one. Reserve takes
// from all limits or from none.
//
// Run the work at ReadyAt and not before, because otherwise the limit only allows a larger burst. Afterwards call Settle with
// the actual cost, or Cancel. Otherwise Expire ends the reservation, Config.ExpireAfter after ReadyAt. In a transaction, a
// rollback undoes the reservation. ReadyAt does not change if others reserve, settle or cancel later, or if the policy changes.
// If the database's clock steps back, the work is ready later by as much.
//
// Errors are the errors of Take, and ErrNoReservations. Outside a transaction, a Reserve that returns the error of its context
// or of Config.Timeout has reserved nothing. If the decision was made before, it is committed and returned. Only after
// ErrCommitUnknown is it unknown whether a reservation was made.
func (l *Limiter) Reserve(ctx context.Context, requests ...Request) (Reservation, error) {
	c, err := l.begin(ctx, verbReserve, requests)
	if err != nil {
		return Reservation{}, err
	}
	c.Reserve = &reserved.Keeping{
		StaleAfter: l.config.StaleAfter, ExpireAfter: l.config.ExpireAfter, Release: l.config.ReleaseExpired,
		NotBefore: c.plan.notBefore, Plans: c.plan.plans(),
	}
	d, err := l.do(ctx, c)
	if err != nil {
		return Reservation{}, err
	}
	r := Reservation{Decision: d}
	if kept := c.reservation(); kept != nil {
		r.ID, r.ReadyAt, r.StaleAt = kept.ID, time.UnixMicro(kept.ReadyUs), optionalTime(kept.StaleUs)
	}
	return r, nil
}

// CheckReserve returns the answer that Reserve would return, and takes nothing: ReadyAt and StaleAt, or RetryAfter after a
// refusal. ID is empty, and the States describe the buckets as they are now. Use it to show the length of the queue, or to
// choose between several limits. Another call can reserve before you do.
//
// It reads as Check does, also in a transaction. Errors are the errors of Reserve.
func (l *Limiter) CheckReserve(ctx context.Context, requests ...Request) (Reservation, error) {
	c, err := l.begin(ctx, verbReserve, requests)
	if err != nil {
		return Reservation{}, err
	}
	c.Verb, c.Look = verbCheck, true
	d, err := l.do(ctx, c)
	r := Reservation{Decision: d}
	if err != nil || !d.Allowed {
		return r, err
	}
	for i := range c.Asks {
		c.Answers[i] = c.Asks[i].Decide(c.Answers[i])
	}
	_, _, ready := reserved.ReadyAt(c.Asks, c.Answers, c.plan.notBefore)
	r.ReadyAt = time.UnixMicro(ready)
	if l.config.StaleAfter > 0 {
		r.StaleAt = r.ReadyAt.Add(l.config.StaleAfter)
	}
	return r, nil
}

// optionalTime returns the instant us microseconds since 1970. A nil us gives the zero time.
func optionalTime(us *int64) time.Time {
	if us == nil {
		return time.Time{}
	}
	return time.UnixMicro(*us)
}

// Settle ends a reservation with the actual cost of the work. actual has a request for each limit whose cost differs
// from the reservation; the other limits keep their estimates. A surplus is returned, up to the capacity. A window
// takes back what it paid, and only until it has ended. An overage is taken from the current bucket, below zero if
// necessary, and later requests wait for it. If the limit has changed since Reserve, the current policy of the request
// in actual decides.
//
// Settling again changes nothing and returns nil, even with other costs of the same buckets. Settle returns
// ErrInvalidRequest if actual names a bucket that was not reserved, or one bucket under two policies. It returns
// ErrNotReserved if no reservation has the id, for example because its transaction was rolled back, and
// ErrReservationEnded after Cancel or expiry. In a transaction, a rollback undoes it.
func (l *Limiter) Settle(ctx context.Context, id string, actual ...Request) error {
	if err := l.ready(ctx, "settle"); err != nil {
		return err
	}
	costs, err := actualCosts(ctx, l, "settle", actual)
	if err != nil {
		return during("settle", err)
	}
	keyed := slices.ContainsFunc(actual, func(r Request) bool { return !r.stored })
	return end(ctx, l, "settle", id, keyed, Settled, func(r *reserved.Reservation) ([]float64, error) {
		amounts := make([]float64, len(r.Buckets))
		for _, key := range slices.SortedFunc(maps.Keys(costs), bucket.Key.Compare) {
			actual, rows := costs[key], r.Of(key)
			if len(rows) == 0 {
				return nil, fmt.Errorf("%w: it is not for %q and this key; settle with the requests it was reserved with", ErrInvalidRequest, key.Name)
			}
			for _, i := range rows {
				b := &r.Buckets[i]
				amounts[i], b.Now = actual.cost/float64(len(rows))-b.Cost, actual.terms
				if actual.subject.mode == Off { // a limit that is off is not charged
					amounts[i] = min(amounts[i], 0)
				}
			}
		}
		return amounts, nil
	})
}

// Cancel ends a reservation whose work will not run, and returns its tokens as Settle returns a surplus. Reservations made
// later keep their ReadyAt; the returned tokens are available to the next callers. Cancelling again changes nothing. The errors
// are the errors of Settle.
//
// Cancel uses the rule of the limit, or otherwise the policy that this Limiter last used it with. If there is neither, it uses
// the policy of the reservation. The policy determines the rows and the window to which the tokens return.
func (l *Limiter) Cancel(ctx context.Context, id string) error {
	return end(ctx, l, "cancel", id, false, Cancelled, func(r *reserved.Reservation) ([]float64, error) { return r.Credit(), nil })
}

// end moves an open reservation to a final state, and charges the amounts that amounts returns for its buckets. keyed is
// whether the call names keys that are not in their stored form.
func end(ctx context.Context, l *Limiter, verb, id string, keyed bool, final ReservationState, amounts func(*reserved.Reservation) ([]float64, error)) error {
	return onReservation(ctx, l, verb, id, keyed, func(ctx context.Context, life *reserved.Life, r *reserved.Reservation) error {
		return life.End(ctx, r, string(final), amounts)
	})
}

var validID = regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$`)

// withReservation is onReservation for a call that names no keys.
func withReservation(ctx context.Context, l *Limiter, verb, id string, fn func(context.Context, *reserved.Life, *reserved.Reservation) error) error {
	return onReservation(ctx, l, verb, id, false, fn)
}

// onReservation runs fn on the locked reservation id. If l is bound to the caller's transaction, it runs there, after a
// savepoint; otherwise it runs in a transaction of its own.
func onReservation(ctx context.Context, l *Limiter, verb, id string, keyed bool, fn func(context.Context, *reserved.Life, *reserved.Reservation) error) error {
	if err := l.readyFor(ctx, verb, id); err != nil {
		return err
	}
	lock := func(ctx context.Context, life *reserved.Life) (*reserved.Reservation, error) {
		return life.Lock(ctx, verb, id)
	}
	return lockedBy(ctx, l, verb, id, keyed, lock, fn)
}

// readyFor is ready for a call on the reservation id.
func (l *Limiter) readyFor(ctx context.Context, verb, id string) error {
	if err := l.ready(ctx, verb); err != nil {
		return err
	}
	if !validID.MatchString(id) {
		return during(verb, fmt.Errorf("%w: %.80q is not the ID of a Reservation; pass the one that Reserve returned, and that of a Lease to Release", ErrNotReserved, id))
	}
	return nil
}

// lockedBy runs fn on the reservation that lock returns, unless it is nil. During Expire it limits the wait for rows.
func lockedBy(ctx context.Context, l *Limiter, verb, id string, keyed bool,
	lock func(context.Context, *reserved.Life) (*reserved.Reservation, error),
	fn func(context.Context, *reserved.Life, *reserved.Reservation) error,
) error {
	began, stuck := l.reports.began(), reserved.StuckOf(ctx)
	var r *reserved.Reservation
	err := retryTx(ctx, l, verb, keyed, func(ctx context.Context, tx *Limiter) (err error) {
		r = nil
		if stuck != nil && l.pool != nil {
			if err := reserved.BoundWait(ctx, &tx.session.Unit); err != nil {
				return err
			}
		}
		life := lifeIn(tx)
		if r, err = lock(ctx, life); err != nil || r == nil {
			return err
		}
		return fn(ctx, life, r)
	})
	if err == nil {
		return nil
	}
	stuck.Add(err, r)
	err = explained(ctx, l, verb+" "+id, err)
	isReported := stuck != nil || isAnyOf(err, ErrNotReserved, ErrReservationEnded, ErrInvalidRequest, ErrCostExceedsCapacity)
	if !isReported { // Expire reports the failures of a sweep together
		l.reports.failed(ctx, Failed{Verb: verb, Err: err}, began)
	}
	return err
}

// lifeIn returns the operations on reservations in the transaction of tx.
func lifeIn(tx *Limiter) *reserved.Life {
	return &reserved.Life{Session: &tx.session, Owner: reserving{tx}, ExpireAfter: tx.config.ExpireAfter, StaleAfter: tx.config.StaleAfter, ErrTooMuch: ErrCostExceedsCapacity}
}

// reserving adapts a Limiter to package reserved.
type reserving struct{ *Limiter }

// Resolve sets the current terms of the limits of r, and the latest end of their pauses. Limits without a rule, which this
// Limiter has not used, keep the terms of the reservation.
func (l reserving) Resolve(ctx context.Context, verb string, r *reserved.Reservation) {
	r.PausedUntil = 0
	for i := range r.Buckets {
		b := &r.Buckets[i]
		terms := b.Terms()
		terms.Windows = windowsOf(b.Calendar)
		limit := limitOf(b.Key.Name, madeElsewhere{}, terms)
		rows := 1 // as the terms of the reservation are for one
		if last := l.policies.last(b.Key.Name); last != nil {
			limit, rows = *last, len(r.Of(b.Key.Whole()))
		}
		if rule := ruleFor(ctx, l.Limiter, verb, limit, b.Plan, b.Key.Key); rule != nil {
			limit, rows = rule.holding(l.config.estimate()).limit, len(r.Of(b.Key.Whole()))
			r.PausedUntil = max(r.PausedUntil, rule.pausedUntil)
		}
		b.Now = timesTokens(limit.termsFor(b.Key.Key).On(r.NowUs), float64(limit.definition().shards)/float64(rows))
	}
}

// Changed removes refusals of the buckets from the refusal cache.
func (l reserving) Changed(asks []bucket.Ask) { l.reports.invalidate(asks) }

// Ended reports the amounts that the end of a reservation charged to the Observer.
func (l reserving) Ended(ctx context.Context, r *reserved.Reservation, amounts []float64) {
	delta := 0.0
	for i, amount := range amounts {
		k := r.Buckets[i].Key
		if delta += amount; i+1 < len(amounts) && r.Buckets[i+1].Key.Whole() == k.Whole() {
			continue
		}
		l.reports.tell(ctx, Settlement{Limit: k.Name, Delta: delta, Pending: l.reports.pending()})
		delta = 0
	}
}

// reservation returns the reservation that the call made, or nil.
func (c *call) reservation() *reserved.Reservation {
	r, _ := c.Record.(*reserved.Reservation)
	return r
}

// isAnyOf reports whether err is one of targets.
func isAnyOf(err error, targets ...error) bool {
	return slices.ContainsFunc(targets, func(target error) bool { return errors.Is(err, target) })
}
