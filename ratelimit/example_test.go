package ratelimit_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Limits are package variables: a misspelt one does not compile.
var (
	FailedLogins = ratelimit.Define("failedLogins", ratelimit.PerHour(10))
	SendMessage  = ratelimit.Define("sendMessage", ratelimit.TokenBucket{Rate: 10, Period: time.Minute, Capacity: 3})
	FreeTrials   = ratelimit.Define("freeTrials", ratelimit.FixedWindow{Rate: 100, Period: time.Hour})
	Exports      = ratelimit.Define("exports", ratelimit.Concurrency{Most: 3, Lease: 30 * time.Second})
	Renders      = ratelimit.Define("renders", ratelimit.Concurrency{Most: 5, Lease: 30 * time.Second})
	Completions  = ratelimit.Define("completions", ratelimit.TokenBucket{Rate: 40_000, Period: time.Minute, MaxReserved: 400_000})
)

// Variables of a program that the examples use.
var (
	ctx     = context.Background()
	limiter *ratelimit.Limiter
	userID  string
)

func ExampleNew() {
	pool, err := pgxpool.New(ctx, "postgres://localhost/app")
	if err != nil {
		log.Fatal(err)
	}
	if err := migrations.Up(ctx, pool, migrations.Config{}); err != nil {
		log.Fatal(err)
	}
	limiter, err := ratelimit.New(pool, ratelimit.Config{})
	if err != nil {
		log.Fatal(err)
	}
	d, err := limiter.Take(ctx, SendMessage.For("user 17"))
	fmt.Println(d.Allowed, err)
}

// Mails go out as fast as the limit allows: each round sends one mail for each available token.
func ExampleLimiter_TakeUpTo() {
	var queue []string
	for len(queue) > 0 {
		n, d, err := limiter.TakeUpTo(ctx, len(queue), SendMessage.For(userID))
		if err != nil {
			log.Fatal(err)
		}
		for _, mail := range queue[:n] {
			fmt.Println("send", mail)
		}
		queue = queue[n:]
		time.Sleep(d.RetryAfter)
	}
}

// A caller who can wait, but no longer than his client waits.
func ExampleLimiter_Wait() {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	d, err := limiter.Wait(ctx, Completions.For(userID).Cost(1500))
	switch {
	case err != nil:
		fmt.Println(err)
		return
	case !d.Allowed:
		fmt.Println("busy for longer than that; try again in", d.RetryAfter)
		return
	}
	fmt.Println("it is his turn")
}

// A page shows the wait before the caller queues.
func ExampleLimiter_CheckReserve() {
	r, err := limiter.CheckReserve(ctx, Completions.For(userID).Cost(1500))
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("it would begin in", r.Delay())
}

// Definitions that come from outside the program are checked, and the error says what to change.
func ExampleNewLimit() {
	_, err := ratelimit.NewLimit("uploads", ratelimit.TokenBucket{Rate: 5, Period: 10})
	fmt.Println(err)
	fmt.Println(errors.Is(err, ratelimit.ErrInvalidLimit))
	// Output:
	// ratelimit: invalid limit "uploads": its Period is 10ns; it must be whole microseconds, from 1µs to 100 years (write 10*time.Second, not 10)
	// true
}

// A limit of each kind.
func ExampleDefine() {
	for _, limit := range []ratelimit.Limit{
		ratelimit.Define("messages", ratelimit.TokenBucket{Rate: 10, Period: time.Minute, Capacity: 3}),
		ratelimit.Define("visits", ratelimit.FixedWindow{Rate: 1000, Period: ratelimit.Day, Start: time.Date(2026, time.January, 1, 0, 0, 0, 0, time.UTC)}),
		ratelimit.Define("partner", ratelimit.SlidingWindow{Rate: 100, Period: time.Minute}),
		ratelimit.Define("quota", ratelimit.CalendarWindow{Rate: 1000, Resets: ratelimit.Monthly, Zone: "Europe/Berlin"}),
		ratelimit.Define("exports", ratelimit.Concurrency{Most: 3, Lease: 30 * time.Second}),
		ratelimit.Define("upstream", ratelimit.Adaptive{Contract: ratelimit.PerSecond(100), Apply: true}),
	} {
		fmt.Println(limit)
	}
	// Output:
	// messages: 10 per minute, capacity 3
	// visits: 1000 per day (fixed window, one starts at 2026-01-01T00:00:00Z)
	// partner: never more than 100 in any minute
	// quota: 1000 per month in Europe/Berlin
	// exports: 3 at a time, leases of 30s
	// upstream: 100 per second, adapting down to 0.1 of it
}

func ExampleLimiter_Take() {
	d, err := limiter.Take(ctx, SendMessage.For(userID))
	switch {
	case err != nil: // no decision was made: treat the request as refused
		log.Print(err)
	case !d.Allowed:
		log.Printf("come again in %v", d.RetryAfter)
	default:
		log.Printf("%.0f left", d.Remaining)
	}
}

