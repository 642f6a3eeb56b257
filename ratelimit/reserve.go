package ratelimit

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
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
	if !r.Allowed {
		return 0
	}
	return r.ReadyAt.Sub(r.At)
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
// due later by as much. Errors are those of Take, and ErrNoReservations.
func (l *Limiter) Reserve(ctx context.Context, requests ...Request) (Reservation, error) {
	p, err := l.begin(ctx, "reserve", requests, true)
	if err != nil {
		return Reservation{}, err
	}
	began := l.watch()
	c := p.of("reserve", false, true)
	if err := l.submit(ctx, c); err != nil {
		return Reservation{}, l.failed(ctx, "reserve", p, began, err)
	}
	if c.reservation.Allowed {
		l.invalidate(p)
	}
	l.decided(ctx, Decided{Verb: "reserve", Decision: c.reservation.Decision, Delay: c.reservation.Delay()}, began)
	return c.reservation, nil
}

// reserve takes for the plan and records the reservation.
func (l *Limiter) reserve(ctx context.Context, p *plan) (Reservation, error) {
	answers, err := l.run(ctx, p)
	if err != nil {
		return Reservation{}, err
	}
	batch := &pgx.Batch{}
	r := l.queueTaken(batch, p, answers)
	return r, l.db.SendBatch(ctx, batch).Close()
}

// queueTaken returns the reservation of what was taken for the plan, and queues its record; or the refusal.
func (l *Limiter) queueTaken(batch *pgx.Batch, p *plan, answers []answer) Reservation {
	r := Reservation{Decision: p.decide(answers)}
	if !r.Allowed {
		return r
	}
	r.ID, r.ReadyAt = newID(), r.At.Add(p.readyAfter(answers))
	if l.config.StaleAfter > 0 {
		r.StaleAt = r.ReadyAt.Add(l.config.StaleAfter)
	}
	l.queueRecord(batch, p, r)
	return r
}

// readyAfter returns how long it takes until nothing is owed any more.
func (p *plan) readyAfter(answers []answer) time.Duration {
	var delay time.Duration
	for i := range p.buckets {
		value := p.buckets[i].reading(answers[i])
		delay = max(delay, value.wait(answers[i].now, 0, 0))
	}
	return delay
}

// Settle ends a reservation with what the work really cost: actual has a request, with its cost, for each
// limit whose cost differs from what was reserved; the others stay at their estimates. A surplus is given
// back, up to the capacity, and for a fixed window only until the window the reservation was ready in has
// ended: tokens of a window that is over are gone. What it cost beyond the estimate is taken from the
// bucket as it is now, below zero if need be, and later requests wait for it. Where the limit has changed since
// Reserve, that is decided under the policy it has now, which is the one that actual names it with.
//
// Settling again changes nothing and is no error, whatever actual says then. Settle returns ErrInvalidRequest
// when actual names a bucket that was not reserved, or one under two policies, ErrNotReserved for an id that no reservation has (that of
// a transaction that was rolled back, too), and ErrReservationEnded after Cancel or expiry. In a transaction it is undone with it.
func (l *Limiter) Settle(ctx context.Context, id string, actual ...Request) error {
	if err := l.ready(ctx, "settle"); err != nil {
		return err
	}
	costs, err := l.actualCosts(actual)
	if err != nil {
		return during("settle", err)
	}
	return l.end(ctx, "settle", id, Settled, func(r *reservation) ([]float64, error) {
		amounts := make([]float64, len(r.Names))
		for key, actual := range costs {
			i := r.index(key)
			if i < 0 {
				return nil, fmt.Errorf("%w: it is not for %q and this key; settle with the requests it was reserved with", ErrInvalidRequest, key.Name)
			}
			amounts[i], r.now[i] = actual.cost-r.Costs[i], actual.terms
		}
		return amounts, nil
	})
}

// Cancel ends a reservation whose work will not run and gives back what it took, as far as Settle gives
// back a surplus. Reservations made later keep their time; what is given back is there for whoever asks
// next. Cancelling again changes nothing. The errors are those of Settle.
//
// Which rows and which window it goes back to follows the policy that this Limiter last used each limit with, and
// where it was not used with one the policy the reservation was made under.
func (l *Limiter) Cancel(ctx context.Context, id string) error {
	return l.end(ctx, "cancel", id, Cancelled, func(r *reservation) ([]float64, error) { return r.refund(), nil })
}

// Credit gives tokens back without a reservation: the costs of the requests are added, up to each
// capacity. It trusts the caller that they were taken, and is not idempotent; where either matters,
// reserve and settle. In a transaction it is undone with it.
func (l *Limiter) Credit(ctx context.Context, requests ...Request) error {
	return l.adjust(ctx, "credit", -1, requests, func(*ask) int64 { return bucket.MaxInstant })
}

