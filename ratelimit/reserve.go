package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
	"github.com/pgratelimit/pgratelimit/internal/engine/reserved"
	"github.com/pgratelimit/pgratelimit/internal/engine/store"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
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

// Reservation is the answer to Reserve: tokens that are taken now for work that runs later. It also has its Decision's
// methods.
type Reservation struct {
	// Decision says whether the tokens were reserved. If not, because the bucket would owe too much, RetryAfter is the
	// time until the same call would be accepted.
	Decision
	// ID identifies the reservation to Start, Settle and other calls: a random UUID, or empty after a refusal.
	ID string
	// ReadyAt is when the work may run, on the database's clock: the latest such time of all limits. It's At if the tokens
	// were available, and the zero time after a refusal.
	ReadyAt time.Time
	// StaleAt is when work that hasn't started loses its turn; see [Limiter.Start]. It's the zero time if
	// Config.StaleAfter is 0.
	StaleAt time.Time
}

// Delay returns the time from the decision until the work may run. 0 means that it may run at once.
func (r Reservation) Delay() time.Duration {
	return max(0, r.ReadyAt.Sub(r.At))
}

// Reserve takes the requests' costs, even if the tokens aren't available yet, and returns when the work may run. The
// bucket owes the missing tokens, at most the policy's MaxReserved, and later requests wait until the debt is repaid.
// So work is served in the order of its reservations, and small requests can't starve a large one. Reserve takes from
// all limits or from none.
//
// Run the work at ReadyAt and not before, because otherwise the limit only allows a larger burst. Afterwards call
// Settle with the actual cost, or Cancel; otherwise Expire ends the reservation, Config.ExpireAfter after ReadyAt. A
// rollback undoes the reservation. ReadyAt doesn't change if others reserve, settle or cancel later, or if the policy
// changes. If the database's clock steps back, the work is ready that much later.
//
// Errors are Take's, and ErrNoReservations. Outside a transaction, a Reserve that returns its context's error, or that
// exceeds Config.Timeout, has reserved nothing, because a decision made by then is committed and returned. Only after
// ErrCommitUnknown is it unknown whether a reservation was made.
func (l *Limiter) Reserve(ctx context.Context, requests ...Request) (Reservation, error) {
	c, err := l.begin(ctx, verbReserve, requests)
	if err != nil {
		return Reservation{}, err
	}
	plans := c.plan.plans()
	c.Reserve = &reserved.Keeping{
		StaleAfter: l.config.StaleAfter, ExpireAfter: l.config.ExpireAfter, Release: l.config.ReleaseExpired,
		NotBefore: c.plan.notBefore, Plans: plans,
	}
	d, err := l.do(ctx, c)
	if err != nil {
		return Reservation{}, err
	}
	r := Reservation{Decision: d}
	if kept := c.reservation(); kept != nil {
		l.places.Note(kept.ID, c.Asks, plans)
		r.ID, r.ReadyAt, r.StaleAt = kept.ID, time.UnixMicro(kept.ReadyUs), optionalTime(kept.StaleUs)
	}
	return r, nil
}

// CheckReserve returns Reserve's answer, and takes nothing: ReadyAt and StaleAt, or RetryAfter after a refusal. ID is
// empty, and the States show the buckets as they are now. Use it to show how long the queue is, or to choose between
// limits, but others can reserve before you do. It reads as Check does. Errors are Reserve's.
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