// A slot is held while the work runs.
func ExampleLimiter_Acquire() {
	lease, err := limiter.Acquire(ctx, Renders.For(userID))
	switch {
	case err != nil: // no decision was made
		log.Print(err)
		return
	case !lease.Allowed:
		log.Printf("come again in %v at the latest", lease.RetryAfter)
		return
	}
	render(ctx, lease.Fence) // which takes less than the lease; Hold renews it
	if err := limiter.Release(ctx, lease.ID); errors.Is(err, ratelimit.ErrLeaseLost) {
		log.Print("the work ran beside others for a while")
	}
}

// render writes its result unless a holder of a later lease has written one: the storage compares fencing numbers.
func render(ctx context.Context, fence int64) {
	var pool *pgxpool.Pool
	_, err := pool.Exec(ctx, `UPDATE videos SET frames = $1, fence = $2 WHERE owner = $3 AND fence <= $2`, "..", fence, userID)
	if err != nil {
		log.Print(err)
	}
}

// The tokens belong to the transaction: the message and its token commit together, or neither does.
func ExampleLimiter_InTx() {
	err := limiter.InTx(ctx, func(tx pgx.Tx) error {
		if err := limiter.WithTx(tx).Require(ctx, SendMessage.For(userID)); err != nil {
			return err // rolls back
		}
		_, err := tx.Exec(ctx, `INSERT INTO messages (author, body) VALUES ($1, $2)`, userID, "hello")
		return err
	})
	var limited *ratelimit.LimitedError
	if errors.As(err, &limited) {
		log.Printf("come again in %v", limited.Decision.RetryAfter)
	}
}

// If you begin the transaction yourself, run it again when it conflicts.
func ExampleLimiter_WithTx() {
	var pool *pgxpool.Pool
	err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		return limiter.WithTx(tx).Require(ctx, FreeTrials.Global())
	})
	if ratelimit.IsRetryable(err) {
		log.Print("again, from the start")
	}
}

// Work that will be done in any case reserves its tokens, and runs when they are available.
func ExampleLimiter_Reserve() {
	r, err := limiter.Reserve(ctx, Completions.Global().Cost(2500))
	if err != nil {
		log.Fatal(err)
	}
	if !r.Allowed {
		log.Printf("too much is waiting already: come again in %v", r.RetryAfter)
		return
	}
	time.AfterFunc(r.Delay(), func() { log.Print("run the completion") })
}

// A form may show whether it will be accepted. What counts is the answer to Take.
func ExampleLimiter_Check() {
	d, err := limiter.Check(ctx, SendMessage.For(userID))
	if err != nil {
		log.Fatal(err)
	}
	log.Printf("enabled: %v", d.Allowed)
}

// One Value predicts the tokens of a bucket, so that a page can count down without another call.
func ExampleLimiter_Value() {
	value, err := limiter.Value(ctx, SendMessage.For(userID))
	if err != nil {
		log.Fatal(err)
	}
	for s := range 10 {
		log.Printf("in %d s: %.1f", s, value.At(value.AsOf.Add(time.Duration(s)*time.Second)))
	}
}

// After a correct password the earlier attempts were not guesses.
func ExampleLimiter_Reset() {
	if err := limiter.Reset(ctx, FailedLogins.For(userID)); err != nil {
		log.Fatal(err)
	}
}

// Do the work only if Require returns nil.
func ExampleLimiter_Require() {
	err := limiter.Require(ctx, SendMessage.For(userID), FreeTrials.Global())
	var refused *ratelimit.LimitedError
	switch {
	case errors.As(err, &refused):
		log.Printf("come again in %v", refused.Decision.RetryAfter)
	case err != nil:
		log.Printf("nobody could say: %v", err) // and so it is not sent
	default:
		log.Print("send it")
	}
}

// No user has more than three exports running at a time. The storage that they write to compares the fencing number.
func ExampleLimiter_Hold() {
	export := func(context.Context, int64) error { return nil }
	err := limiter.Hold(ctx, func(ctx context.Context, lease ratelimit.Lease) error {
		return export(ctx, lease.Fence)
	}, Exports.For(userID))
	switch {
	case errors.Is(err, ratelimit.ErrLimited):
		fmt.Println("three are running already")
	case errors.Is(err, ratelimit.ErrLeaseLost):
		fmt.Println("it was stopped, because its slot may be somebody else's")
	case err != nil:
		log.Fatal(err)
	}
}

// Acquire the lease in the transaction that stores the work, and call Keep after the commit.
func ExampleLimiter_Keep() {
	var lease ratelimit.Lease
	err := limiter.InTx(ctx, func(tx pgx.Tx) error {
		var err error
		if lease, err = limiter.WithTx(tx).Acquire(ctx, Exports.For(userID)); err != nil {
			return err
		}
		if !lease.Allowed {
			return lease.Err()
		}
		_, err = tx.Exec(ctx, "INSERT INTO exports ...")
		return err
	})
	if err != nil {
		log.Fatal(err)
	}
	held, release := limiter.Keep(ctx, lease)
	defer release()
	<-held.Done() // the work, which stops when this ends
}
