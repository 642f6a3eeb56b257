package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/store"
)

const (
	// maxLeft is how long after its moment a Wait that nobody has ended, because its process died, may keep what it reserved.
	maxLeft = time.Minute
	// leads is how many times as long before its moment a Wait settles its reservation as that took to be made, and mostLead
	// bounds that, so that the caller does not come late by a commit.
	leads    = 4
	mostLead = 100 * time.Millisecond
)

// Wait takes what the requests cost as soon as it is there, and returns then: at once, with one Take, when it is there now.
// Else it reserves, as [Limiter.Reserve] does, and sleeps until ReadyAt. So callers are served in the order in which they
// reserved, in whichever processes they are, and a large request is not overtaken by small ones. The decision is that of
// the reservation: At is when it was made.
//
// When the context has a deadline and the tokens come later than that, Wait reserves nothing and returns the refusal at once:
// the decision is not Allowed, and RetryAfter is when a call with as much time would be served, if nobody else asked
// meanwhile. It refuses, too, where a policy bounds what may be owed; see MaxReserved.
//
// When the context ends while it sleeps, Wait cancels the reservation and returns the context's error: what it had reserved
// is there for whoever asks next, and nothing is owed for it. That takes as long as others hold the rows, up to Config.Timeout. A
// reservation that cannot be cancelled, because the database is gone, or whose process dies, is ended by [Limiter.Expire] a
// minute after its moment, and gives back what it took. A context that ends during the statement of a Take leaves it open
// whether that took, as ever.
//
// No connection is held while it sleeps. It sleeps by this process's clock, and shortly before the moment it asks the database
// how long that still is, as [Limiter.Start] does: it sleeps on when that clock went ahead of the database's, when the
// limit was paused meanwhile, and when the process stood still past Config.StaleAfter. The reservation is settled then: a
// context that ends in that last moment, which is four times as long as the reservation took to be made and a tenth of a
// second at most, is not heard any more, and Wait returns at its moment.
//
// The reservation is the Wait's own. Where somebody else ends it while the Wait sleeps, the Wait learns that when it asks: one
// that was cancelled is ErrReservationEnded; one that was settled is paid for, and returns at its moment; and one that has
// expired, and so given back what it took, is reserved again.
func (l *Limiter) Wait(ctx context.Context, requests ...Request) (Decision, error) {
	if err := l.ready(ctx, "wait"); err != nil {
		return Decision{}, err
	}
	if l.InTransaction() {
		return Decision{}, fmt.Errorf("%w: Wait in a transaction would keep its rows locked while it sleeps; call Reserve there, or Wait on the Limiter that New returned before you begin", ErrInvalidConfig)
	}
	c, err := l.begin(ctx, verbReserve, requests)
	if err != nil {
		return Decision{}, err
	}
	d, settled, err := takeNow(ctx, l, requests)
	if err != nil || settled {
		return d, err
	}
	c.Reserve = &store.Keeping{
		StaleAfter: l.config.StaleAfter, ExpireAfter: min(l.config.ExpireAfter, maxLeft), Release: true, OnlyLater: true,
		NotBefore: c.plan.notBefore, Plans: c.plan.plans(),
	}
	for i := range c.Asks {
		c.Asks[i].Within = untilDeadline(ctx)
	}
	began := time.Now()
	d, err = l.do(ctx, c)
	answered := time.Now()
	switch {
	case errors.Is(err, ErrCommitUnknown) && c.Reservation != nil:
		return Decision{}, giveUp(ctx, l, c.Reservation.ID, err)
	case err != nil || !d.Allowed || c.Reservation == nil: // in the latter case it was ready at once
		return d, err
	}
	ready := answered.Add(time.UnixMicro(c.Reservation.ReadyUs).Sub(d.At))
	lead := min(leads*answered.Sub(began), mostLead)
	if err := awaitStart(ctx, l, c.Reservation.ID, ready, lead); err != nil {
		return Decision{}, giveUp(ctx, l, c.Reservation.ID, err)
	}
	return d, nil
}

