package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/reserved"
	"github.com/pgratelimit/pgratelimit/internal/store"
)

// Expire ends reservations that were neither settled nor cancelled by Config.ExpireAfter after their
// ReadyAt: they keep the estimate as their cost, or give it back, as Cancel does, when Config.ReleaseExpired was
// set when they were made. It also deletes reservations a week after they ended, or after ExpireAfter when that is
// later; their IDs are unknown from then on. It returns how many it ended. Call it every few minutes, from
// any number of processes.
//
// A reservation that somebody else has locked is left to the next call: Expire does not wait for it, and at most
// a second for a bucket. One that cannot be ended does not stop it either: it ends the others, and then returns the
// errors joined. In a transaction it ends all of them or, on an error, none, and is undone with it.
func (l *Limiter) Expire(ctx context.Context) (int, error) {
	if err := l.ready(ctx, "expire"); err != nil {
		return 0, err
	}
	if err := l.pass(ctx, "expire", false, true); err != nil {
		return 0, during("expire", l.explained(ctx, err))
	}
	if l.pool == nil {
		return expireTogether(ctx, l)
	}
	ended, err := expireEach(ctx, l)
	if ctx.Err() != nil {
		return ended, err
	}
	if forgetErr := forget(ctx, l); forgetErr != nil {
		err = errors.Join(err, during("expire: forget", l.explained(ctx, forgetErr)))
	}
	if err != nil {
		err = prefixed(err) // once for all that are joined
	}
	return ended, err
}

// expireEach ends each reservation in a transaction of its own, so that one that cannot be ended undoes no other.
func expireEach(ctx context.Context, l *Limiter) (ended int, err error) {
	var failed []error
	ctx = reserved.Sweeping(ctx)
	err = reserved.EachDue(ctx, &l.session.Unit, l.bounded, func(ids []string) (more bool, err error) {
		more = true
		for i := 0; more && i < len(ids); i++ {
			done, err := expire(ctx, l, ids[i])
			if done {
				ended++
			}
			if err != nil {
				failed = append(failed, err)
			}
			more = ctx.Err() == nil && !isUnavailable(err) // else the others would fail, too
		}
		return more, nil
	})
	if err != nil {
		failed = append(failed, during("expire", l.explained(ctx, err)))
	}
	return ended, errors.Join(failed...)
}

