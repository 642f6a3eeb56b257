package ratelimit_test

import (
	"context"
	"fmt"
	"time"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// A provider counts calls in any minute, wherever it begins.
func ExampleSlidingWindow() {
	partner := ratelimit.Define("partner", ratelimit.SlidingWindow{Rate: 100, Period: time.Minute})
	fmt.Println(partner)
	// Output:
	// partner: never more than 100 in any minute
}

// A quota that begins on the 1st of each month at midnight in Berlin.
func ExampleCalendarWindow() {
	quota := ratelimit.Define("quota", ratelimit.CalendarWindow{Rate: 1000, Resets: ratelimit.Monthly, Zone: "Europe/Berlin"})
	fmt.Println(quota)
	// Output:
	// quota: 1000 per month in Europe/Berlin
}

// Three exports at a time for each tenant.
func ExampleConcurrency() {
	exports := ratelimit.Define("exports", ratelimit.Concurrency{Most: 3, Lease: 30 * time.Second})
	fmt.Println(exports)
	// Output:
	// exports: 3 at a time, leases of 30s
}

// A limit that follows what an upstream accepts. Package httplimit's Transport takes and reports by itself.
func ExampleAdaptive() {
	upstream := ratelimit.Define("upstream", ratelimit.Adaptive{Contract: ratelimit.PerSecond(100), Apply: true})
	fmt.Println(upstream)

	call := func(ctx context.Context, account string, send func() (throttled bool)) error {
		d, err := limiter.Take(ctx, upstream.For(account))
		if err != nil {
			return err
		}
		if !d.Allowed {
			return d.Err()
		}
		return limiter.Report(ctx, upstream.For(account), ratelimit.Outcome{Throttled: send()})
	}
	_ = call
	// Output:
	// upstream: 100 per second, adapting down to 0.1 of it
}