// takeNow takes what the requests cost if it is there. What has been reserved earlier is ready by then, as nothing is owed.
// settled is whether the decision is that of Wait.
func takeNow(ctx context.Context, l *Limiter, requests []Request) (d Decision, settled bool, err error) {
	c, err := l.begin(ctx, verbTake, requests)
	if errors.Is(err, ErrCostExceedsCapacity) { // which a reservation can pay all the same
		return d, false, nil
	}
	if err != nil {
		return d, false, err
	}
	c.Look, c.quiet = c.plan.costless, true
	if d, err = l.do(ctx, c); err != nil || d.Allowed {
		return d, err == nil, err
	}
	within := untilDeadline(ctx)
	if c.plan.notBefore == 0 || within == 0 || d.RetryAfter <= within {
		return d, false, nil
	}
	c.quiet = false // it is paused for longer than there is time
	l.reports.done(ctx, c, &d)
	return d, true, nil
}

// untilDeadline returns how long it is until the deadline of ctx, at least a microsecond; 0: it has none.
func untilDeadline(ctx context.Context) time.Duration {
	deadline, bounded := ctx.Deadline()
	if !bounded {
		return 0
	}
	return max(time.Until(deadline).Truncate(time.Microsecond), time.Microsecond)
}

// awaitStart sleeps until ready, and on until the database says that the moment of the reservation has come. The reservation
// is settled so long before as lead says.
func awaitStart(ctx context.Context, l *Limiter, id string, ready time.Time, lead time.Duration) error {
	timer := time.NewTimer(time.Until(ready) - lead)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return fmt.Errorf("ratelimit: wait: %w", ctx.Err())
		case <-timer.C:
		}
		ready, settled, err := settleEarly(ctx, l, id, lead)
		if err != nil {
			return err
		}
		if settled {
			timer.Reset(time.Until(ready))
			<-timer.C // what is settled is not given back any more
			return nil
		}
		timer.Reset(time.Until(ready) - lead)
	}
}

// settleEarly returns when the work of a reservation may run by the database's clock, as an instant of this process's, and
// settles the reservation at what it took when that is no further away than lead.
func settleEarly(ctx context.Context, l *Limiter, id string, lead time.Duration) (ready time.Time, settled bool, err error) {
	ctx, cancel := l.config.toTheEnd(ctx)
	defer cancel()
	err = withReservation(ctx, l, "wait", id, func(ctx context.Context, tx *Limiter, r *store.Reservation) error {
		answered := time.Now()
		slot, err := start(ctx, tx, r)
		if err != nil {
			return err
		}
		ready, settled = answered.Add(slot.Wait), slot.Wait <= lead
		if !settled || ReservationState(r.State) != Open { // in the latter case somebody else has settled it: it keeps its slot
			return tx.session.SaveReservation(ctx, r)
		}
		if r.StartedUs == nil {
			r.StartedUs = &r.ReadyUs
		}
		return finish(ctx, tx, r, Settled, make([]float64, len(r.Names)))
	})
	return ready, settled, err
}

// toTheEnd returns a context for what must not be left half done when ctx ends: it would be open what has become of the
// reservation. Config.Timeout bounds it, or else the default of that does.
func (c *Config) toTheEnd(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx = context.WithoutCancel(ctx)
	if c.Timeout < 0 {
		return context.WithTimeout(ctx, defaultTimeout)
	}
	return ctx, func() {}
}

// giveUp cancels the reservation of a Wait that ends with err, and returns err with what became of that.
func giveUp(ctx context.Context, l *Limiter, id string, err error) error {
	ctx, cancel := l.config.toTheEnd(ctx)
	defer cancel()
	cancelErr := l.Cancel(ctx, id)
	if cancelErr == nil || isAnyOf(cancelErr, ErrNotReserved, ErrReservationEnded) {
		return err
	}
	return prefixed(fmt.Errorf("%w; what it reserved stays so until Expire ends it: %w", err, cancelErr))
}
