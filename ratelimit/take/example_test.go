package take_test

import (
	"context"
	"fmt"
	"log"
	"time"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/take"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

// Mails go out as fast as the limit allows: each round sends one mail for each available token.
func ExampleUpTo() {
	ctx, limiter := context.Background(), limiterInMemory()
	Mails := ratelimit.Define("mails", ratelimit.TokenBucket{Rate: 100, Period: time.Second, Capacity: 2})
	queue := []string{"one", "two", "three"}
	for len(queue) > 0 {
		n, d, err := take.UpTo(ctx, limiter, len(queue), Mails.For("news"))
		if err != nil {
			log.Fatal(err)
		}
		for _, mail := range queue[:n] {
			fmt.Println("send", mail)
		}
		queue = queue[n:]
		time.Sleep(d.RetryAfter)
	}
	// Output:
	// send one
	// send two
	// send three
}

// A caller that can wait, but no longer than its client waits.
func ExampleWait() {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	limiter := limiterInMemory()
	Completions := ratelimit.Define("completions", ratelimit.TokenBucket{Rate: 10, Period: time.Minute, Capacity: 1})
	for range 2 {
		d, err := take.Wait(ctx, limiter, Completions.Global())
		switch {
		case err != nil:
			fmt.Println(err)
		case !d.Allowed:
			fmt.Println("busy for longer than that; try again in", d.RetryAfter.Round(time.Second))
		default:
			fmt.Println("it is our turn")
		}
	}
	// Output:
	// it is our turn
	// busy for longer than that; try again in 1s
}

// A pool of a hundred a second guarantees twenty to each tenant. While other tenants take nothing, one can take all of
// it.
func ExampleBorrow() {
	ctx, limiter := context.Background(), limiterInMemory()
	own, pool := ratelimit.Define("guarantee", ratelimit.PerSecond(20)), ratelimit.Define("pool", ratelimit.PerSecond(100))
	for _, c := range []struct {
		tenant string
		tokens float64
	}{{"ada", 20}, {"ada", 80}, {"ada", 10}, {"bob", 10}} {
		d, err := take.Borrow(ctx, limiter, c.tokens, own.For(c.tenant), pool.Global())
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(c.tenant, d.Allowed, d.States[len(d.States)-1].Limit.Name())
	}
	// Output:
	// ada true guarantee
	// ada true pool
	// ada false pool
	// bob true guarantee
}

func limiterInMemory() *ratelimit.Limiter {
	limiter, err := ratelimit.New(ratelimittest.NewDB(), ratelimit.Config{})
	if err != nil {
		log.Fatal(err)
	}
	return limiter
}
