package take

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Turn reserves the requests' costs, and returns when the work may run. Then run the work, and call
// [ratelimit.Limiter.Settle] with its actual cost. So Turn is for work whose cost you learn only afterwards, such as a
// streamed completion. If you know the cost before, [Wait] leaves nothing to settle.
//
//	r, err := take.Turn(ctx, limiter, Completions.For(user).Cost(estimate))
//	if err == nil {
//		err = r.Err() // refused: nothing is reserved
//	}
//	if err != nil {
//		return err
//	}
//	used := stream(ctx)
//	return limiter.Settle(context.WithoutCancel(ctx), r.ID, Completions.For(user).Cost(used))
//
// Turn refuses, and reserves nothing, if the turn would come after the context's deadline, or if more than a policy's
// MaxReserved would be owed. RetryAfter is then the time until the same call would be accepted. Turns come in the order
// of the reservations, also across processes. A pause or StaleAfter can postpone a turn beyond its ReadyAt.
//
// If the context ends before the turn, or a call fails, Turn cancels the reservation and returns the error: see
// [Await]. On a Limiter of WithTx it returns ErrInvalidConfig, as Wait does. Call Reserve there, and Await after the
// commit.
func Turn(ctx context.Context, l *ratelimit.Limiter, requests ...ratelimit.Request) (ratelimit.Reservation, error) {
	if err := checkOutside(l, "Turn"); err != nil {
		return ratelimit.Reservation{}, err
	}
	if ctx == nil {
		return l.Reserve(ctx, requests...) // which returns the error
	}
	r, err := l.Reserve(ctx, within(ctx, requests)...)
	if err != nil || !r.Allowed {
		return r, err
	}
	if err := await(ctx, l, r.ID, r.Delay()); err != nil {
		return ratelimit.Reservation{}, err
	}
	return r, nil
}

// Await sleeps, without a connection, until a reservation's work may run, and marks it as started, as
// [ratelimit.Limiter.Start] does. If the context ends before, or Start fails, Await cancels the reservation and returns
// the error, so don't run the work then. Only if the database can't be reached, or the process dies, the reservation
// stays open until [ratelimit.Limiter.Expire] ends it.
//
// Use it for a reservation that was made before, for example in a committed transaction; [Turn] reserves and waits in
// one call.
func Await(ctx context.Context, l *ratelimit.Limiter, id string) error {
	if err := checkOutside(l, "Await"); err != nil {
		return err
	}
	if ctx == nil {
		_, err := l.Start(ctx, id) // which returns the error
		return err
	}
	return await(ctx, l, id, 0)
}

func await(ctx context.Context, l *ratelimit.Limiter, id string, wait time.Duration) error {
	if _, _, err := untilTurn(ctx, l, id, wait, 0); err != nil {
		return giveUp(ctx, l, id, err)
	}
	return nil
}

// checkOutside returns an error for a call in a transaction.
func checkOutside(l *ratelimit.Limiter, name string) error {
	if !l.InTransaction() {
		return nil
	}
	return fmt.Errorf("%w: %s in a transaction would keep its rows locked while it sleeps; call Reserve there, or %s on "+
		"the Limiter that New returned", ratelimit.ErrInvalidConfig, name, name)
}

// untilTurn sleeps for wait without lead, and on until the turn of a reservation is at most lead away by the database's
// clock. It returns the turn, and the time at which it asked for it.
func untilTurn(ctx context.Context, l *ratelimit.Limiter, id string, wait,
	lead time.Duration,
) (ratelimit.Turn, time.Time, error) {
	timer := time.NewTimer(wait - lead)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return ratelimit.Turn{}, time.Time{}, fmt.Errorf("take: wait for a turn: %w", ctx.Err())
		case <-timer.C:
		}
		asked := time.Now()
		turn, err := l.Start(ctx, id)
		if err != nil || turn.Wait <= lead {
			return turn, asked, err
		}
		timer.Reset(turn.Wait - lead)
	}
}

// giveUp cancels the reservation of a call that failed with err. It returns err, with the error of Cancel if there is
// one.
func giveUp(ctx context.Context, l *ratelimit.Limiter, id string, err error) error {
	cancelErr := toTheEnd(ctx, func(ctx context.Context) error { return l.Cancel(ctx, id) })
	switch {
	case cancelErr == nil, errors.Is(cancelErr, ratelimit.ErrNotReserved),
		errors.Is(cancelErr, ratelimit.ErrReservationEnded):
		return err
	}
	return fmt.Errorf("%w; its tokens stay reserved until Expire ends the reservation: %w", err, cancelErr)
}

// toTheEnd runs a call whose interruption would leave the state of a reservation unknown.
func toTheEnd(ctx context.Context, call func(ctx context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTimeout)
	defer cancel()
	return call(ctx)
}
