package ratelimit

import (
	"context"
	"errors"
	"math"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

const (
	expireBatch = 100
	forgetBatch = 1000
	keepEnded   = 7 * Day

	// firstID sorts before every other ID.
	firstID = "00000000-0000-0000-0000-000000000000"
	// expireWait is how long a reservation that is given back waits for a bucket that somebody holds.
	expireWait = "SET LOCAL lock_timeout = '1s'"
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
	if l.pool == nil {
		return l.expireTogether(ctx)
	}
	ended, err := l.expireEach(ctx)
	if ctx.Err() != nil {
		return ended, err
	}
	if forgetErr := l.forget(ctx); forgetErr != nil {
		err = errors.Join(err, during("expire: forget", l.explain(forgetErr)))
	}
	if err != nil {
		err = prefixed(err) // once for all that are joined
	}
	return ended, err
}

// expireEach ends each reservation in a transaction of its own, so that one that cannot be ended undoes no other.
func (l *Limiter) expireEach(ctx context.Context) (ended int, err error) {
	var failed []error
	stuck := make(map[bucket.Key]bool)
	err = l.expired(ctx, func(ids []string) (more bool, err error) {
		more = true
		for i := 0; more && i < len(ids); i++ {
			done, err := l.expire(ctx, ids[i], stuck)
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
		failed = append(failed, during("expire", l.explain(err)))
	}
	return ended, errors.Join(failed...)
}

// expire ends one reservation, if it is still to be ended and nobody has locked it. stuck are buckets that somebody
// held for too long: reservations that would give back to one of them are left to the next call.
func (l *Limiter) expire(ctx context.Context, id string, stuck map[bucket.Key]bool) (done bool, err error) {
	ctx, cancel := l.bounded(ctx)
	defer cancel()
	began := l.watch()
	var r *reservation
	err = l.together(ctx, "expire", func(tx *Limiter) error {
		done, r = false, nil
		if _, err := tx.db.Exec(ctx, expireWait); err != nil {
			return err
		}
		locked, err := tx.lockExpired(ctx, []string{id})
		if err != nil || len(locked) == 0 {
			return err
		}
		r = locked[0]
		if r.Release && slices.ContainsFunc(r.plan().buckets, func(b ask) bool { return stuck[b.bucketKey()] }) {
			return nil
		}
		done = true
		return tx.finish(ctx, r, Expired, r.released())
	})
	if err == nil {
		return done, nil
	}
	if sqlstate(err) == codeLockNotAvailable && r != nil {
		var waited *waitError
		switch buckets := r.plan().buckets; {
		case errors.As(err, &waited):
			stuck[waited.row.Whole()] = true
		case len(buckets) == 1:
			stuck[buckets[0].bucketKey()] = true
		}
	}
	err = during("expire "+id, l.explain(err))
	l.fail(ctx, Failed{Verb: "expire", Err: err}, began)
	return false, err
}

// expireTogether ends all reservations in the caller's transaction. It locks the buckets of all of them at once, in
// the order in which every call does: one reservation after the other could lock them in another.
func (l *Limiter) expireTogether(ctx context.Context) (ended int, err error) {
	err = l.together(ctx, "expire", func(tx *Limiter) error {
		var all []*reservation
		err := tx.expired(ctx, func(ids []string) (more bool, err error) {
			locked, err := tx.lockExpired(ctx, ids)
			all = append(all, locked...)
			return true, err
		})
		if err != nil {
			return err
		}
		for _, r := range all {
			if err := tx.record(ctx, r, Expired, r.released()); err != nil {
				return err
			}
		}
		ended = len(all)
		if err := tx.release(ctx, all); err != nil {
			return err
		}
		return tx.forget(ctx)
	})
	if err != nil {
		return 0, during("expire", l.explain(err))
	}
	return ended, nil
}

// release gives back what those of the reservations took that release it.
func (l *Limiter) release(ctx context.Context, all []*reservation) error {
	var plans []*plan
	var released []*reservation
	for _, r := range all {
		if r.Release {
			plans, released = append(plans, r.plan()), append(released, r)
		}
	}
	if len(plans) == 0 {
		return nil
	}
	h, err := l.hold(ctx, plans...)
	if err != nil {
		return err
	}
	for i, r := range released {
		l.invalidate(plans[i])
		amounts, until := r.released(), r.refundUntil()
		for j := range plans[i].buckets {
			h.charge(&plans[i].buckets[j], amounts[j], until[j])
		}
	}
	return l.saveHeld(ctx, h)
}

// released returns the amounts that the end by itself gives back.
func (r *reservation) released() []float64 {
	if r.Release {
		return r.refund()
	}
	return make([]float64, len(r.Costs))
}

// expired passes the reservations whose end has come to each, some at a time and every one once, until there are no
// more or each wants none.
func (l *Limiter) expired(ctx context.Context, each func(ids []string) (more bool, err error)) error {
	after, last := int64(math.MinInt64), firstID
	for {
		ids, err := l.expiredAfter(ctx, &after, &last)
		if err != nil || len(ids) == 0 {
			return err
		}
		if more, err := each(ids); err != nil || !more || len(ids) < expireBatch {
			return err
		}
	}
}

// expiredAfter returns some of the reservations whose end has come behind those up to the instant after and the ID
// last, which it moves on.
func (l *Limiter) expiredAfter(ctx context.Context, after *int64, last *string) (ids []string, err error) {
	ctx, cancel := l.bounded(ctx)
	defer cancel()
	rows, err := l.db.Query(ctx, l.statements.reservationsExpired, int32(expireBatch), l.asOf(), *after, *last)
	if err != nil {
		return nil, err
	}
	_, err = pgx.ForEachRow(rows, []any{last, after}, func() error {
		ids = append(ids, *last)
		return nil
	})
	return ids, err
}

// lockExpired locks those of the reservations that are to be ended and that nobody else has locked.
func (l *Limiter) lockExpired(ctx context.Context, ids []string) ([]*reservation, error) {
	rows, err := l.db.Query(ctx, l.statements.reservationsLock, ids, l.asOf())
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (*reservation, error) {
		var r reservation
		if err := row.Scan(append([]any{&r.ID}, r.columns()...)...); err != nil {
			return nil, err
		}
		r.now = l.termsNow(&r)
		return &r, nil
	})
}

// forget deletes reservations that ended long ago, a batch at a time until there are no more.
func (l *Limiter) forget(ctx context.Context) error {
	for {
		deleted, err := l.forgetSome(ctx)
		if err != nil || deleted < forgetBatch {
			return err
		}
	}
}

// forgetSome deletes one batch of them.
func (l *Limiter) forgetSome(ctx context.Context) (deleted int64, err error) {
	ctx, cancel := l.bounded(ctx)
	defer cancel()
	err = l.standalone(ctx, "expire", func() error {
		tag, err := l.db.Exec(ctx, l.statements.reservationsForget, int32(forgetBatch), l.asOf(), int64(keepEnded/time.Microsecond))
		deleted = tag.RowsAffected()
		return err
	})
	return deleted, err
}
