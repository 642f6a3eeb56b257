// Package rpclimit decides on the calls of an RPC server, and words what it answers to those that it does
// not let through. Codes and details are the same in gRPC and in Connect.
package rpclimit

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/guard"
	"github.com/pgratelimit/pgratelimit/internal/telemetry"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Config is what grpclimit and connectlimit let their callers choose; they document it.
type Config struct {
	Timeout    time.Duration
	FailOpen   bool
	RetryAfter time.Duration
	InvalidKey Code
	Domain     string
	Logger     *slog.Logger
}

const (
	defaultTimeout    = time.Second
	defaultRetryAfter = time.Second
	defaultDomain     = "pgratelimit"
)

func (c Config) withDefaults() Config {
	if c.Timeout == 0 {
		c.Timeout = defaultTimeout
	}
	if c.RetryAfter == 0 {
		c.RetryAfter = defaultRetryAfter
	}
	if c.InvalidKey == OK {
		c.InvalidKey = InvalidArgument
	}
	if c.Domain == "" {
		c.Domain = defaultDomain
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c
}

func (c Config) validate() error {
	switch {
	case c.Timeout < 0:
		return fmt.Errorf("field Timeout is %v; use a span above 0, or 0 for the default", c.Timeout)
	case c.RetryAfter < 0:
		return fmt.Errorf("field RetryAfter is %v; use a span above 0, or 0 for the default", c.RetryAfter)
	case c.InvalidKey > Unauthenticated:
		return fmt.Errorf("field InvalidKey is %d, which is no code", c.InvalidKey)
	}
	return nil
}

// Gate decides on calls. It is safe for concurrent use.
type Gate struct {
	limiter *ratelimit.Limiter
	config  Config
}

// New returns a Gate that takes from limiter. Its errors name the field that cannot be used.
func New(limiter *ratelimit.Limiter, config Config) (*Gate, error) {
	if limiter == nil {
		return nil, errors.New("the limiter is nil; pass what ratelimit.New returned")
	}
	if limiter.InTransaction() {
		return nil, errors.New("the limiter is bound to a transaction by WithTx; pass what ratelimit.New returned")
	}
	config = config.withDefaults()
	if err := config.validate(); err != nil {
		return nil, err
	}
	return &Gate{limiter: limiter, config: config}, nil
}

// Admit takes what a call of method asks for, from all of its limits or from none, and holds the slots among that until
// release. It returns the context for the handler, with the decision in it, or why the call is not let through; then there
// is nothing to release.
func (g *Gate) Admit(ctx context.Context, method string, requests []ratelimit.Request) (held context.Context, release func(), _ *Rejection) {
	lease, admitted, rejection := g.decide(ctx, method, requests, guard.Take)
	if rejection != nil {
		return ctx, func() {}, rejection
	}
	held, end := guard.Hold(admitted, g.limiter, lease, g.config.Timeout)
	return held, func() {
		if lost := end(); lost != nil {
			g.tell(ctx, ratelimit.Answered{Route: method, Limit: telemetry.Limit(lease.Decision), Result: guard.LeaseLost, Err: lost})
			g.log(ctx, "ratelimit: a handler lost the slot that it held", method, lost)
		}
	}, nil
}

// AdmitMessage is Admit for a message that arrives while the handler runs. It is no call for slots, which nothing would
// give back: one that asks for them is a misuse.
func (g *Gate) AdmitMessage(ctx context.Context, method string, requests []ratelimit.Request) *Rejection {
	_, _, rejection := g.decide(ctx, method, requests, func(ctx context.Context, limiter *ratelimit.Limiter, requests []ratelimit.Request) (ratelimit.Lease, error) {
		d, err := limiter.Take(ctx, requests...)
		return ratelimit.Lease{Decision: d}, err
	})
	return rejection
}

// decide has take decide on a call, and returns what it answered and the context with that in it.
func (g *Gate) decide(
	ctx context.Context, method string, requests []ratelimit.Request,
	take func(context.Context, *ratelimit.Limiter, []ratelimit.Request) (ratelimit.Lease, error),
) (ratelimit.Lease, context.Context, *Rejection) {
	limited, cancel := context.WithTimeout(ratelimit.WithRoute(ctx, strings.ToValidUTF8(method, "?")), g.config.Timeout)
	defer cancel()
	lease, err := take(limited, g.limiter, requests)
	d := lease.Decision
	if _, tried := telemetry.Refusing(d); len(tried) > 0 { // by a rule that enforces nothing
		defer g.tell(ctx, ratelimit.Answered{Route: method, Limit: tried[0], Result: guard.Refused, Shadow: true})
	}
	switch {
	case err != nil:
		return lease, ctx, g.undecided(ctx, method, requests, err)
	case !d.Allowed:
		g.tell(ctx, ratelimit.Answered{Route: method, Limit: telemetry.Limit(d), Result: guard.Refused})
		return lease, ctx, g.Refused(d)
	}
	g.tell(ctx, ratelimit.Answered{Route: method, Limit: telemetry.Limit(d), Result: guard.Allowed})
	return lease, context.WithValue(ctx, decisionKey{}, d), nil
}

// Misnamed returns the rejection of a call for which the application's function returned err instead of
// what the call asks for. The client is told nothing of err.
func (g *Gate) Misnamed(ctx context.Context, method string, err error) *Rejection {
	if r := gone(ctx); r != nil {
		g.tell(ctx, ratelimit.Answered{Route: method, Result: guard.Cancelled, Err: err})
		return r
	}
	g.tell(ctx, ratelimit.Answered{Route: method, Result: guard.FailedClosed, Err: err})
	g.log(ctx, "ratelimit: call refused, its limits could not be named", method, err)
	return &Rejection{Code: Internal, Message: "the limits of this call could not be determined"}
}

// undecided returns the rejection of a call on which there is no decision, and nil to let it through.
func (g *Gate) undecided(ctx context.Context, method string, requests []ratelimit.Request, err error) *Rejection {
	if guard.IsMisuse(err) {
		return g.Misnamed(ctx, method, err)
	}
	result := guard.Result(ctx, err, g.config.FailOpen)
	g.tell(ctx, ratelimit.Answered{Route: method, Limit: requests[0].Limit().Name(), Result: result, Err: err})
	switch result {
	case guard.Cancelled:
		return gone(ctx)
	case guard.BadKey:
		return g.rejection(g.config.InvalidKey, "INVALID_KEY", "the key to limit this call by is missing or cannot be used")
	case guard.TooCostly:
		return g.rejection(InvalidArgument, "COST_EXCEEDS_CAPACITY", "this call costs more than its limit can ever allow at once")
	case guard.BadCost:
		return g.rejection(InvalidArgument, "INVALID_COST", "the cost of this call is not a usable number")
	case guard.FailedOpen:
		g.log(ctx, "ratelimit: call let through undecided", method, err)
		return nil
	}
	g.log(ctx, "ratelimit: call refused undecided", method, err)
	r := g.rejection(Unavailable, "RATE_LIMIT_UNAVAILABLE", "the limits of this call could not be asked")
	r.RetryAfter = g.config.RetryAfter
	return r
}

// tell tells the limiter's observer what becomes of a call. A client may have chosen the method's name.
func (g *Gate) tell(ctx context.Context, answered ratelimit.Answered) {
	answered.Route = strings.ToValidUTF8(answered.Route, "?")
	g.limiter.Observe(ctx, answered)
}

// gone returns the rejection of a call whose own context has ended, and nil when it has not.
func gone(ctx context.Context) *Rejection {
	switch {
	case errors.Is(ctx.Err(), context.Canceled):
		return &Rejection{Code: Canceled, Message: "the call was cancelled while its limits were asked"}
	case ctx.Err() != nil:
		return &Rejection{Code: DeadlineExceeded, Message: "the call's deadline passed while its limits were asked"}
	}
	return nil
}

func (g *Gate) log(ctx context.Context, message, method string, err error) {
	g.config.Logger.LogAttrs(ctx, slog.LevelError, message, slog.String("method", method),
		slog.String("error_type", telemetry.ErrorType(err)), slog.String("error", telemetry.ErrorText(err)))
}

type decisionKey struct{}

// Decision returns the decision that Admit put into the context, and false when the call was let through
// without one.
func Decision(ctx context.Context) (ratelimit.Decision, bool) {
	d, ok := ctx.Value(decisionKey{}).(ratelimit.Decision)
	return d, ok
}
