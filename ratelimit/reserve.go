package ratelimit

import (
	"context"
	"time"
)

// Reservation is the answer to Reserve: tokens taken now for work that is done later.
type Reservation struct {
	// Decision is whether the tokens were reserved. When it is refused, too much was owed already, and
	// RetryAfter is the wait until the same call would be accepted.
	Decision
	// ReadyAt is the instant, on the database's clock, from which the work may run: the latest over the
	// limits. It is At when the tokens were there, and the zero time when the reservation was refused.
	ReadyAt time.Time
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
// Run the work at ReadyAt and not before, or the limit is merely a larger burst. In a transaction the
// reservation is undone with it; a clock that steps back makes no reserved work due sooner. Errors are
// those of Take, and ErrNoReservations.
func (l *Limiter) Reserve(ctx context.Context, requests ...Request) (Reservation, error) {
	p, answers, err := l.take(ctx, "reserve", requests, true)
	if err != nil {
		return Reservation{}, err
	}
	r := Reservation{Decision: p.decide(answers)}
	if !r.Allowed {
		return r, nil
	}
	var delay time.Duration
	for i, b := range p.buckets {
		delay = max(delay, b.terms.wait(answers[i].state, answers[i].now, 0, 0))
	}
	r.ReadyAt = r.At.Add(delay)
	return r, nil
}
