package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/reserved"
)

// ReservationState is where a reservation is in its life.
type ReservationState string

// The states of a reservation. It begins open; the others are final, but that Renew opens it again.
const (
	Open      ReservationState = reserved.Open
	Settled   ReservationState = reserved.Settled
	Cancelled ReservationState = reserved.Cancelled
	Expired   ReservationState = reserved.Expired
)

// Reservation is the answer to Reserve: tokens taken now for work that is done later.
type Reservation struct {
	// Decision is whether the tokens were reserved. When it is refused, too much was owed already, and
	// RetryAfter is the wait until the same call would be accepted.
	Decision
	// ID is the identity under which the reservation is started, settled or cancelled: a random UUID. It is
	// empty when the reservation was refused.
	ID string
	// ReadyAt is the instant, on the database's clock, from which the work may run: the latest over the
	// limits. It is At when the tokens were there, and the zero time when the reservation was refused.
	ReadyAt time.Time
	// StaleAt is the instant from which work not yet started has lost its slot; see [Limiter.Start]. It is
	// the zero time when Config.StaleAfter is 0.
	StaleAt time.Time
}

// Delay returns how long after the decision the work may run: 0 when it may run at once.
func (r Reservation) Delay() time.Duration {
	return max(0, r.ReadyAt.Sub(r.At))
}

// Reserve takes what the requests cost even where the tokens are not there yet, and says from when the
// work may run. What is not there is owed: the value falls below zero, by at most the policy's
// MaxReserved, and later requests wait until it is repaid, so that work is served in the order reserved
// and a large request does not starve behind small ones. It is all or nothing over the limits.
//
// Run the work at ReadyAt and not before, or the limit is merely a larger burst. Afterwards Settle what it
// really cost, or Cancel it; a reservation that sees neither is ended by Expire, Config.ExpireAfter
// after ReadyAt. In a transaction the reservation is undone with it. ReadyAt holds whatever others reserve,
// settle or cancel later, and when the policy changes; a database clock that steps back makes the work
// due later by as much.
//
// Errors are those of Take, and ErrNoReservations. Outside a transaction, a Reserve that returns the error of its context, or
// of Config.Timeout, has reserved nothing; one that was decided by then is committed and returned all the same. Only
// ErrCommitUnknown leaves it open.
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

// CheckReserve returns what Reserve would answer, and takes nothing: whether the tokens would be reserved, RetryAfter when
// not, and ReadyAt and StaleAt when they would. ID is empty, and what the States say of the buckets is what they hold now. It
// is for showing how long the queue is, and for choosing among several: somebody else may reserve before you do.
//
// It reads as Check does, in a transaction too. Errors are those of Reserve.
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
	_, ready := reserved.ReadyAt(c.Asks, bucket.AfterTaking(c.Asks, c.Answers), c.plan.notBefore)
	r.ReadyAt = time.UnixMicro(ready)
	if l.config.StaleAfter > 0 {
		r.StaleAt = r.ReadyAt.Add(l.config.StaleAfter)
	}
	return r, nil
}

// optionalTime returns the instant of us microseconds since 1970, and the zero time for nil.
func optionalTime(us *int64) time.Time {
	if us == nil {
		return time.Time{}
	}
	return time.UnixMicro(*us)
}

// Settle ends a reservation with what the work really cost: actual has a request, with its cost, for each
// limit whose cost differs from what was reserved; the others stay at their estimates. A surplus is given back, up to
// the capacity. A fixed window takes it back only until the window that paid has ended. What it cost beyond the estimate
// is taken from the bucket as it is now, below zero if need be, and later requests wait for it. Where the limit has changed
// since Reserve, that is decided under the policy it has now, which is the one that actual names it with.
//
// What was reserved of an [Adaptive] limit at a price is settled at that price, whatever holds by then.
//
// Settling again changes nothing and is no error, whatever actual says then. Settle returns ErrInvalidRequest when actual
// names a bucket that was not reserved, or one under two policies. It returns ErrNotReserved for an id that no reservation
// has, as that of a transaction that was rolled back. It returns ErrReservationEnded after Cancel or expiry. In a
// transaction it is undone with it.
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
			actual, i := costs[key], r.Index(key)
			if i < 0 {
				return nil, fmt.Errorf("%w: it is not for %q and this key; settle with the requests it was reserved with", ErrInvalidRequest, key.Name)
			}
			b := &r.Buckets[i]
			amounts[i], b.Now = atPrice(actual.cost, b.Price, b.Cost), actual.terms
			if rule := actual.subject.rule; rule != nil && rule.holding(r.NowUs).mode == Off { // which is not charged
				amounts[i] = min(amounts[i], 0)
			}
		}
		return amounts, nil
	})
}

// atPrice returns what the actual cost comes to beyond what was taken, at the price at which it was.
func atPrice(actual, price, taken float64) float64 {
	if price == 1 {
		return actual - taken
	}
	amount := actual*price - taken
	if math.Abs(amount) < taken*1e-12 { // a rounding
		return 0
	}
	return amount
}

// Cancel ends a reservation whose work will not run and gives back what it took, as far as Settle gives
// back a surplus. Reservations made later keep their time; what is given back is there for whoever asks
// next. Cancelling again changes nothing. The errors are those of Settle.
//
// Which rows and which window it goes back to follows the policy that this Limiter last used each limit with, and
// where it was not used with one the policy the reservation was made under.
func (l *Limiter) Cancel(ctx context.Context, id string) error {
	return end(ctx, l, "cancel", id, false, Cancelled, func(r *reserved.Reservation) ([]float64, error) { return r.Refund(), nil })
}

