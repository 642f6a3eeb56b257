package pooler_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// The limits, at least one of each kind. Only ahead gains tokens while a test runs.
var (
	roomy    = ratelimit.Define("roomy", world.Hoard(1e6))
	tight    = ratelimit.Define("tight", world.Hoard(1))
	pinch    = ratelimit.Define("pinch", world.Hoard(3))
	wide     = ratelimit.Define("wide", ratelimit.TokenBucket{Rate: 1e6, Period: world.Century, Shards: 8})
	window   = ratelimit.Define("window", ratelimit.FixedWindow{Rate: 3, Period: world.Century})
	sliding  = ratelimit.Define("sliding", ratelimit.SlidingWindow{Rate: 3, Period: world.Century, Slices: 10})
	year     = ratelimit.Define("year", ratelimit.CalendarWindow{Rate: 3, Resets: ratelimit.Yearly, Zone: "Europe/Berlin"})
	slots    = ratelimit.Define("slots", ratelimit.Concurrency{Most: 2, Lease: time.Hour})
	adaptive = ratelimit.Define("adaptive", ratelimit.Adaptive{Contract: world.Hoard(1e6)})
	ahead    = ratelimit.Define("ahead", ratelimit.TokenBucket{Rate: 1e6, Period: time.Second, Capacity: 1e6, Prefetch: 100 * time.Millisecond})
	// crowd is a bucket from which each worker takes one token in a transaction, and a second token outside.
	crowd = ratelimit.Define("crowd", world.Hoard(1e6)).For("all")
)

// call makes a call of one verb.
type call = func(ctx context.Context, l *ratelimit.Limiter) error

// calls are calls by their names.
type calls map[string]call

// names returns the names of the calls, beginning with the n-th one.
func (c calls) names(n int) []string {
	names := slices.Sorted(maps.Keys(c))
	n %= len(names)
	return slices.Concat(names[n:], names[:n])
}

// ids are for calls on a reservation and on a lease.
type ids struct {
	at                 time.Time // when tokens were taken
	reservation, lease idFunc
}

type idFunc = func(ctx context.Context, l *ratelimit.Limiter) (id string, err error)

// idsOf makes a reservation and a lease for each call.
func idsOf(key string) ids {
	return ids{time.Now(), func(ctx context.Context, l *ratelimit.Limiter) (string, error) {
		r, err := l.Reserve(ctx, roomy.For("reserved by "+key).Cost(9))
		return r.ID, err
	}, func(ctx context.Context, l *ratelimit.Limiter) (string, error) {
		lease, err := l.Acquire(ctx, slots.For("leased by "+key))
		return lease.ID, err
	}}
}

// on returns a call on the reservation or lease that of makes.
func on(of idFunc, do func(ctx context.Context, l *ratelimit.Limiter, id string) error) call {
	return func(ctx context.Context, l *ratelimit.Limiter) error {
		id, err := of(ctx, l)
		if err != nil {
			return err
		}
		return do(ctx, l, id)
	}
}

// thrice takes from a limit that holds three tokens, until it is refused.
func thrice(request ratelimit.Request) call {
	return func(ctx context.Context, l *ratelimit.Limiter) error {
		for n := range 4 {
			if d, err := l.Take(ctx, request); err != nil || d.Allowed != (n < 3) {
				return cmp.Or(err, fmt.Errorf("take %d of %s is allowed: %v", n+1, request.Limit().Name(), d.Allowed))
			}
		}
		return nil
	}
}

// asks returns a call of a verb that answers requests.
func asks[T any](verb func(*ratelimit.Limiter, context.Context, ...ratelimit.Request) (T, error), requests ...ratelimit.Request) call {
	return func(ctx context.Context, l *ratelimit.Limiter) error {
		_, err := verb(l, ctx, requests...)
		return err
	}
}

// changes returns a call of a verb that changes the buckets of requests.
func changes(verb func(*ratelimit.Limiter, context.Context, ...ratelimit.Request) error, requests ...ratelimit.Request) call {
	return func(ctx context.Context, l *ratelimit.Limiter) error { return verb(l, ctx, requests...) }
}

// names returns a call of a verb on the reservation or lease that of makes.
func names[T any](of idFunc, verb func(*ratelimit.Limiter, context.Context, string) (T, error)) call {
	return on(of, func(ctx context.Context, l *ratelimit.Limiter, id string) error {
		_, err := verb(l, ctx, id)
		return err
	})
}