// Refund is Credit for what the same requests took at an instant, which is the At of that Decision: what they
// took from a fixed window comes back only until the window has ended, because the next one never missed it.
func (l *Limiter) Refund(ctx context.Context, at time.Time, requests ...Request) error {
	taken := clampInstant(at)
	return l.adjust(ctx, "refund", -1, requests, func(b *ask) int64 { return b.terms.RefundUntil(taken) })
}

// Charge takes what the requests cost whatever the buckets hold, below zero if need be, and later requests
// wait until it is repaid: for a cost that is known only when the work is done, where Take had asked for
// less. It is not idempotent. In a transaction it is undone with it.
func (l *Limiter) Charge(ctx context.Context, requests ...Request) error {
	return l.adjust(ctx, "charge", 1, requests, func(*ask) int64 { return bucket.MaxInstant })
}

// adjust charges the costs of the requests times sign, or credits them up to the step that until says.
func (l *Limiter) adjust(ctx context.Context, verb string, sign float64, requests []Request, until func(*ask) int64) error {
	p, err := l.begin(ctx, verb, costless(requests), false)
	if err != nil {
		return err
	}
	costs, err := l.actualCosts(requests)
	if err != nil {
		return during(verb, err)
	}
	amounts, last := make([]float64, len(p.buckets)), make([]int64, len(p.buckets))
	for i := range p.buckets {
		b := &p.buckets[i]
		amounts[i], last[i] = sign*costs[b.bucketKey()].cost, until(b)
	}
	ctx, cancel := l.bounded(ctx)
	defer cancel()
	began := l.watch()
	if err := l.changeAlone(ctx, verb, func(l *Limiter) error { return l.charge(ctx, p, amounts, last) }); err != nil {
		return l.failed(ctx, verb, p, began, err)
	}
	l.invalidate(p)
	return nil
}

// actualCosts checks the requests of Settle and Credit and returns their costs, added up where one bucket is
// named twice. They may be above what the limit can hold, as debts may.
func (l *Limiter) actualCosts(actual []Request) (map[bucket.Key]actualCost, error) {
	costs := make(map[bucket.Key]actualCost, len(actual))
	for _, r := range actual {
		key, err := l.storedKey(r)
		if err != nil {
			return nil, err
		}
		if err := checkCost(r.limit, r.cost, bucket.MaxTokens); err != nil {
			return nil, err
		}
		k, a := bucket.Key{Name: r.limit.name, Key: key}, actualCost{cost: r.cost, terms: r.limit.termsFor(key)}
		if same, found := costs[k]; found {
			if same.terms != a.terms {
				return nil, fmt.Errorf("%w: the call names one bucket of %q under two policies; give the name one policy", ErrInvalidRequest, k.Name)
			}
			a.cost += same.cost
		}
		costs[k] = a
		l.policies.note(r.limit.name, &r.limit.terms)
	}
	return costs, nil
}

// actualCost is what work cost, and the terms of the limit that it is told with.
type actualCost struct {
	cost  float64
	terms bucket.Terms
}

// end moves an open reservation to a final state and charges what amounts returns for each of its
// buckets. A reservation that is in that state already stays as it is.
func (l *Limiter) end(ctx context.Context, verb, id string, final ReservationState, amounts func(*reservation) ([]float64, error)) error {
	ctx, cancel := l.bounded(ctx)
	defer cancel()
	return l.withReservation(ctx, verb, id, func(tx *Limiter, r *reservation) error {
		switch r.State {
		case final:
			return nil
		case Open:
		default:
			return fmt.Errorf("%w: it was %s", ErrReservationEnded, r.State)
		}
		charges, err := amounts(r)
		if err != nil {
			return err
		}
		return tx.finish(ctx, r, final, charges)
	})
}

// finish saves the final state of a locked reservation and charges its buckets.
func (l *Limiter) finish(ctx context.Context, r *reservation, final ReservationState, charges []float64) error {
	if err := l.record(ctx, r, final, charges); err != nil {
		return err
	}
	if !slices.ContainsFunc(charges, func(amount float64) bool { return amount != 0 }) {
		return nil
	}
	p := r.plan()
	l.invalidate(p)
	return l.charge(ctx, p, charges, r.refundUntil())
}

// record saves the final state of a locked reservation, and tells what is charged to its buckets with that.
func (l *Limiter) record(ctx context.Context, r *reservation, final ReservationState, charges []float64) error {
	r.State, r.ExpiresUs = final, max(r.ExpiresUs, r.NowUs)
	if err := l.save(ctx, r); err != nil {
		return err
	}
	for i, delta := range charges {
		l.tell(ctx, Settlement{Limit: r.Names[i], Delta: delta, Pending: l.pending()})
	}
	return nil
}
