package ratelimit

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
	"github.com/pgratelimit/pgratelimit/internal/engine/reserved"
	"github.com/pgratelimit/pgratelimit/internal/engine/store"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
)

// Settle ends a reservation with the work's actual cost. actual has a request for each limit whose cost differs from
// the estimate. A surplus is returned, up to the capacity, to a window only until that window ends. An overage is taken
// from the current bucket, below zero if necessary, and later requests wait for it. If the limit has changed since
// Reserve, the current policy of the request in actual decides.
//
// Settling again changes nothing and returns nil, even with other costs. Settle returns ErrInvalidRequest if actual
// names a bucket that wasn't reserved, or one bucket under two policies, ErrNotReserved if no reservation has the ID,
// for example because its transaction was rolled back, and ErrReservationEnded after Cancel or expiry. After
// ErrCommitUnknown it's unknown whether it has ended, so settle again. A rollback undoes it.
func (l *Limiter) Settle(ctx context.Context, id string, actual ...Request) error {
	if err := l.ready(ctx, "settle"); err != nil {
		return err
	}
	costs, err := actualCosts(ctx, l, "settle", actual)
	if err != nil {
		return during("settle", err)
	}
	keyed := slices.ContainsFunc(actual, func(r Request) bool { return !r.stored })
	return end(ctx, l, "settle", id, keyed, settlementOf(l, id, costs), Settled,
		func(r *reserved.Reservation) ([]float64, error) {
			amounts := make([]float64, len(r.Buckets))
			for _, key := range slices.SortedFunc(maps.Keys(costs), bucket.Key.Compare) {
				actual, rows := costs[key], r.Of(key)
				if len(rows) == 0 {
					return nil, fmt.Errorf("%w: it is not for %q and this key; settle with the requests it was reserved with",
						ErrInvalidRequest, key.Name)
				}
				for _, i := range rows {
					b := &r.Buckets[i]
					cost := actual.cost / float64(len(rows))
					if actual.subject.mode == Off { // a limit that is off is not charged
						cost = min(cost, b.Cost)
					}
					amounts[i], b.Now, b.Settled = cost-b.Cost, actual.terms, &cost
				}
			}
			return amounts, nil
		})
}

// Cancel ends a reservation whose work won't run, and returns its tokens as Settle returns a surplus. The next callers
// can take them, while reservations made later keep their ReadyAt. Cancelling again changes nothing. Errors are
// Settle's.
//
// The policy, which determines the rows and the window that get the tokens, is the limit's rule, or otherwise the one
// that this Limiter last used, or if there is neither, the reservation's.
func (l *Limiter) Cancel(ctx context.Context, id string) error {
	if err := l.ready(ctx, "cancel"); err != nil {
		return err
	}
	q := &store.Settlement{Cost: new(0.0), Own: l.config.Policies == nil && l.policies.isEmpty()}
	if at, known := l.places.Of(id); known {
		q = cancellationOf(ctx, l, at)
	}
	return end(ctx, l, "cancel", id, false, q, Cancelled,
		func(r *reserved.Reservation) ([]float64, error) { return r.Credit(), nil })
}

// settlementOf returns the settlement of a reservation with its costs, or as it was reserved. It is nil for limits with
// several rows.
func settlementOf(l *Limiter, id string, costs map[bucket.Key]actualCost) *store.Settlement {
	at, _ := l.places.Of(id)
	several := at.Others != nil || len(costs) > 1
	if len(costs) == 0 && !several {
		return &store.Settlement{}
	}
	settled := make([]store.ActualCost, 0, len(costs))
	for key, actual := range costs {
		if actual.subject.shards > 1 {
			return nil
		}
		settled = append(settled, store.ActualCost{
			Key: key, Cost: actual.cost, Free: actual.subject.mode == Off, Terms: l.termsNow(actual.terms),
		})
	}
	return settlementAt(at, several, settled)
}