// anywhere are the calls of each verb that can be made in a transaction. They take takenAnywhere tokens from the bucket of the key in roomy.
func anywhere(key string, ids ids) calls {
	request := roomy.For(key)
	return calls{
		"Take":         changes((*ratelimit.Limiter).Require, request),
		"TakeBucket":   thrice(pinch.For(key)),
		"TakeWindow":   thrice(window.For(key)),
		"TakeSliding":  thrice(sliding.For(key)),
		"TakeCalendar": thrice(year.For(key)),
		"TakeSeveral":  changes((*ratelimit.Limiter).Require, request, wide.For(key), tight.For("s"+key)),
		"TakeGlobal":   changes((*ratelimit.Limiter).Require, roomy.Global()),
		"TakeAhead":    changes((*ratelimit.Limiter).Require, ahead.For(key)),
		"Borrow":       changes((*ratelimit.Limiter).Require, ratelimit.Borrow(tight.For(key), request).Cost(3)),
		"TakeUpTo": func(ctx context.Context, l *ratelimit.Limiter) error {
			_, _, err := l.TakeUpTo(ctx, 3, request)
			return err
		},
		"Check": asks((*ratelimit.Limiter).Check, request, wide.For(key)),
		"Value": func(ctx context.Context, l *ratelimit.Limiter) error {
			_, err := l.Value(ctx, request)
			return err
		},
		"Reserve":      asks((*ratelimit.Limiter).Reserve, request),
		"CheckReserve": asks((*ratelimit.Limiter).CheckReserve, request),
		"Credit":       changes((*ratelimit.Limiter).Credit, request.Cost(2)),
		"CreditTaken": func(ctx context.Context, l *ratelimit.Limiter) error {
			return l.CreditTaken(ctx, ids.at, request.Cost(2))
		},
		"Charge": changes((*ratelimit.Limiter).Charge, request.Cost(10)),
		"Reset":  changes((*ratelimit.Limiter).Reset, wide.For("r"+key)),
		"Settle": on(ids.reservation, func(ctx context.Context, l *ratelimit.Limiter, id string) error {
			return l.Settle(ctx, id, roomy.For("reserved by "+key).Cost(4))
		}),
		"SettleAsIs": on(ids.reservation, func(ctx context.Context, l *ratelimit.Limiter, id string) error { return l.Settle(ctx, id) }),
		"Cancel":     on(ids.reservation, func(ctx context.Context, l *ratelimit.Limiter, id string) error { return l.Cancel(ctx, id) }),
		"Start":      names(ids.reservation, (*ratelimit.Limiter).Start),
		"Started":    names(ids.reservation, (*ratelimit.Limiter).Started),
		"Renew":      names(ids.reservation, (*ratelimit.Limiter).Renew),
		"Acquire":    asks((*ratelimit.Limiter).Acquire, slots.For(key), request),
		"RenewLease": names(ids.lease, (*ratelimit.Limiter).RenewLease),
		"Release":    on(ids.lease, func(ctx context.Context, l *ratelimit.Limiter, id string) error { return l.Release(ctx, id) }),
		"Expire":     func(ctx context.Context, l *ratelimit.Limiter) error { _, err := l.Expire(ctx); return err },
		"Adaptive": func(ctx context.Context, l *ratelimit.Limiter) error {
			return cmp.Or(l.Require(ctx, adaptive.For(key)), l.Report(ctx, adaptive.For(key), ratelimit.Outcome{}))
		},
	}
}

// Take, TakeSeveral, Acquire and Reserve take 1 each; Borrow and TakeUpTo 3, Charge 10; Credit and CreditTaken return 2. Of what was
// reserved, Settle keeps 4, SettleAsIs, Start and Started 9 each, and Renew 9 for each of two attempts.
const (
	takenAnywhere    = 4*1 + 2*3 + 10 - 2*2
	reservedAnywhere = 4 + 5*9
)

// onPool returns the calls of anywhere, and the calls that a transaction has no use for. Those take takenOnPool more.
func onPool(key string, ids ids) calls {
	request := roomy.For(key)
	all := anywhere(key, ids)
	maps.Copy(all, calls{
		"Wait":  asks((*ratelimit.Limiter).Wait, request),
		"Prune": func(ctx context.Context, l *ratelimit.Limiter) error { _, err := l.Prune(ctx, roomy); return err },
		"Hold": func(ctx context.Context, l *ratelimit.Limiter) error {
			return l.Hold(ctx, func(context.Context, ratelimit.Lease) error { return nil }, slots.For("held by "+key))
		},
		"InTx": func(ctx context.Context, l *ratelimit.Limiter) error {
			return l.InTx(ctx, func(tx pgx.Tx) error {
				return errors.Join(l.WithTx(tx).Require(ctx, request), insertPooled(ctx, tx, key))
			})
		},
		"InTxThatRollsBack": func(ctx context.Context, l *ratelimit.Limiter) error {
			err := l.InTx(ctx, func(tx pgx.Tx) error {
				err := insertPooled(ctx, tx, key+" undone")
				for range 2 {
					err = errors.Join(err, l.WithTx(tx).Require(ctx, tight.For("undone by "+key)))
				}
				return err
			})
			if errors.Is(err, ratelimit.ErrLimited) {
				return nil
			}
			return cmp.Or(err, errors.New("the second is not refused"))
		},
		"InTxForOneBucketOfAll": func(ctx context.Context, l *ratelimit.Limiter) error {
			return l.InTx(ratelimit.WithQueue(ctx, crowd), func(tx pgx.Tx) error { return l.WithTx(tx).Require(ctx, crowd) })
		},
		"TakeFromOneBucketOfAll": changes((*ratelimit.Limiter).Require, crowd),
	})
	return all
}

const takenOnPool = 2

// insertPooled inserts who into the application's table.
func insertPooled(ctx context.Context, tx pgx.Tx, who string) error {
	_, err := tx.Exec(ctx, insertStatement, pgx.QueryExecModeExec, who)
	return err
}

const insertStatement = `INSERT INTO pooled VALUES ($1)`

// holds returns an error unless a bucket of roomy holds as many tokens.
func holds(ctx context.Context, l *ratelimit.Limiter, key string, want float64) error {
	v, err := l.Value(ctx, roomy.For(key))
	if err == nil && math.Abs(v.Tokens-want) > 0.01 {
		err = fmt.Errorf("%s holds %f tokens in place of %f", key, v.Tokens, want)
	}
	return err
}