// expire ends one reservation, if it is still to be ended and nobody has locked it. Reservations that would give back to a bucket
// that somebody held for too long are left to the next call.
func expire(ctx context.Context, l *Limiter, id string) (done bool, err error) {
	err = lockedBy(ctx, l, "expire", id, false, func(ctx context.Context, life *reserved.Life) (*reserved.Reservation, error) {
		done = false
		due, err := life.LockDue(ctx, id)
		if err != nil || len(due) == 0 {
			return nil, err
		}
		return due[0], nil
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

// expireTogether ends all reservations in the caller's transaction. It locks the buckets of all of them at once, in
// the order in which every call does: one reservation after the other could lock them in another.
func expireTogether(ctx context.Context, l *Limiter) (ended int, err error) {
	err = l.retryTx(ctx, "expire", false, func(ctx context.Context, tx *Limiter) error {
		var all []*reserved.Reservation
		life := lifeIn(tx)
		err := reserved.EachDue(ctx, &tx.session.Unit, tx.bounded, func(ids []string) (more bool, err error) {
			due, err := life.LockDue(ctx, ids...)
			all = append(all, due...)
			return true, err
		})
		if err == nil {
			err = life.Expire(ctx, all...)
		}
		if err != nil {
			return err
		}
		ended = len(all)
		return forget(ctx, tx)
	})
	if err != nil {
		return 0, during("expire", l.explained(ctx, err))
	}
	return ended, nil
}

// forget deletes reservations that ended long ago, a batch at a time until there are no more.
func forget(ctx context.Context, l *Limiter) error {
	for {
		more, err := forgetSome(ctx, l)
		if err != nil || !more {
			return err
		}
	}
}

// forgetSome deletes one batch of them.
func forgetSome(ctx context.Context, l *Limiter) (more bool, err error) {
	ctx, cancel := l.bounded(ctx)
	defer cancel()
	err = l.session.Change(ctx, "expire", func(ctx context.Context, s *store.Session) (err error) {
		more, err = reserved.In(&s.Unit).ForgetEnded(ctx, &s.Unit)
		return err
	})
	return more, err
}

// Prune deletes the rows of the limits' buckets that have been full for a minute, and returns how many it
// deleted. It changes no decision, because a bucket without a row is full: it only frees the storage of
// keys that nobody uses any more. Name every limit with the policy it has now; rows of limits it is not
// told of, of buckets that owe, and with a ts in the future stay.
//
// Where a name is used under several policies, as the plans of several keys, which row has which is not in the
// database: a row is deleted when it is full under all of them. Name the limit once for each policy. Those that
// this Limiter was used with under the name are counted without, up to 16 of them; those that only
// other processes use have to be named, or rows of theirs are deleted that are not full, and the tokens taken from
// them are there again. The rules of Config.Policies are counted, with the policies that they have replaced.
//
// It also deletes what is known of the upstreams of [Adaptive] limits that nobody has reported of for a week, so that
// their contracts hold again.
//
// It works through the table in small transactions at READ COMMITTED, beside live traffic: it never waits
// for a row. When another process prunes the schema, it returns 0 at once. Call it every few minutes or hours.
func (l *Limiter) Prune(ctx context.Context, limits ...Limit) (int64, error) {
	if err := l.ready(ctx, "prune"); err != nil {
		return 0, err
	}
	if l.pool == nil {
		return 0, fmt.Errorf("%w: Prune runs in transactions of its own and needs a Limiter that New returned, not one of WithTx", ErrInvalidConfig)
	}
	named := make(map[string][]bucket.Terms, len(limits))
	for _, limit := range limits {
		if limit.isZero() {
			return 0, fmt.Errorf("%w: prune of the zero Limit; make limits with Define or NewLimit", ErrInvalidLimit)
		}
		named[limit.Name()] = append(named[limit.Name()], limit.terms())
	}
	pages, err := prunePages(ctx, l)
	if err != nil {
		return 0, during("prune", l.explained(ctx, err))
	}
	began, deleted := l.reports.began(), int64(0)
	for !pages.IsDone() {
		n, gotLock, err := pruneNext(ctx, l, pages, named)
		deleted += n
		if err != nil {
			return deleted, during("prune", l.explained(ctx, err))
		}
		if !gotLock {
			break
		}
	}
	if err := forgetPrices(ctx, l); err != nil {
		return deleted, during("prune", l.explained(ctx, err))
	}
	l.reports.tell(ctx, Pruned{Buckets: int(deleted), Elapsed: l.reports.elapsed(began)})
	return deleted, nil
}

// ruledTerms returns the terms by which a row is full under the rules of a name. It may have been filled under one policy for
// a while and under another since, and its debt may have grown between them, so that it has to hold the most of all at the
// pace of each.
func ruledTerms(source Policies, name string) (terms []bucket.Terms) {
	if source == nil {
		return nil
	}
	most, growth := 0.0, 1.0
	for _, rule := range source.RulesOf(name) {
		for i := range rule.eras {
			row := rule.eras[i].limit.terms().OfShard()
			terms, most, growth = append(terms, row), max(most, row.Capacity), max(growth, row.DebtGrowth())
		}
	}
	for i := range terms {
		terms[i].Capacity, terms[i].Rate = most, terms[i].Rate/growth
	}
	return terms
}

// forgetPrices deletes what is known of the upstreams of adaptive limits that nobody has reported of for a week.
func forgetPrices(ctx context.Context, l *Limiter) error {
	ctx, cancel := l.bounded(ctx)
	defer cancel()
	return l.session.Change(ctx, "prune", func(ctx context.Context, s *store.Session) error { return s.ForgetPrices(ctx) })
}

// prunePages returns the parts of the buckets table.
func prunePages(ctx context.Context, l *Limiter) (*store.PrunePages, error) {
	ctx, cancel := l.bounded(ctx)
	defer cancel()
	if err := l.pass(ctx, "prune", false, true); err != nil {
		return nil, err
	}
	return l.session.PrunePages(ctx)
}

// pruneNext deletes from the next of the pages, in one transaction, and goes on to the one after it. gotLock is false, and
// nothing was done, when another process is pruning.
func pruneNext(ctx context.Context, l *Limiter, pages *store.PrunePages, named map[string][]bucket.Terms) (deleted int64, gotLock bool, err error) {
	next := *pages
	err = l.retryTx(ctx, "prune", false, func(ctx context.Context, tx *Limiter) (err error) {
		used := make(map[string][]bucket.Terms, len(named)) // by now
		for name, terms := range named {
			used[name] = slices.Concat(tx.policies.seen(name), terms, ruledTerms(l.config.Policies, name))
		}
		next = *pages
		deleted, gotLock, err = tx.session.Prune(ctx, &next, used)
		return err
	})
	*pages = next
	return deleted, gotLock, err
}
