package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
	"github.com/pgratelimit/pgratelimit/internal/engine/reserved"
	"github.com/pgratelimit/pgratelimit/internal/engine/store"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
)

// Maintain calls Expire, and Prune with limits, immediately and then every interval until ctx ends. Then it returns
// nil. Run it on a goroutine of its own:
//
//	go limiter.Maintain(ctx, 10*time.Minute, SendMessage, FailedLogins)
//
// Any number of processes can run it: they share the reservations, and one of them prunes. Each interval is randomly
// longer by up to a tenth, so processes that started together spread. For the limits see Prune; without any, no row is
// pruned.
//
// An error doesn't end Maintain, because the next interval tries again. Only the Observer learns of errors, as one
// [event.Failed] whose Verb is "expire" or "prune", and of deleted rows, as [event.Pruned], so without one Maintain is
// silent.
//
// It returns ErrInvalidConfig immediately if every isn't above 0, or on a Limiter of WithTx, and ErrInvalidLimit for
// the zero Limit.
func (l *Limiter) Maintain(ctx context.Context, every time.Duration, limits ...Limit) error {
	if err := l.ready(ctx, "maintain"); err != nil {
		if isAnyOf(err, context.Canceled, context.DeadlineExceeded) { // ctx has ended
			return nil
		}
		return err
	}
	if every <= 0 {
		return fmt.Errorf("%w: maintain every %v; use a duration above 0, such as 10 minutes", ErrInvalidConfig, every)
	}
	if err := checkPrune(l, "Maintain", limits); err != nil {
		return err
	}
	l = inBackground(l)
	for {
		maintain(ctx, l, limits)
		if !pause(ctx, every+Jitter(every/10)) {
			return nil
		}
	}
}

// maintain expires and prunes once, and reports errors.
func maintain(ctx context.Context, l *Limiter, limits []Limit) {
	_, _ = l.Expire(ctx) // it reports its errors
	if len(limits) == 0 {
		return
	}
	_, _ = l.Prune(ctx, limits...) // so does it
}

// Expire ends reservations that are still open Config.ExpireAfter after their ReadyAt, and returns how many. They keep
// their estimates, or if Config.ReleaseExpired was set when they were made, Expire credits them as Cancel does. A week
// after a reservation ended, or after ExpireAfter if that is later, Expire deletes it, and its ID is unknown. Call it
// every few minutes, from any number of processes.
//
// Expire skips a reservation that another transaction has locked, and waits at most a second for a bucket; the next
// call ends the rest. If a reservation can't be ended, Expire ends the others, returns the errors joined, and reports
// them to the Observer as one [event.Failed]. In a transaction it ends all of them or, after an error, none, and a
// rollback undoes it.
func (l *Limiter) Expire(ctx context.Context) (int, error) {
	if err := l.ready(ctx, "expire"); err != nil {
		return 0, err
	}
	began := l.reports.began()
	ended, err := expireAll(ctx, l)
	if err != nil {
		l.reports.failed(ctx, event.Failed{Verb: "expire", Err: err}, began)
	}
	return ended, err
}

// expireAll ends all due reservations, and deletes reservations that ended long ago.
func expireAll(ctx context.Context, l *Limiter) (int, error) {
	if err := l.pass(ctx, "expire", false, true); err != nil {
		return 0, explained(ctx, l, "expire", err)
	}
	if l.pool == nil {
		return expireTogether(ctx, l)
	}
	ended, err := expireEach(ctx, l)
	if ctx.Err() != nil {
		return ended, err
	}
	if forgetErr := forget(ctx, l); forgetErr != nil {
		err = errors.Join(err, explained(ctx, l, "expire: forget", forgetErr))
	}
	if err != nil {
		err = prefixed(err) // one prefix for all joined errors
	}
	return ended, err
}

// expireEach ends each reservation by itself if it cannot end them together, so that the failure of one does not undo
// the others.
func expireEach(ctx context.Context, l *Limiter) (ended int, err error) {
	var failed []error
	ctx = reserved.Sweeping(ctx)
	err = reserved.EachDue(ctx, &l.session.Unit, l.config.bounded, func(due []*reserved.Reservation) (more bool) {
		n, left := expireAtOnce(ctx, l, due)
		ended, more = ended+n, true
		for i := 0; more && i < len(left); i++ {
			done, err := expire(ctx, l, left[i].ID)
			if done {
				ended++
			}
			if err != nil {
				failed = append(failed, err)
			}
			more = ctx.Err() == nil && !isUnavailable(err) // without a server the others would fail, too
		}
		return more
	})
	if err != nil {
		failed = append(failed, explained(ctx, l, "expire", err))
	}
	return ended, errors.Join(failed...)
}