// settlementAt returns the settlement of a reservation at a place, which may be unknown, with costs.
func settlementAt(at reserved.Place, several bool, costs []store.ActualCost) *store.Settlement {
	if !several {
		c := &costs[0]
		return &store.Settlement{Bucket: &c.Key, Cost: &c.Cost, Free: c.Free, Own: c.Own, Terms: c.Terms}
	}
	q := &store.Settlement{Several: true, Costs: costs}
	if at.Others != nil {
		q.Bucket = &at.Key
	}
	for i := range at.Others {
		q.Others = append(q.Others, at.Others[i].Key)
	}
	return q
}

// cancellationOf returns the settlement that cancels a reservation, under the terms that Resolve gives it. It is nil if
// these depend on those of the reservation, or are those of several rows.
func cancellationOf(ctx context.Context, l *Limiter, at reserved.Place) *store.Settlement {
	costs := make([]store.ActualCost, 0, 1+len(at.Others))
	for i := range cap(costs) {
		of := &at
		if i > 0 {
			of = &at.Others[i-1]
		}
		c := store.ActualCost{Key: of.Key}
		switch last := l.policies.last(of.Key.Name); {
		case last == nil && l.config.Policies != nil:
			return nil
		case last == nil:
			c.Own = true
		default:
			limit := *last
			if rule := ruleFor(ctx, l, "cancel", limit, of.Plan, of.Key.Key); rule != nil {
				limit = rule.holding(l.config.estimate()).limit
			}
			if limit.definition().shards > 1 {
				return nil
			}
			c.Terms = l.termsNow(limit.termsFor(of.Key.Key))
		}
		costs = append(costs, c)
	}
	return settlementAt(at, at.Others != nil, costs)
}

// termsNow returns the terms as of now, by an estimate of the database's clock.
func (l *Limiter) termsNow(t bucket.Terms) *bucket.Terms {
	if t.HasSpan() {
		t = t.At(l.config.estimate())
	}
	return &t
}

// end moves an open reservation to a final state, and charges the amounts that amounts returns for its buckets. keyed
// is whether the call names keys that are not in their stored form. A q that is not nil does the same by one statement.
func end(ctx context.Context, l *Limiter, verb, id string, keyed bool, q *store.Settlement, final ReservationState,
	amounts func(*reserved.Reservation) ([]float64, error),
) error {
	if err := l.readyFor(ctx, verb, id); err != nil {
		return err
	}
	ctx, cancel := l.config.bounded(ctx)
	defer cancel()
	if q != nil && reserved.StuckOf(ctx) == nil {
		q.ID, q.Final = id, string(final)
		began := l.reports.began()
		if done, err := endAtOnce(ctx, l, verb, keyed, q); done || err != nil {
			return failedOn(ctx, l, verb, id, err, began)
		}
	}
	lock := func(ctx context.Context, life *reserved.Life) (*reserved.Reservation, error) {
		return life.Lock(ctx, verb, id)
	}
	return lockedBy(ctx, l, verb, id, keyed, lock,
		func(ctx context.Context, life *reserved.Life, r *reserved.Reservation) error {
			return life.End(ctx, r, string(final), amounts)
		})
}

// endAtOnce ends a reservation by one statement. done is false if the statement cannot decide; then nothing has
// changed.
func endAtOnce(ctx context.Context, l *Limiter, verb string, keyed bool, q *store.Settlement) (done bool, err error) {
	if err := l.pass(ctx, verb, keyed, !keyed); err != nil {
		return false, err
	}
	if !l.session.Settles(q) {
		return false, nil
	}
	err = endOne(ctx, l, verb, q)
	if err == nil && !q.Ended.Done && q.Ended.State == reserved.Open {
		if q = learned(ctx, l, q); q == nil || !l.session.Settles(q) {
			return false, nil
		}
		err = endOne(ctx, l, verb, q)
	}
	e := q.Ended
	switch {
	case err != nil || !e.Done:
		return false, err
	case e.State == "":
		return true, ErrNotReserved
	case e.State == q.Final:
		return true, nil
	case e.State != reserved.Open:
		return true, reserved.EndedAs(e.State)
	}
	l.ended(ctx, &e)
	return true, nil
}

