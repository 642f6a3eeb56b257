package pooler_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// The limits, at least one of each kind. Only ahead gains tokens while a test runs.
var (
	roomy    = ratelimit.Define("roomy", world.Hoard(1e6))
	other    = ratelimit.Define("other", world.Hoard(1e6))
	tight    = ratelimit.Define("tight", world.Hoard(1))
	pinch    = ratelimit.Define("pinch", world.Hoard(2))
	wide     = ratelimit.Define("wide", ratelimit.TokenBucket{Rate: 1e6, Period: world.Century, Shards: 8})
	window   = ratelimit.Define("window", ratelimit.FixedWindow{Rate: 3, Period: world.Century})
	sliding  = ratelimit.Define("sliding", ratelimit.SlidingWindow{Rate: 3, Period: world.Century, Slices: 10})
	year     = ratelimit.Define("year", ratelimit.CalendarWindow{Rate: 3, Resets: ratelimit.Yearly, Zone: "Europe/Berlin"})
	slots    = ratelimit.Define("slots", ratelimit.Concurrency{Most: 2, Lease: time.Hour})
	adaptive = ratelimit.Define("adaptive", ratelimit.Adaptive{Contract: world.Hoard(1e6)})
	ahead    = ratelimit.Define("ahead", ratelimit.TokenBucket{Rate: 1e6, Period: time.Second, Capacity: 1e6, Prefetch: 100 * time.Millisecond})
)

// verb is one use of a verb, or of several that belong together, on buckets of its own. It checks the answers.
type verb struct {
	name string
	run  func(ctx context.Context, l *ratelimit.Limiter, key string) error
}

// holds returns an error unless a bucket of a limit that gains nothing holds as many tokens.
func holds(ctx context.Context, l *ratelimit.Limiter, request ratelimit.Request, want float64) error {
	v, err := l.Value(ctx, request)
	if err == nil && math.Abs(v.Tokens-want) > 0.01 {
		err = fmt.Errorf("%s holds %f tokens in place of %f", request.Limit().Name(), v.Tokens, want)
	}
	return err
}

// answered returns err, and an error when the answer is another than was wanted.
func answered(err error, what string, got, want any) error {
	if err == nil && got != want {
		err = fmt.Errorf("%s: %v in place of %v", what, got, want)
	}
	return err
}

// takenOnce takes so often from a limit, and expects to be refused next.
func takenOnce(ctx context.Context, l *ratelimit.Limiter, request ratelimit.Request, often int) error {
	for n := range often + 1 {
		d, err := l.Take(ctx, request)
		if err = answered(err, fmt.Sprintf("take %d of %s is allowed", n+1, request.Limit().Name()), d.Allowed, n < often); err != nil {
			return err
		}
	}
	return nil
}

