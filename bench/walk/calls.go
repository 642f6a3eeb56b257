package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

const (
	runs  = 6                     // the last one counts
	quiet = 50 * time.Millisecond // before each run, until the goroutines of the run before have ended
)

// call is a call on a Limiter. make runs it; the part in the argument of walk is counted.
type call struct {
	name     string
	limits   []ratelimit.Limit
	isDenied bool
	make     func(context.Context, session, []ratelimit.Request) (ratelimit.Decision, error)
}

// session holds the Limiter and the pool of a call.
type session struct {
	l    *ratelimit.Limiter
	pool *pgxpool.Pool
	walk func(do func() error) error
}

func calls() []call {
	one, five, tight := limits("one", 1, 1024), limits("five", 5, 1024), limits("tight", 1, 1)
	return []call{
		{"tx-1", one, false, inCallersTx},
		{"take-1", one, false, alone},
		{"five", five, false, alone},
		{"tx-5", five, false, inCallersTx},
		{"refused-tx-1", tight, true, inCallersTx},
		{"reserve-settle", one, false, reserveAndSettle},
		{"in-tx", one, false, inTx},
	}
}

// record makes the calls on a database of its own.
func record(ctx context.Context) (err error) {
	server, err := postgrestest.Start(ctx, postgrestest.Options{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.Close()) }()
	scratch, err := server.NewScratch(ctx, "walk", 4)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, scratch.Drop(ctx)) }()
	for _, c := range calls() {
		if err := c.record(ctx, scratch.Pool); err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
	}
	return nil
}

// record makes the runs of a call, on a Limiter of its own.
func (c call) record(ctx context.Context, pool *pgxpool.Pool) (err error) {
	l, err := ratelimit.New(pool, ratelimit.Config{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.Close(context.WithoutCancel(ctx))) }()
	// the first call of a program checks the hash key
	if _, err := l.Take(ctx, requests(limits("first", 1, 1024))...); err != nil {
		return err
	}
	var d ratelimit.Decision
	for range runs {
		time.Sleep(quiet)
		d, err = c.make(ctx, session{l, pool, c.walk}, requests(c.limits))
		if err != nil {
			return err
		}
	}
	if d.Allowed == c.isDenied {
		return fmt.Errorf("decided %+v", d)
	}
	return nil
}

// walk runs do between the marks of the call.
func (c call) walk(do func() error) error {
	println(beginMark + " " + c.name) //nolint:forbidigo // as in the marked functions
	defer println(endMark)            //nolint:forbidigo // the same
	return do()
}

// limits returns limits that gain next to nothing meanwhile. A microsecond gains a power of two, so that the clock
// decides no rounding, and with it no number of entries.
func limits(name string, count int, capacity float64) (limits []ratelimit.Limit) {
	const period = 1 << 36 * time.Microsecond
	for i := range count {
		limits = append(limits, ratelimit.Define(fmt.Sprint(name, i),
			ratelimit.TokenBucket{Rate: 1, Period: period, Capacity: capacity}))
	}
	return limits
}

func requests(limits []ratelimit.Limit) (requests []ratelimit.Request) {
	for _, limit := range limits {
		requests = append(requests, limit.For("key"))
	}
	return requests
}

func alone(ctx context.Context, s session, asked []ratelimit.Request) (d ratelimit.Decision, err error) {
	err = s.walk(func() (err error) {
		d, err = s.l.Take(ctx, asked...)
		return err
	})
	return d, err
}

func inCallersTx(ctx context.Context, s session, asked []ratelimit.Request) (d ratelimit.Decision, err error) {
	err = pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		s.l = s.l.WithTx(tx)
		d, err = alone(ctx, s, asked)
		return err
	})
	return d, err
}

func inTx(ctx context.Context, s session, asked []ratelimit.Request) (d ratelimit.Decision, err error) {
	err = s.walk(func() error {
		return s.l.InTx(ctx, func(tx pgx.Tx) (err error) {
			d, err = s.l.WithTx(tx).Take(ctx, asked...)
			return err
		})
	})
	return d, err
}

func reserveAndSettle(ctx context.Context, s session, asked []ratelimit.Request) (d ratelimit.Decision, err error) {
	err = s.walk(func() error {
		r, err := s.l.Reserve(ctx, asked...)
		if d = r.Decision; err != nil {
			return err
		}
		return s.l.Settle(ctx, r.ID, asked[0].Cost(0.5))
	})
	return d, err
}
