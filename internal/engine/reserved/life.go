package reserved

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
	"github.com/pgratelimit/pgratelimit/internal/engine/store"
)

// ErrEnded is returned when a reservation has ended in another way than the call asks for.
var ErrEnded = errors.New("ratelimit: the reservation has ended")

// EndedAs returns the error for a reservation that has ended in a state.
func EndedAs(state string) error { return fmt.Errorf("%w: it was %s", ErrEnded, state) }

// Owner is the Limiter that a Life belongs to.
type Owner interface {
	// Resolve sets the terms that the limits of a reservation have now, and the end of their pauses.
	Resolve(ctx context.Context, verb string, r *Reservation)
	// Changed is notified of buckets that are charged or taken from.
	Changed(asks []bucket.Ask)
	// Ended is notified of the amounts that the end of a reservation charges to its buckets.
	Ended(ctx context.Context, r *Reservation, amounts []float64)
}

// Life changes reservations: in a transaction, in which it locks them, or in the server without one. Then a reservation
// is read, and written by a statement that returns store.ErrChanged if another call was quicker. A reservation is open,
// until it is settled, cancelled or expired. Renew opens it again.
type Life struct {
	Session     *store.Session
	Owner       Owner
	ExpireAfter time.Duration // after a reservation is ready, or was started
	StaleAfter  time.Duration // after a reservation is ready; 0: never
	ErrTooMuch  error         // wrapped by errors for costs that a limit can never give
}

// Lock reads a reservation, and locks it to the end of the transaction.
func (l *Life) Lock(ctx context.Context, verb, id string) (*Reservation, error) {
	r, err := In(&l.Session.Unit).LockReservation(ctx, &l.Session.Unit, id, false)
	if err == nil {
		l.Owner.Resolve(ctx, verb, r)
	}
	return r, err
}

// lockOr is Lock of a reservation that may be gone. Then it returns lost under the ID, as a reservation that was
// cancelled now. The caller saves it.
func (l *Life) lockOr(ctx context.Context, id string, lost *Reservation) (*Reservation, error) {
	r, err := In(&l.Session.Unit).LockReservation(ctx, &l.Session.Unit, id, true)
	if err != nil {
		return nil, err
	}
	if len(r.Buckets) == 0 {
		now, made := r.NowUs, *lost
		r, made.Buckets = &made, slices.Clone(lost.Buckets) // an attempt may be followed by another one
		r.ID, r.State, r.NowUs, r.ReadyUs, r.ExpiresUs = id, Cancelled, now, now, now+l.ExpireAfter.Microseconds()
		if l.StaleAfter > 0 {
			stale := now + l.StaleAfter.Microseconds()
			r.StaleUs = &stale
		}
	}
	l.Owner.Resolve(ctx, "start", r)
	return r, nil
}

// LockDue locks a reservation that is due. It returns nil if it isn't, or another transaction has locked it.
func (l *Life) LockDue(ctx context.Context, id string) (*Reservation, error) {
	return In(&l.Session.Unit).LockDue(ctx, &l.Session.Unit, id)
}

// Save writes a reservation that was locked, unless it is as it was read.
func (l *Life) Save(ctx context.Context, r *Reservation) error {
	if r.isAsRead() {
		return nil
	}
	return In(&l.Session.Unit).SaveReservation(ctx, &l.Session.Unit, r)
}

// End moves an open reservation to a final state, and charges the amounts to its buckets. It does not change a
// reservation that is already in that state.
func (l *Life) End(ctx context.Context, r *Reservation, final string,
	amounts func(*Reservation) ([]float64, error),
) error {
	switch r.State {
	case final:
		_, err := amounts(r) // which checks what the call names
		return err
	case Open:
	default:
		return EndedAs(r.State)
	}
	due, err := amounts(r)
	if err != nil {
		return err
	}
	return l.finish(ctx, final, func(*Reservation) []float64 { return due }, r)
}

// Expire ends reservations that Due or LockDue has locked.
func (l *Life) Expire(ctx context.Context, due ...*Reservation) error {
	for _, r := range due {
		l.Owner.Resolve(ctx, "expire", r)
	}
	return l.finish(ctx, Expired, (*Reservation).Released, due...)
}