// expireAtOnce ends due reservations together, as far as the server can decide on them without a wait. It returns how
// many it has ended, and those that it has left.
func expireAtOnce(
	ctx context.Context, l *Limiter, due []*reserved.Reservation,
) (ended int, left []*reserved.Reservation) {
	byID, ends := make(map[string]*reserved.Reservation), []*store.Settlement(nil)
	for _, r := range due {
		if r.State == reserved.Expired { // it has returned nothing
			reserving{l}.Ended(ctx, r, make([]float64, len(r.Buckets)))
			ended++
			continue
		}
		q := cancellationOf(ctx, l, r.Place())
		if q == nil || !l.session.KeepsInSQL() || !l.session.Settles(q) {
			left = append(left, r)
			continue
		}
		q.ID, q.Final, byID[r.ID] = r.ID, reserved.Expired, r
		ends = append(ends, q)
	}
	slices.SortFunc(ends, (*store.Settlement).Compare)
	for some := range slices.Chunk(ends, store.MostEnds) {
		bounded, cancel := l.config.bounded(ctx)
		_ = l.session.Settle(bounded, some...) // what is not done is tried again
		cancel()
		for _, q := range some {
			switch e := &q.Ended; {
			case !e.Done:
				left = append(left, byID[q.ID])
			case e.State == reserved.Open:
				l.ended(ctx, e)
				ended++
			}
		}
	}
	return ended, left
}

// expire ends one reservation, if it is still due and not locked. It leaves the reservation to the next call if it must
// credit a bucket that another transaction has held for too long.
func expire(ctx context.Context, l *Limiter, id string) (done bool, err error) {
	err = lockedBy(ctx, l, "expire", id, false,
		func(ctx context.Context, life *reserved.Life) (*reserved.Reservation, error) {
			done = false
			return life.LockDue(ctx, id)
		}, func(ctx context.Context, life *reserved.Life, r *reserved.Reservation) error {
			done = true
			return life.Expire(ctx, r)
		})
	if err != nil {
		done = false
	}
	if errors.Is(err, reserved.ErrStuck) {
		err = nil
	}
	return done, err
}

// expireTogether ends all due reservations in the caller's transaction. It locks all their buckets at once, in the
// order of every call, because locking one reservation after the other could deadlock.
func expireTogether(ctx context.Context, l *Limiter) (ended int, err error) {
	err = retryTx(ctx, l, "expire", false, func(ctx context.Context, tx *Limiter) error {
		var open []*reserved.Reservation
		err := reserved.EachDue(ctx, &tx.session.Unit, tx.config.bounded, func(due []*reserved.Reservation) (more bool) {
			for _, r := range due {
				if r.State == reserved.Open {
					open = append(open, r)
				} else { // it has returned nothing
					reserving{tx}.Ended(ctx, r, make([]float64, len(r.Buckets)))
				}
			}
			ended += len(due)
			return true
		})
		if err == nil {
			err = lifeIn(tx).Expire(ctx, open...)
		}
		if err != nil {
			return err
		}
		return forget(ctx, tx)
	})
	if err != nil {
		return 0, explained(ctx, l, "expire", err)
	}
	return ended, nil
}

// forget deletes reservations that ended long ago, in batches.
func forget(ctx context.Context, l *Limiter) error {
	for {
		more, err := forgetSome(ctx, l)
		if err != nil || !more {
			return err
		}
	}
}

// forgetSome deletes one batch. more reports whether others may be left.
func forgetSome(ctx context.Context, l *Limiter) (more bool, err error) {
	ctx, cancel := l.config.bounded(ctx)
	defer cancel()
	err = l.session.Change(ctx, "expire", func(ctx context.Context, s *store.Session) (err error) {
		more, err = reserved.In(&s.Unit).ForgetEnded(ctx, &s.Unit)
		return err
	})
	return more, err
}