// anywhere are the calls that can be made in a transaction, too.
func anywhere() []verb {
	return []verb{
		{"Take", func(ctx context.Context, l *ratelimit.Limiter, key string) error {
			return takenOnce(ctx, l, pinch.For(key), 2)
		}},
		{"TakeFromSeveral", takeFromSeveral},
		{"TakeFromShards", func(ctx context.Context, l *ratelimit.Limiter, key string) error {
			d, err := l.Take(ctx, wide.For(key).Cost(5))
			return errors.Join(answered(err, "allowed", d.Allowed, true), holds(ctx, l, wide.For(key), 1e6-5))
		}},
		{"TakeFromFixedWindow", func(ctx context.Context, l *ratelimit.Limiter, key string) error {
			return takenOnce(ctx, l, window.For(key), 3)
		}},
		{"TakeFromSlidingWindow", func(ctx context.Context, l *ratelimit.Limiter, key string) error {
			return takenOnce(ctx, l, sliding.For(key), 3)
		}},
		{"TakeFromCalendarWindow", func(ctx context.Context, l *ratelimit.Limiter, key string) error {
			return takenOnce(ctx, l, year.For(key), 3)
		}},
		{"TakeGlobal", func(ctx context.Context, l *ratelimit.Limiter, _ string) error {
			d, err := l.Take(ctx, other.Global().Cost(0))
			return answered(err, "allowed", d.Allowed, true)
		}},
		{"Borrow", func(ctx context.Context, l *ratelimit.Limiter, key string) error {
			d, err := l.Take(ctx, ratelimit.Borrow(tight.For(key), roomy.For(key)).Cost(3))
			return errors.Join(answered(err, "allowed", d.Allowed, true), holds(ctx, l, roomy.For(key), 1e6-3))
		}},
		{"Require", func(ctx context.Context, l *ratelimit.Limiter, key string) error {
			err := l.Require(ctx, tight.For(key))
			return errors.Join(err, answered(nil, "refused", errors.Is(l.Require(ctx, tight.For(key)), ratelimit.ErrLimited), true))
		}},
		{"Check", func(ctx context.Context, l *ratelimit.Limiter, key string) error {
			d, err := l.Check(ctx, roomy.For(key), pinch.For(key).Cost(2))
			return errors.Join(answered(err, "allowed", d.Allowed, true), holds(ctx, l, pinch.For(key), 2))
		}},
		{"TakeUpTo", func(ctx context.Context, l *ratelimit.Limiter, key string) error {
			n, _, err := l.TakeUpTo(ctx, 5, pinch.For(key), roomy.For(key).Cost(10))
			return errors.Join(answered(err, "taken", n, 2), holds(ctx, l, roomy.For(key), 1e6-20))
		}},
		{"CreditChargeCreditTakenReset", creditAndCharge},
		{"ReserveAndSettle", reserveAndSettle},
		{"ReserveAndCancel", reserveAndCancel},
		{"AcquireAndRelease", leaseAndRelease},
		{"Adaptive", func(ctx context.Context, l *ratelimit.Limiter, key string) error {
			d, err := l.Take(ctx, adaptive.For(key))
			return errors.Join(answered(err, "allowed", d.Allowed, true), l.Report(ctx, adaptive.For(key), ratelimit.Outcome{}))
		}},
		{"Expire", func(ctx context.Context, l *ratelimit.Limiter, _ string) error {
			n, err := l.Expire(ctx)
			return answered(err, "expired", n, 0)
		}},
	}
}

func takeFromSeveral(ctx context.Context, l *ratelimit.Limiter, key string) error {
	requests := []ratelimit.Request{roomy.For(key).Cost(2), wide.For(key), other.For(key), tight.For(key)}
	first, err := l.Take(ctx, requests...)
	if err = answered(err, "allowed", first.Allowed, true); err != nil {
		return err
	}
	second, err := l.Take(ctx, requests...)
	return errors.Join(answered(err, "allowed again", second.Allowed, false),
		holds(ctx, l, roomy.For(key), 1e6-2), holds(ctx, l, wide.For(key), 1e6-1), holds(ctx, l, other.For(key), 1e6-1))
}

func creditAndCharge(ctx context.Context, l *ratelimit.Limiter, key string) error {
	d, err := l.Take(ctx, roomy.For(key).Cost(100))
	return errors.Join(answered(err, "allowed", d.Allowed, true),
		l.Charge(ctx, roomy.For(key).Cost(10)), holds(ctx, l, roomy.For(key), 1e6-110),
		l.Credit(ctx, roomy.For(key).Cost(30)), holds(ctx, l, roomy.For(key), 1e6-80),
		l.CreditTaken(ctx, d.At, roomy.For(key).Cost(5)), holds(ctx, l, roomy.For(key), 1e6-75),
		l.Reset(ctx, roomy.For(key)), holds(ctx, l, roomy.For(key), 1e6))
}

func reserveAndSettle(ctx context.Context, l *ratelimit.Limiter, key string) error {
	would, err := l.CheckReserve(ctx, roomy.For(key).Cost(9))
	if err = answered(err, "would be allowed", would.Allowed, true); err != nil {
		return err
	}
	r, err := l.Reserve(ctx, roomy.For(key).Cost(9), other.For(key))
	if err != nil {
		return err
	}
	slot, err := l.Start(ctx, r.ID)
	if err = answered(err, "wait", slot.Wait, time.Duration(0)); err != nil {
		return err
	}
	started, err := l.Started(ctx, r.ID)
	return errors.Join(answered(err, "started", started, true), l.Settle(ctx, r.ID, roomy.For(key).Cost(4), other.For(key)),
		holds(ctx, l, roomy.For(key), 1e6-4), holds(ctx, l, other.For(key), 1e6-1))
}