// finish saves the final state of reservations, and charges the buckets of all of them together, so that their rows are
// locked in order.
func (l *Life) finish(ctx context.Context, final string, amounts func(*Reservation) []float64,
	all ...*Reservation,
) error {
	var charges []store.Charge
	var ends []store.End
	dues, inSQL := make([][]float64, len(all)), l.Session.KeepsInSQL()
	for i, r := range all {
		due := amounts(r)
		dues[i] = due
		if slices.ContainsFunc(due, func(amount float64) bool { return amount != 0 }) {
			if StuckOf(ctx).Contains(r) {
				return ErrStuck
			}
			charges = append(charges, r.Charge(due))
		}
		r.State, r.ExpiresUs = final, max(r.ExpiresUs, r.NowUs)
		if final == Settled {
			r.settle(due)
		}
		if inSQL {
			ends = append(ends, r.end())
		} else if err := l.Save(ctx, r); err != nil {
			return err
		}
	}
	for i := range charges {
		defer l.Owner.Changed(charges[i].Asks)
	}
	var err error
	if inSQL && len(ends) > 0 {
		err = l.Session.EndRows(ctx, ends, charges...)
	} else if len(charges) > 0 {
		err = l.Session.Charge(ctx, charges...)
	}
	for i, r := range all {
		if err == nil {
			l.Owner.Ended(ctx, r, dues[i])
		}
	}
	return err
}

// Turn is when the work of a reservation may run.
type Turn struct {
	*Reservation
	Wait      time.Duration // until then
	Restarted bool          // whether it was started before
}

// Start starts the work of a reservation if it may run, or returns how long that takes. paused is the end of the pauses
// of its limits; nil: its row says which they are. lost is taken again under the ID if the reservation was cancelled,
// or is gone; nil: nothing is.
func (l *Life) Start(ctx context.Context, id string, paused *int64, lost *Reservation) (t Turn, err error) {
	if l.Session.IsInMemory() {
		return l.startLocked(ctx, id, lost)
	}
	for {
		var done bool
		t, done, err = l.start(ctx, id, paused, lost != nil)
		switch {
		case lost != nil && errors.Is(err, ErrNotReserved) && l.Session.IsOnPool():
			return t, store.ErrNeedsTx
		case lost != nil && errors.Is(err, ErrNotReserved):
			return l.startLocked(ctx, id, lost)
		case err == nil && done && t.State == Cancelled && lost == nil:
			return t, EndedAs(t.State)
		case err != nil || done:
			return t, err
		}
		l.Owner.Resolve(ctx, "start", t.Reservation)
		if paused != nil {
			if t, err = l.renew(ctx, t.Reservation, true); err == nil {
				err = l.Save(ctx, t.Reservation)
			}
			return t, err
		}
		paused = &t.PausedUntil
	}
}

func (l *Life) startLocked(ctx context.Context, id string, lost *Reservation) (t Turn, err error) {
	var r *Reservation
	if lost == nil {
		r, err = l.Lock(ctx, "start", id)
	} else {
		r, err = l.lockOr(ctx, id, lost)
	}
	if err == nil {
		t, err = l.turnOf(ctx, r, lost != nil)
	}
	if err == nil {
		err = l.Save(ctx, r)
	}
	return t, err
}

// turnOf is startLocked for a reservation that is locked, and not saved. again is whether a cancelled reservation is
// taken again. It mirrors start_1.
func (l *Life) turnOf(ctx context.Context, r *Reservation, again bool) (Turn, error) {
	switch {
	case r.State == Cancelled && !again:
		return Turn{}, EndedAs(r.State)
	case r.PausedUntil > r.NowUs: // it keeps its slot, unless that is stale by then
		l.keep(r, r.PausedUntil)
		return Turn{r, r.until(r.PausedUntil), r.StartedUs != nil}, nil
	case r.State == Cancelled, r.State == Expired && r.Release: // its tokens were returned, also if it was started
		return l.renew(ctx, r, true)
	case r.StartedUs != nil: // it is alive: it must not be forgotten before its next attempt
		l.keep(r, r.NowUs)
		return Turn{r, 0, true}, nil
	case r.State == Settled: // early; it keeps its slot
		return Turn{r, r.until(r.ReadyUs), false}, nil
	case r.StaleUs != nil && r.NowUs >= *r.StaleUs:
		return l.renew(ctx, r, true)
	}
	wait := r.until(r.ReadyUs)
	if wait == 0 {
		r.StartedUs = new(r.NowUs)
	}
	return Turn{r, wait, false}, nil
}