// learned returns the settlement of a reservation whose buckets were unknown, now that q has told something about them,
// or nil if it hasn't.
func learned(ctx context.Context, l *Limiter, q *store.Settlement) (next *store.Settlement) {
	e := &q.Ended
	switch {
	case q.Several:
		return nil
	case e.Key.Name != "" && q.Cost != nil && q.Terms == nil && !q.Own:
		next = cancellationOf(ctx, l, reserved.Place{Key: e.Key, Plan: e.Plan})
	case e.Key.Name == "" && q.Final == reserved.Settled:
		next = &store.Settlement{Several: true}
		if q.Bucket != nil {
			next.Costs = []store.ActualCost{{Key: *q.Bucket, Cost: *q.Cost, Free: q.Free, Terms: q.Terms}}
		}
	}
	if next != nil {
		next.ID, next.Final = q.ID, q.Final
	}
	return next
}

func (l *Limiter) ended(ctx context.Context, e *store.Ended) {
	l.endedAt(ctx, store.Charged{Key: e.Key, Amount: e.Amount})
	for _, c := range e.Others {
		l.endedAt(ctx, c)
	}
}

func (l *Limiter) endedAt(ctx context.Context, c store.Charged) {
	if c.Amount != 0 {
		l.reports.invalidate([]bucket.Ask{{Key: c.Key}})
	}
	l.reports.tell(ctx, event.Settlement{Limit: c.Key.Name, Delta: c.Amount, Pending: l.reports.pending()})
}

// endOne asks the server to end a reservation, outside a transaction together with other calls, if its bucket is known.
func endOne(ctx context.Context, l *Limiter, verb string, q *store.Settlement) error {
	if q.Bucket != nil {
		c := &store.Call{Question: store.Question{Verb: verb, Asks: []bucket.Ask{{Key: *q.Bucket}}}, Settlement: q}
		for _, key := range q.Others {
			c.Asks = append(c.Asks, bucket.Ask{Key: key})
		}
		if sent, err := (owner{l}).Batch(ctx, c); sent {
			return err
		}
	}
	return l.session.Settle(ctx, q)
}

// Turn says when the work of a reservation may run.
type Turn struct {
	// ID is the ID of the reservation.
	ID string
	// State is the state of the reservation after the call.
	State ReservationState
	// Wait is the time until the work may run. 0 means now.
	Wait time.Duration
	// ReadyAt and StaleAt are the times of the Reservation, or later ones if the turn was lost.
	ReadyAt, StaleAt time.Time
	// Restarted reports whether the work was started before, so that this is another attempt.
	Restarted bool
}

// Start says whether a reservation's work may run now. Call it right before the work. If Wait is above 0, call it again
// after that time.
//
// Work that wasn't started by StaleAt, for example because its workers were down, has lost its turn, because the tokens
// that arrived meanwhile didn't fit into the full bucket. Start then reserves the cost again, as [Limiter.Renew] does,
// and returns the new turn, so delayed work causes no burst. Work that was started can be started again, any number of
// times, without paying again, unless its reservation expired and was credited.
//
// again are the requests that the reservation was made with, for work that must run although its reservation was
// cancelled or is gone: its row was deleted a week after the reservation ended, or lost with the table. Start then
// reserves them under the same ID, once, however many callers there are, and returns the new turn. If a limit with a
// MaxReserved refuses, nothing is taken, and Wait is the time until Start can succeed. [Limiter.MarshalRequests] lets
// the work carry its requests.
//
// Without again, Start returns ErrReservationEnded if the reservation was cancelled, and ErrNotReserved if it doesn't
// exist. It returns ErrCostExceedsCapacity as Renew does. Don't run the work then.
func (l *Limiter) Start(ctx context.Context, id string, again ...Request) (Turn, error) {
	if err := l.readyFor(ctx, "start", id); err != nil {
		return Turn{}, err
	}
	var lost *reserved.Reservation
	if len(again) > 0 {
		var err error
		if lost, err = recordOf(ctx, l, again); err != nil {
			return Turn{}, during("start", err)
		}
	}
	keyed := slices.ContainsFunc(again, func(r Request) bool { return !r.stored })
	paused := pausedUntil(ctx, l, id)
	return turnBy(ctx, l, "start", id, keyed, func(ctx context.Context, life *reserved.Life) (reserved.Turn, error) {
		return life.Start(ctx, id, paused, lost)
	})
}

