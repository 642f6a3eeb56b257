package guard

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/telemetry"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
)

// Gate decides on requests in front of handlers, of HTTP and of RPC, and for gateways. It reports each answer to the
// limiter's Observer, and failures to a log. Its users only word the answers.
type Gate struct {
	Limiter  *ratelimit.Limiter
	Timeout  time.Duration // of a decision
	FailOpen bool
	Logger   *slog.Logger // nil: slog.Default

	// IsMistake reports whether the client caused an error, because it names the limits itself. Nil: it never did.
	IsMistake func(error) bool

	failures telemetry.FailureLog
	nested   sync.Once // logs that a limit counts twice
}

// Outcome is the end of a decision.
type Outcome struct {
	ratelimit.Lease // with an ID if slots are held

	Result string
	Err    error // without a decision
	Passes bool  // whether the handler runs
}

// Taking takes the costs of requests. Take is one.
type Taking func(context.Context, *ratelimit.Limiter, []ratelimit.Request) (ratelimit.Lease, error)

// Decide takes the costs of the requests, at least one. A failure turns no request away if none of its limits is
// enforced.
func (g *Gate) Decide(ctx context.Context, route string, requests []ratelimit.Request, take Taking) Outcome {
	limited, cancel := Deciding(ratelimit.WithRoute(ctx, route), g.Timeout)
	defer cancel()
	lease, err := take(limited, g.Limiter, requests)
	o := Outcome{Lease: lease, Result: Allowed, Passes: true, Err: err}
	answered := event.Answered{Route: route, Limit: telemetry.Limit(lease.Decision), Err: err}
	switch {
	case err != nil:
		answered.Limit, answered.Shadow = requests[0].Limit().Name(), !IsEnforced(g.Limiter, requests)
		if exceeded := new(ratelimit.CapacityError); errors.As(err, &exceeded) {
			answered.Limit = exceeded.Limit
		}
		o.Result = g.Result(ctx, err)
		o.Passes = o.Result == FailedOpen || answered.Shadow
	case !lease.Allowed:
		o.Result, o.Passes = Refused, false
	}
	answered.Result = o.Result
	g.Tell(ctx, answered)
	if _, wouldRefuse := telemetry.Refusing(lease.Decision); len(wouldRefuse) > 0 {
		g.Tell(ctx, event.Answered{Route: route, Limit: wouldRefuse[0], Result: Refused, Shadow: true})
	}
	return o
}

// Result returns the result of a request that has no decision because of err. ctx is the request's own.
func (g *Gate) Result(ctx context.Context, err error) string {
	result := Result(ctx, err, g.FailOpen)
	if result == FailedClosed && g.IsMistake != nil && g.IsMistake(err) {
		return BadRequest
	}
	return result
}

// Tell reports an answer to the limiter's Observer, and a failure to the log, too.
func (g *Gate) Tell(ctx context.Context, a event.Answered) {
	switch a.Result {
	case FailedOpen, FailedClosed, CreditFailed, LeaseLost:
		g.Log(ctx, a)
	case Allowed, Refused:
		g.failures.Worked(ctx, g.logger(), "rate limits are decided again")
	}
	g.Limiter.Observe(ctx, a)
}

// Log writes about a failure: the first of a kind, and then at growing intervals.
func (g *Gate) Log(ctx context.Context, a event.Answered) {
	message := "rate limits are not decided"
	switch a.Result {
	case CreditFailed:
		message = "rate limit credit failed"
	case LeaseLost:
		message = "a handler lost the slot that it held"
	}
	g.failures.Failed(ctx, g.logger(), slog.LevelError, message, a.Err,
		slog.String("result", telemetry.Answer(a)), slog.String("route", a.Route), slog.String("limit", a.Limit))
}

func (g *Gate) logger() *slog.Logger { return cmp.Or(g.Logger, slog.Default()) }

// WarnTwice logs, once, that outer, a gate around this one, has taken from a bucket that the requests take from, so
// that each request counts twice.
func (g *Gate) WarnTwice(ctx context.Context, route string, outer *Gate, taken, requests []ratelimit.Request) {
	if outer.Limiter != g.Limiter {
		return
	}
	if limit, twice := twice(g.Limiter, taken, requests); twice {
		g.nested.Do(func() {
			g.logger().WarnContext(ctx, "two nested guards take from the same bucket, so each request counts twice; leave the "+
				"limit out of one of them", slog.String("limit", limit), slog.String("route", route))
		})
	}
}

// twice returns the limit of the first bucket that is in both requests.
func twice(limiter *ratelimit.Limiter, outer, inner []ratelimit.Request) (limit string, twice bool) {
	for _, o := range outer {
		for _, i := range inner {
			name := i.Limit().Name()
			if o.Limit().Name() != name || limiter.Mode(i) == ratelimit.Off {
				continue
			}
			taken, err := limiter.StoredKey(o)
			asked, errAsked := limiter.StoredKey(i)
			if err == nil && errAsked == nil && taken == asked {
				return name, true
			}
		}
	}
	return "", false
}