// keep keeps a reservation for ExpireAfter from an instant, at least.
func (l *Life) keep(r *Reservation, from int64) {
	r.ExpiresUs = max(r.ExpiresUs, from+l.ExpireAfter.Microseconds())
}

func (r *Reservation) until(us int64) time.Duration {
	return time.Duration(max(0, us-r.NowUs)) * time.Microsecond
}

// Renew takes again what the reservation took, and moves it to its new slot. It returns the wait for that, or the wait
// until it can be tried again, without a change.
func (l *Life) Renew(ctx context.Context, id string) (t Turn, err error) {
	r, err := l.Lock(ctx, "renew", id)
	if err == nil {
		t, err = l.renew(ctx, r, false)
	}
	if err == nil {
		err = l.Save(ctx, r)
	}
	return t, err
}

// renew is Renew for work that starts, if it may and starts is true, of a reservation that the caller saves.
func (l *Life) renew(ctx context.Context, r *Reservation, starts bool) (t Turn, err error) {
	asks := r.Asks()
	for i := range asks {
		a := &asks[i]
		if bucket.Holds(&a.Terms) { // by now; of slots nothing was reserved
			a.Cost, a.MinBalance, a.AllowDebt = 0, -math.MaxFloat64, false
		} else if !(a.Terms.Capacity-a.Cost >= a.MinBalance) {
			return t, fmt.Errorf("%w: the reservation cost %v of %q, which now allows at most %v",
				l.ErrTooMuch, a.Cost, a.Key.Name, a.Terms.Capacity-a.MinBalance)
		}
	}
	inSQL := l.Session.KeepsInSQL() && r.known != nil && !bucket.AnyHolds(asks)
	var answers []bucket.Answer
	switch {
	case inSQL:
		answers, _, err = l.Session.ReserveAgain(ctx, asks, r.row(starts))
	case l.Session.KeepsInSQL() && l.Session.IsOnPool():
		err = store.ErrNeedsTx
	default:
		c := store.Call{Question: store.Question{Verb: "renew", Asks: asks}}
		err = l.Session.Decide(ctx, &c)
		answers = c.Answers
	}
	if err != nil {
		return t, err
	}
	if t.Reservation = r; !bucket.AllAllowed(answers) {
		for i := range asks {
			t.Wait = max(t.Wait, asks[i].Tell(&answers[i], asks[i].MinBalance, &bucket.Snapshot{}).RetryAfter)
		}
		return t, nil
	}
	l.Owner.Changed(asks)
	for i := range asks {
		r.Buckets[i].Now = asks[i].Terms
	}
	r.reopen(ReadyAt(asks, answers, r.PausedUntil))
	now := answers[0].Now
	if starts && r.ReadyUs <= now {
		r.StartedUs = &now
	}
	if inSQL { // it's written
		r.setKnown()
	}
	t.Wait = time.Duration(r.ReadyUs-now) * time.Microsecond
	return t, nil
}

// row returns what ReserveAgain keeps.
func (r *Reservation) row(starts bool) *store.Row {
	row := &store.Row{
		ID: r.ID, NotBeforeUs: r.PausedUntil, ExpireUs: r.ExpiresUs - r.ReadyUs, Release: r.Release, Known: r.known,
		Starts: starts,
	}
	if r.StaleUs != nil {
		row.StaleUs = new(*r.StaleUs - r.ReadyUs)
	}
	for i := range r.Buckets {
		row.Plans = append(row.Plans, r.Buckets[i].Plan)
	}
	return row
}