// Prune deletes the rows of the limits' buckets that have been full for a minute, and returns how many. It only frees
// storage and changes no decision, because a bucket without a row is full. Name every limit with its current policy.
// Prune keeps the rows of other limits, of buckets in debt, and rows with a ts in the future.
//
// If a name has several policies, for example for different keys, the database doesn't know which one a row has, so
// Prune deletes a row only if it's full under all of them. It adds the policies that this Limiter has used with the
// name, up to 16, and the current and replaced policies of rules in Config.Policies. If only other processes use a
// policy, name the limit once more with it. Otherwise Prune can delete rows that aren't full under it, and their
// buckets are full again.
//
// It works through the table in small READ COMMITTED transactions, in parallel with other calls, and never waits for a
// row. If another process is pruning the schema, it returns 0 immediately. Without limits it returns ErrInvalidLimit.
// Call it every few minutes or hours.
func (l *Limiter) Prune(ctx context.Context, limits ...Limit) (int64, error) {
	if err := l.ready(ctx, "prune"); err != nil {
		return 0, err
	}
	if err := checkPrune(l, "Prune", limits); err != nil {
		return 0, err
	}
	if len(limits) == 0 {
		return 0,
			fmt.Errorf("%w: Prune without limits would delete no bucket; pass every limit, each with its current policy",
				ErrInvalidLimit)
	}
	named := make(map[string][]bucket.Terms, len(limits))
	for _, limit := range limits {
		named[limit.Name()] = append(named[limit.Name()], limit.terms())
	}
	began := l.reports.began()
	deleted, err := prune(ctx, l, named)
	if err != nil {
		err = explained(ctx, l, "prune", err)
		l.reports.failed(ctx, event.Failed{Verb: "prune", Err: err}, began)
		return deleted, err
	}
	l.reports.tell(ctx, event.Pruned{Buckets: int(deleted), Elapsed: l.reports.elapsed(began)})
	return deleted, nil
}

// prune deletes the full rows of the named limits.
func prune(ctx context.Context, l *Limiter, named map[string][]bucket.Terms) (deleted int64, err error) {
	pages, err := prunePages(ctx, l)
	if err != nil {
		return 0, err
	}
	for !pages.IsDone() {
		n, gotLock, err := pruneNext(ctx, l, pages, named)
		deleted += n
		if err != nil {
			return deleted, err
		}
		if !gotLock {
			break
		}
	}
	return deleted, nil
}

func checkPrune(l *Limiter, call string, limits []Limit) error {
	if l.pool == nil {
		return fmt.Errorf("%w: %s runs in transactions of its own and needs a Limiter that New returned, not one of WithTx",
			ErrInvalidConfig, call)
	}
	if slices.Contains(limits, Limit{}) {
		return fmt.Errorf("%w: %s of the zero Limit; make limits with Define or NewLimit", ErrInvalidLimit, call)
	}
	return nil
}

// ruledTerms returns the terms under which Prune may delete a row of a name with rules. A row can have been filled
// under one policy and then under another, and a change can have scaled its owed tokens. So the terms combine the
// largest capacity with the rate of each policy.
func ruledTerms(source Policies, name string) (terms []bucket.Terms) {
	if source == nil {
		return nil
	}
	most, growth := 0.0, 1.0
	for _, rule := range source.RulingsOf(name) {
		for i := range rule.revisions {
			row := rule.revisions[i].limit.terms()
			terms, most, growth = append(terms, row), max(most, row.Capacity), max(growth, row.Revisions.DebtGrowth())
		}
	}
	for i := range terms {
		terms[i].Capacity, terms[i].Rate = most, terms[i].Rate/growth
	}
	return terms
}

func prunePages(ctx context.Context, l *Limiter) (*store.PrunePages, error) {
	ctx, cancel := l.config.bounded(ctx)
	defer cancel()
	if err := l.pass(ctx, "prune", false, true); err != nil {
		return nil, err
	}
	return l.session.Engine().PrunePages(ctx, &l.session.Unit)
}

// pruneNext deletes rows of the next page in one transaction, and advances pages. gotLock is false, and nothing was
// done, if another process prunes.
func pruneNext(ctx context.Context, l *Limiter, pages *store.PrunePages,
	named map[string][]bucket.Terms,
) (deleted int64, gotLock bool, err error) {
	next := *pages
	err = retryTx(ctx, l, "prune", false, func(ctx context.Context, tx *Limiter) (err error) {
		used := make(map[string][]bucket.Terms, len(named)) // the policies used so far
		for name, terms := range named {
			used[name] = slices.Concat(tx.policies.seen(name), terms, ruledTerms(l.config.Policies, name))
		}
		next = *pages
		deleted, gotLock, err = tx.session.Engine().Prune(ctx, &tx.session.Unit, &next, used)
		return err
	})
	*pages = next
	return deleted, gotLock, err
}
