package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/reserved"
)

const (
	// maxLeft limits how long after ReadyAt the reservation of a Wait stays open if its process died.
	maxLeft = time.Minute
	// A Wait settles its reservation before ReadyAt, so that the caller is not late by a commit: by leads times the duration of its
	// Reserve, and at most by mostLead.
	leads    = 4
	mostLead = 100 * time.Millisecond
)

// Wait takes the cost of the requests as soon as the tokens are available, and returns then. If they are available now, it
// sends one Take. Otherwise it reserves, as [Limiter.Reserve] does, and sleeps until ReadyAt. So callers are served in the
// order of their reservations, also across processes, and small requests cannot overtake a large one. It returns the decision
// of the reservation, whose At is the time of the reservation. On a Limiter of WithTx it returns ErrInvalidConfig.
//
// If the context has a deadline and the tokens come later, Wait reserves nothing and returns the refusal at once. RetryAfter is
// then the time after which a call with the same time left would be served, if there are no other callers. Wait also refuses if
// the policy limits the owed tokens; see MaxReserved.
//
// If the context ends during the sleep, Wait cancels the reservation and returns the context's error. The tokens are then
// available to other callers. Cancelling waits for locked rows, up to Config.Timeout. If the database is unreachable or the
// process dies, [Limiter.Expire] ends the reservation a minute after ReadyAt, and credits the tokens. If the context ends
// during the statement of a Take, it is unknown whether it took tokens, as with every Take.
//
// Wait holds no connection while it sleeps. It sleeps by the clock of this process. Shortly before ReadyAt it asks the database
// for the remaining time, as [Limiter.Start] does. It sleeps on if this process's clock is fast, if the limit was paused
// meanwhile, or if the process was suspended past Config.StaleAfter. Then it settles the reservation and sleeps until ReadyAt,
// even if the context ends. That last sleep takes at most four times as long as the reservation took to be made, and at most a
// tenth of a second.
//
// Other calls can end the reservation during the sleep. If it was cancelled, Wait returns ErrReservationEnded. If it was
// settled, the tokens are paid, and Wait returns at ReadyAt. If it expired and was credited, Wait reserves again.
func (l *Limiter) Wait(ctx context.Context, requests ...Request) (Decision, error) {
	if err := l.ready(ctx, "wait", requests...); err != nil {
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
	c.Reserve = &reserved.Keeping{
		StaleAfter: l.config.StaleAfter, ExpireAfter: min(l.config.ExpireAfter, maxLeft), Release: true, OnlyLater: true,
		NotBefore: c.plan.notBefore, Plans: c.plan.plans(),
	}
	within := untilDeadline(ctx)
	for i := range c.Asks {
		c.Asks[i].Within = within
	}
	began := time.Now()
	d, err = l.do(ctx, c)
	answered := time.Now()
	if err != nil && !errors.Is(err, ErrCommitUnknown) { // a batch that the call has left may still write to c
		return d, err
	}
	kept := c.reservation()
	switch {
	case errors.Is(err, ErrCommitUnknown) && kept != nil:
		return Decision{}, giveUp(ctx, l, kept.ID, err)
	case err == nil && !d.Allowed && within > 0 && c.mayReserve(&d):
		d.withinMS = uint32(min(max(within.Milliseconds(), 1), math.MaxUint32))
		return d, nil
	case err != nil || !d.Allowed || kept == nil: // without a reservation, the tokens were available at once
		return d, err
	}
	ready := answered.Add(time.UnixMicro(kept.ReadyUs).Sub(d.At))
	lead := min(leads*answered.Sub(began), mostLead)
	if err := awaitStart(ctx, l, kept.ID, ready, lead); err != nil {
		return Decision{}, giveUp(ctx, l, kept.ID, err)
	}
	return d, nil
}

// mayReserve reports whether MaxReserved of the refusing limits allows the call, so that only its deadline refuses it.
func (c *call) mayReserve(d *Decision) bool {
	for i, asked := range c.plan.asked {
		if d.States[i].Allowed {
			continue
		}
		if asked.known != nil || d.States[i].Value.Tokens-c.Asks[asked.ask].Cost < c.Asks[asked.ask].Lowest {
			return false
		}
	}
	return true
}

// takeNow takes the cost of the requests if the tokens are available. Earlier reservations are ready by then, because the bucket
// owes nothing. settled reports whether the decision is the answer of Wait.
func takeNow(ctx context.Context, l *Limiter, requests []Request) (d Decision, settled bool, err error) {
	c, err := l.begin(ctx, verbTake, requests)
	if errors.Is(err, ErrCostExceedsCapacity) { // a reservation can still pay it
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
	c.quiet = false // the pause ends after the deadline
	l.reports.done(ctx, c, &d)
	return d, true, nil
}

// untilDeadline returns the time until the deadline of ctx, at least a microsecond. 0 means that ctx has no deadline.
func untilDeadline(ctx context.Context) time.Duration {
	deadline, bounded := ctx.Deadline()
	if !bounded {
		return 0
	}
	return max(time.Until(deadline).Truncate(time.Microsecond), time.Microsecond)
}

// awaitStart sleeps until ready, and on until ReadyAt of the reservation by the database's clock. It settles the reservation
// lead before.
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
			<-timer.C // settled tokens are not credited, so ctx does not matter
			return nil
		}
		timer.Reset(time.Until(ready) - lead)
	}
}

// settleEarly returns ReadyAt of a reservation by the database's clock, as an instant of this process's clock. It settles the
// reservation at its estimate if ReadyAt is no further away than lead.
func settleEarly(ctx context.Context, l *Limiter, id string, lead time.Duration) (ready time.Time, settled bool, err error) {
	ctx, cancel := l.config.toTheEnd(ctx)
	defer cancel()
	err = withReservation(ctx, l, "wait", id, func(ctx context.Context, life *reserved.Life, r *reserved.Reservation) error {
		answered := time.Now()
		wait, _, err := life.Start(ctx, r, false)
		if err != nil {
			return err
		}
		ready, settled = answered.Add(wait), wait <= lead
		if !settled || r.State != reserved.Open { // another call has settled it: it keeps its slot
			return life.Save(ctx, r)
		}
		if r.StartedUs == nil {
			ready := r.ReadyUs
			r.StartedUs = &ready
		}
		return life.End(ctx, r, reserved.Settled, func(r *reserved.Reservation) ([]float64, error) { return make([]float64, len(r.Buckets)), nil })
	})
	return ready, settled, err
}

// toTheEnd returns a context that does not end with ctx, for a call whose interruption would leave the state of the reservation
// unknown. Config.Timeout limits the call, or the default timeout if Config.Timeout is negative.
func (c *Config) toTheEnd(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx = context.WithoutCancel(ctx)
	if c.Timeout < 0 {
		return context.WithTimeout(ctx, defaultTimeout)
	}
	return ctx, func() {}
}

// giveUp cancels the reservation of a Wait that failed with err. It returns err, with the error of Cancel if there is one.
func giveUp(ctx context.Context, l *Limiter, id string, err error) error {
	ctx, cancel := l.config.toTheEnd(ctx)
	defer cancel()
	cancelErr := l.Cancel(ctx, id)
	if cancelErr == nil || isAnyOf(cancelErr, ErrNotReserved, ErrReservationEnded) {
		return err
	}
	return prefixed(fmt.Errorf("%w; what it reserved stays so until Expire ends it: %w", err, cancelErr))
}