var validID = regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$`)

func (l *Limiter) readyFor(ctx context.Context, verb, id string) error {
	if err := l.ready(ctx, verb); err != nil {
		return err
	}
	if !validID.MatchString(id) {
		return during(verb, fmt.Errorf("%w: %.80q is not the ID of a Reservation; pass the one that Reserve returned, and "+
			"that of a Lease to Release", ErrNotReserved, id))
	}
	return nil
}

// lockedBy runs fn on the reservation that lock reads, unless it is nil. If l is bound to the caller's transaction,
// lock locks it there, after a savepoint. Otherwise both may run again: see withoutTx. During Expire lockedBy limits
// the wait for rows.
func lockedBy(ctx context.Context, l *Limiter, verb, id string, keyed bool,
	lock func(context.Context, *reserved.Life) (*reserved.Reservation, error),
	fn func(context.Context, *reserved.Life, *reserved.Reservation) error,
) error {
	began, stuck := l.reports.began(), reserved.StuckOf(ctx)
	var r *reserved.Reservation
	err := withoutTx(ctx, l, verb, keyed, func(ctx context.Context, tx *Limiter) (err error) {
		r = nil
		if stuck != nil && l.pool != nil && tx.pool == nil {
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
	if stuck != nil { // Expire reports the failures of a sweep together
		return explained(ctx, l, verb+" "+id, err)
	}
	return failedOn(ctx, l, verb, id, err, began)
}

// mostChanges bounds how often a reservation is read again because another call was quicker to change it.
const mostChanges = 16

// withoutTx runs fn on l: it reads a reservation, and changes it by a statement, unless another call has changed it
// meanwhile. If that isn't enough, it is retryTx.
func withoutTx(ctx context.Context, l *Limiter, verb string, keyed bool,
	fn func(ctx context.Context, l *Limiter) error,
) error {
	ctx, cancel := l.config.bounded(ctx)
	defer cancel()
	if err := l.pass(ctx, verb, keyed, !keyed); err != nil {
		return err
	}
	for range mostChanges {
		if l.pool == nil || !l.session.KeepsInSQL() {
			break
		}
		err := fn(ctx, l)
		if errors.Is(err, store.ErrChanged) {
			continue
		}
		if !store.IsInTheWay(err) {
			return err
		}
		break
	}
	return retryTx(ctx, l, verb, keyed, fn)
}

// failedOn explains the error of a call on a reservation, and reports it, unless it is an answer.
func failedOn(ctx context.Context, l *Limiter, verb, id string, err error, began time.Time) error {
	if err == nil {
		return nil
	}
	err = explained(ctx, l, verb+" "+id, err)
	if !isAnyOf(err, ErrNotReserved, ErrReservationEnded, ErrInvalidRequest, ErrCostExceedsCapacity) {
		l.reports.failed(ctx, event.Failed{Verb: verb, Err: err}, began)
	}
	return err
}

func lifeIn(tx *Limiter) *reserved.Life {
	return &reserved.Life{
		Session: &tx.session, Owner: reserving{tx}, ExpireAfter: tx.config.ExpireAfter,
		StaleAfter: tx.config.StaleAfter, ErrTooMuch: ErrCostExceedsCapacity,
	}
}

// reserving adapts a Limiter to package reserved.
type reserving struct{ *Limiter }

// Resolve sets the current terms of the limits of r, and the latest end of their pauses. Limits without a rule, which
// this Limiter has not used, keep the terms of the reservation.
func (l reserving) Resolve(ctx context.Context, verb string, r *reserved.Reservation) {
	r.PausedUntil = 0
	for i := range r.Buckets {
		b := &r.Buckets[i]
		terms := b.Terms()
		terms.Windows = windowsOf(b.Calendar)
		rows := len(r.Of(b.Whole()))
		limit := limitOf(b.Name, madeElsewhere{terms, rows}, terms)
		if last := l.policies.last(b.Name); last != nil {
			limit = *last
		}
		if rule := ruleFor(ctx, l.Limiter, verb, limit, b.Plan, b.Key.Key); rule != nil {
			limit = rule.holding(l.config.estimate()).limit
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
		if delta += amount; i+1 < len(amounts) && r.Buckets[i+1].Whole() == k.Whole() {
			continue
		}
		l.reports.tell(ctx, event.Settlement{Limit: k.Name, Delta: delta, Pending: l.reports.pending()})
		delta = 0
	}
}

func (c *call) reservation() *reserved.Reservation {
	r, _ := c.Record.(*reserved.Reservation)
	return r
}

func isAnyOf(err error, targets ...error) bool {
	return slices.ContainsFunc(targets, func(target error) bool { return errors.Is(err, target) })
}