// end moves an open reservation to a final state and charges what amounts returns for each of its buckets. keyed reports whether the call names
// keys that are not in their stored form.
func end(ctx context.Context, l *Limiter, verb, id string, keyed bool, final ReservationState, amounts func(*reserved.Reservation) ([]float64, error)) error {
	return onReservation(ctx, l, verb, id, keyed, func(ctx context.Context, life *reserved.Life, r *reserved.Reservation) error {
		return life.End(ctx, r, string(final), amounts)
	})
}

var validID = regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$`)

// withReservation is onReservation of a call that names no keys.
func withReservation(ctx context.Context, l *Limiter, verb, id string, fn func(context.Context, *reserved.Life, *reserved.Reservation) error) error {
	return onReservation(ctx, l, verb, id, false, fn)
}

// onReservation runs fn on the locked reservation id: in the caller's transaction, behind a savepoint,
// when l is bound to one, else in one of its own.
func onReservation(ctx context.Context, l *Limiter, verb, id string, keyed bool, fn func(context.Context, *reserved.Life, *reserved.Reservation) error) error {
	if err := l.ready(ctx, verb); err != nil {
		return err
	}
	if !validID.MatchString(id) {
		return during(verb, fmt.Errorf("%w: %.80q is not the ID of a Reservation; pass the one that Reserve returned, and that of a Lease to Release", ErrNotReserved, id))
	}
	lock := func(ctx context.Context, life *reserved.Life) (*reserved.Reservation, error) {
		return life.Lock(ctx, verb, id)
	}
	return lockedBy(ctx, l, verb, id, keyed, lock, fn)
}

// lockedBy runs fn on the reservation that lock has locked, unless that is nil. Among the calls of a sweep it waits only so long for rows.
func lockedBy(ctx context.Context, l *Limiter, verb, id string, keyed bool,
	lock func(context.Context, *reserved.Life) (*reserved.Reservation, error),
	fn func(context.Context, *reserved.Life, *reserved.Reservation) error,
) error {
	began, stuck := l.reports.began(), reserved.StuckOf(ctx)
	var r *reserved.Reservation
	err := l.retryTx(ctx, verb, keyed, func(ctx context.Context, tx *Limiter) (err error) {
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
	err = during(verb+" "+id, l.explained(ctx, err))
	if !isAnyOf(err, reserved.ErrStuck, ErrNotReserved, ErrReservationEnded, ErrInvalidRequest, ErrCostExceedsCapacity) {
		l.reports.failed(ctx, Failed{Verb: verb, Err: err}, began)
	}
	return err
}

// lifeIn returns the life of reservations in the transaction that a Limiter is bound to.
func lifeIn(tx *Limiter) *reserved.Life {
	return &reserved.Life{Session: &tx.session, Owner: reserving{tx}, ExpireAfter: tx.config.ExpireAfter, ErrTooMuch: ErrCostExceedsCapacity}
}

// reserving is a Limiter as package reserved knows it.
type reserving struct{ *Limiter }

// Resolve sets the terms that the limits of r have now, and the end of the latest of their pauses. Limits that this Limiter was not used with have
// those that r was made under, unless there is a rule.
func (l reserving) Resolve(ctx context.Context, verb string, r *reserved.Reservation) {
	for i := range r.Buckets {
		b := &r.Buckets[i]
		terms, policy := b.Terms(), Policy(madeElsewhere{})
		if last, known := l.policies.last(b.Key.Name); known {
			terms = last
		}
		if l.HasPolicies() {
			limit := limitOf(b.Key.Name, madeElsewhere{}, terms)
			if rule := ruleFor(ctx, l.Limiter, verb, limit, b.Plan, b.Key.Key); rule != nil {
				holding := rule.holding(l.config.estimate()).limit.definition()
				terms, policy = holding.terms, holding.policy
				r.PausedUntil = max(r.PausedUntil, rule.pausedUntil)
			}
		}
		r.PausedUntil = max(r.PausedUntil, l.prices.PausedUntil(b.Key, applies(policy)))
		b.Now = termsFor(terms, b.Key.Name, b.Key.Key).OnWindows(r.NowUs)
	}
}

// applies returns whether a policy has callers pay the price of an upstream; nil: it is not known.
func applies(policy Policy) *bool {
	if _, isUnknown := policy.(madeElsewhere); isUnknown {
		return nil
	}
	a, _ := policy.(Adaptive)
	return &a.Apply
}

// Changed forgets refusals of the buckets.
func (l reserving) Changed(asks []bucket.Ask) { l.reports.invalidate(asks) }

// Ended tells the observer what the end of a reservation charges.
func (l reserving) Ended(ctx context.Context, r *reserved.Reservation, amounts []float64) {
	for i, delta := range amounts {
		l.reports.tell(ctx, Settlement{Limit: r.Buckets[i].Key.Name, Delta: delta, Pending: l.reports.pending()})
	}
}

// reservation returns the reservation that the call has made, or nil.
func (c *call) reservation() *reserved.Reservation {
	r, _ := c.Record.(*reserved.Reservation)
	return r
}

// isAnyOf reports whether err is one of targets.
func isAnyOf(err error, targets ...error) bool {
	return slices.ContainsFunc(targets, func(target error) bool { return errors.Is(err, target) })
}