func reserveAndCancel(ctx context.Context, l *ratelimit.Limiter, key string) error {
	r, err := l.Reserve(ctx, roomy.For(key).Cost(9))
	if err != nil {
		return err
	}
	if err := errors.Join(l.Cancel(ctx, r.ID), holds(ctx, l, roomy.For(key), 1e6)); err != nil {
		return err
	}
	slot, err := l.Renew(ctx, r.ID)
	return errors.Join(answered(err, "wait", slot.Wait, time.Duration(0)), holds(ctx, l, roomy.For(key), 1e6-9), l.Cancel(ctx, r.ID))
}

func leaseAndRelease(ctx context.Context, l *ratelimit.Limiter, key string) error {
	lease, err := l.Acquire(ctx, slots.For(key).Cost(2), roomy.For(key))
	if err = answered(err, "allowed", lease.Allowed, true); err != nil {
		return err
	}
	late, err := l.Acquire(ctx, slots.For(key))
	if err = answered(err, "a third slot", late.Allowed, false); err != nil {
		return err
	}
	if _, err := l.RenewLease(ctx, lease.ID); err != nil {
		return err
	}
	if err := l.Release(ctx, lease.ID); err != nil {
		return err
	}
	return errors.Join(holds(ctx, l, slots.For(key), 2),
		answered(nil, "lost", errors.Is(l.Release(ctx, lease.ID), ratelimit.ErrLeaseLost), true))
}

// outside are the calls that a transaction has no use for.
func outside() []verb {
	return []verb{
		{"Wait", func(ctx context.Context, l *ratelimit.Limiter, key string) error {
			d, err := l.Wait(ctx, roomy.For(key), other.For(key))
			return errors.Join(answered(err, "allowed", d.Allowed, true), holds(ctx, l, roomy.For(key), 1e6-1))
		}},
		{"Hold", func(ctx context.Context, l *ratelimit.Limiter, key string) error {
			ran := false
			err := l.Hold(ctx, func(ctx context.Context, _ ratelimit.Lease) error {
				ran = true
				return holds(ctx, l, slots.For(key), 1)
			}, slots.For(key))
			return errors.Join(answered(err, "it ran", ran, true), holds(ctx, l, slots.For(key), 2))
		}},
		{"Prefetch", func(ctx context.Context, l *ratelimit.Limiter, key string) error {
			for range 5 {
				d, err := l.Take(ctx, ahead.For(key))
				if err = answered(err, "allowed", d.Allowed, true); err != nil {
					return err
				}
			}
			return nil
		}},
		{"Prune", func(ctx context.Context, l *ratelimit.Limiter, _ string) error {
			n, err := l.Prune(ctx, roomy) // of which no bucket has been full for a minute
			return answered(err, "pruned", n, int64(0))
		}},
		{"InTx", func(ctx context.Context, l *ratelimit.Limiter, key string) error {
			err := l.InTx(ctx, func(tx pgx.Tx) error {
				if _, err := l.WithTx(tx).Take(ctx, roomy.For(key), wide.For(key)); err != nil {
					return err
				}
				_, err := tx.Exec(ctx, insertPooled, key)
				return err
			})
			return errors.Join(err, holds(ctx, l, roomy.For(key), 1e6-1), holds(ctx, l, wide.For(key), 1e6-1))
		}},
		{"InTxThatRollsBack", func(ctx context.Context, l *ratelimit.Limiter, key string) error {
			err := l.InTx(ctx, func(tx pgx.Tx) error {
				if _, err := tx.Exec(ctx, insertPooled, key+" undone"); err != nil {
					return err
				}
				if err := l.WithTx(tx).Require(ctx, pinch.For(key).Cost(2)); err != nil {
					return err
				}
				return l.WithTx(tx).Require(ctx, pinch.For(key))
			})
			return errors.Join(answered(nil, "refused", errors.Is(err, ratelimit.ErrLimited), true), holds(ctx, l, pinch.For(key), 2))
		}},
		{"InTxForOneBucketOfAll", func(ctx context.Context, l *ratelimit.Limiter, _ string) error {
			return l.InTx(ratelimit.WithQueue(ctx, crowd), func(tx pgx.Tx) error { return l.WithTx(tx).Require(ctx, crowd) })
		}},
		{"TakeFromOneBucketOfAll", func(ctx context.Context, l *ratelimit.Limiter, _ string) error { return l.Require(ctx, crowd) }},
	}
}

// crowd is a bucket from which all take one token in a transaction, and a second token outside.
var crowd = ratelimit.Define("crowd", world.Hoard(1e6)).For("all")