// pausedUntil returns the end of the pauses of a reservation's limit. It returns nil if only the reservation's row says
// which limits it has.
func pausedUntil(ctx context.Context, l *Limiter, id string) *int64 {
	if l.config.Policies == nil {
		return new(int64)
	}
	at, known := l.places.Of(id)
	last := l.policies.last(at.Key.Name)
	if !known || at.Others != nil || last == nil {
		return nil
	}
	if rule := ruleFor(ctx, l, "start", *last, at.Plan, at.Key.Key); rule != nil {
		return &rule.pausedUntil
	}
	return new(int64)
}

// recordOf returns the reservation of requests, without an ID and an instant.
func recordOf(ctx context.Context, l *Limiter, requests []Request) (*reserved.Reservation, error) {
	if len(requests) > maxRequests {
		return nil, fmt.Errorf("%w: the call asks for %d limits; it takes from 1 to %d", ErrInvalidRequest, len(requests),
			maxRequests)
	}
	costs, err := actualCosts(ctx, l, "start", requests)
	if err != nil {
		return nil, err
	}
	r := &reserved.Reservation{Release: l.config.ReleaseExpired}
	for _, key := range slices.SortedFunc(maps.Keys(costs), bucket.Key.Compare) {
		c := costs[key]
		n := c.subject.shards
		for row := range n {
			key.Shard = shardOf(n, row)
			r.Buckets = append(r.Buckets, reserved.NewReserved(key, c.subject.plan, c.cost/float64(n), &c.terms))
		}
	}
	return r, nil
}

func turnBy(ctx context.Context, l *Limiter, verb, id string, keyed bool,
	change func(ctx context.Context, life *reserved.Life) (reserved.Turn, error),
) (turn Turn, err error) {
	var t reserved.Turn
	err = lockedBy(ctx, l, verb, id, keyed,
		func(ctx context.Context, life *reserved.Life) (_ *reserved.Reservation, err error) {
			t, err = change(ctx, life)
			return t.Reservation, err
		},
		func(context.Context, *reserved.Life, *reserved.Reservation) error {
			turn = Turn{
				ID: t.ID, State: ReservationState(t.State), Wait: t.Wait,
				ReadyAt: time.UnixMicro(t.ReadyUs), StaleAt: optionalTime(t.StaleUs), Restarted: t.Restarted,
			}
			return nil
		})
	return turn, err
}

// Started reports whether a reservation's work was started, or ErrNotReserved if the reservation doesn't exist.
func (l *Limiter) Started(ctx context.Context, id string) (bool, error) {
	if err := l.readyFor(ctx, "started", id); err != nil {
		return false, err
	}
	started := false
	err := lockedBy(ctx, l, "started", id, false,
		func(ctx context.Context, life *reserved.Life) (*reserved.Reservation, error) {
			return life.Lock(ctx, "started", id)
		},
		func(_ context.Context, _ *reserved.Life, r *reserved.Reservation) error {
			started = r.StartedUs != nil
			return nil
		})
	return started, err
}

// Renew reserves a reservation's cost again and returns the new turn, for another attempt that must pay, or for work
// that runs although it was cancelled. The reservation becomes open and not started, whatever its state. If the debt
// would exceed MaxReserved, nothing changes, and Wait is the time until Renew can succeed. It returns ErrNotReserved if
// the reservation doesn't exist, and ErrCostExceedsCapacity if its policy can never give the cost.
//
// The policy is the limit's rule, or otherwise the one that this Limiter last used with the name, for any key, or if
// there is neither, the reservation's. So if a name's keys have different policies in the code, Renew can use another
// key's: settle and reserve instead, or give each policy a name.
func (l *Limiter) Renew(ctx context.Context, id string) (Turn, error) {
	if err := l.readyFor(ctx, "renew", id); err != nil {
		return Turn{}, err
	}
	return turnBy(ctx, l, "renew", id, false, func(ctx context.Context, life *reserved.Life) (reserved.Turn, error) {
		return life.Renew(ctx, id)
	})
}
