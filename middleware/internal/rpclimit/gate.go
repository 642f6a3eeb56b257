// Package rpclimit decides on the calls of an RPC server, and words the answers to calls that are not allowed. Codes
// and details are the same in gRPC and in Connect.
package rpclimit

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/guard"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
)

// Config holds the settings of a Gate. Call is the type that describes a call. grpclimit and connectlimit document all
// fields but the first two.
type Config[Call any] struct {
	// Method returns the name of the called method. A client may have chosen it.
	Method func(call Call) string
	// HasCode reports whether an error of Requests or Message has a code of its own.
	HasCode func(err error) bool

	Requests   func(ctx context.Context, call Call) ([]ratelimit.Request, error)
	Message    func(ctx context.Context, call Call, message any) ([]ratelimit.Request, error)
	Skip       func(ctx context.Context, call Call) bool
	Timeout    time.Duration
	FailOpen   bool
	InvalidKey Code
	Domain     string
	Logger     *slog.Logger
}

const (
	defaultTimeout = time.Second
	defaultDomain  = "pgratelimit"
	retryFailure   = time.Second // the wait in an answer without a decision
)

func (c Config[Call]) withDefaults() Config[Call] {
	if c.Timeout == 0 {
		c.Timeout = defaultTimeout
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

func (c Config[Call]) validate() error {
	switch {
	case c.Requests == nil:
		return errors.New("field Requests is nil; return the limits of a call, and what it asks of them")
	case c.Timeout < 0:
		return fmt.Errorf("field Timeout is %v; use a duration above 0, or 0 for the default", c.Timeout)
	case c.InvalidKey > Unauthenticated:
		return fmt.Errorf("field InvalidKey is %d, which is not a code", c.InvalidKey)
	}
	return nil
}

// Gate decides on calls. It is safe for concurrent use. Its errors for clients are a *[RejectionError], or an error of
// Config.Requests or Config.Message that has a code.
type Gate[Call any] struct {
	config  Config[Call]
	gate    *guard.Gate
	proxied sync.Once // logs that a proxy counts as one client
}

// New returns a Gate that takes from limiter. Its errors name the field that cannot be used.
func New[Call any](limiter *ratelimit.Limiter, config Config[Call]) (*Gate[Call], error) {
	if err := guard.CheckLimiter(limiter); err != nil {
		return nil, err
	}
	config = config.withDefaults()
	if err := config.validate(); err != nil {
		return nil, err
	}
	return &Gate[Call]{config: config, gate: &guard.Gate{
		Limiter: limiter, Timeout: config.Timeout, FailOpen: config.FailOpen, Logger: config.Logger,
	}}, nil
}

// Unary takes the tokens of a call and of its message, from all of their limits or from none, and holds its slots until
// release. It returns the context for the handler, with the decision, or an error for the client. After an error there
// is nothing to release.
func (g *Gate[Call]) Unary(ctx context.Context, call Call,
	message any,
) (held context.Context, release func(), _ error) {
	if g.skips(ctx, call) {
		return ctx, func() {}, nil
	}
	requests, err := g.requests(ctx, call)
	if err != nil {
		return nil, nil, err
	}
	more, err := g.message(ctx, call, message)
	if err != nil {
		return nil, nil, err
	}
	return g.admit(ctx, g.route(call), slices.Concat(requests, more))
}

// Stream is an admitted stream.
type Stream[Call any] struct {
	// Context is the context for the handler, with the decision.
	Context context.Context //nolint:containedctx // streams of gRPC and Connect pass it on

	gate    *Gate[Call] // nil if the messages are free
	call    Call
	refused error
}

// Open is Unary for a stream, whose messages arrive later.
func (g *Gate[Call]) Open(ctx context.Context, call Call) (_ *Stream[Call], release func(), _ error) {
	if g.skips(ctx, call) {
		return &Stream[Call]{Context: ctx}, func() {}, nil
	}
	requests, err := g.requests(ctx, call)
	if err != nil {
		return nil, nil, err
	}
	held, release, err := g.admit(ctx, g.route(call), requests)
	if err != nil {
		return nil, nil, err
	}
	return &Stream[Call]{Context: held, gate: g, call: call}, release, nil
}

// Receive receives a message by a function, and takes its tokens. answer converts a RejectionError into the client's
// error, once. After a refusal Receive returns the same error again. A message cannot ask for slots, because nothing
// would release them.
func (s *Stream[Call]) Receive(message any, receive func(message any) error, answer func(error) error) error {
	if s.refused != nil {
		return s.refused
	}
	if err := receive(message); err != nil || s.gate == nil {
		return err
	}
	requests, err := s.gate.message(s.Context, s.call, message)
	if err == nil && len(requests) > 0 {
		_, err = s.gate.decide(s.Context, s.gate.route(s.call), requests,
			func(ctx context.Context, limiter *ratelimit.Limiter, requests []ratelimit.Request) (ratelimit.Lease, error) {
				d, err := limiter.Take(ctx, requests...)
				return ratelimit.Lease{Decision: d}, err
			})
	}
	s.refused = answer(err)
	return s.refused
}

func (g *Gate[Call]) skips(ctx context.Context, call Call) bool {
	return g.config.Skip != nil && g.config.Skip(ctx, call)
}

// requests returns the requests of a call, or an error for the client.
func (g *Gate[Call]) requests(ctx context.Context, call Call) ([]ratelimit.Request, error) {
	requests, err := g.config.Requests(ctx, call)
	if err == nil && len(requests) == 0 {
		err = errors.New("Config.Requests returned none; use Config.Skip for calls that are not limited")
	}
	return requests, g.faulty(ctx, call, guard.BadKey, err)
}

// message returns what a message asks for, or an error for the client.
func (g *Gate[Call]) message(ctx context.Context, call Call, message any) ([]ratelimit.Request, error) {
	if g.config.Message == nil {
		return nil, nil
	}
	requests, err := g.config.Message(ctx, call, message)
	return requests, g.faulty(ctx, call, guard.BadCost, err)
}

// route returns the name of the called method for the Observer. A client may have chosen it.
func (g *Gate[Call]) route(call Call) string { return strings.ToValidUTF8(g.config.Method(call), "?") }

// faulty returns the error for the client of an error of the application, and reports it. A call without a key is
// answered as one that the limits find without a key. Any other error with a code is unchanged, and has result.
func (g *Gate[Call]) faulty(ctx context.Context, call Call, result string, err error) error {
	if err == nil {
		return nil
	}
	hasNoKey, hasCode := errors.Is(err, ratelimit.ErrInvalidKey), g.config.HasCode(err)
	switch {
	case hasNoKey:
		result = guard.BadKey
	case !hasCode && gone(ctx) != nil:
		result = guard.Cancelled
	case !hasCode:
		result = guard.FailedClosed
	}
	g.gate.Tell(ctx, event.Answered{Route: g.route(call), Result: result, Err: err})
	if missing, ok := errors.AsType[*MissingKeyError](err); ok {
		rejection := g.withoutKey()
		rejection.Message = missing.Error()
		return rejection
	}
	switch {
	case hasNoKey:
		return g.withoutKey()
	case hasCode:
		return err
	case result == guard.Cancelled:
		return gone(ctx)
	}
	return misused()
}

func (g *Gate[Call]) withoutKey() *RejectionError {
	return g.rejection(g.config.InvalidKey, "INVALID_KEY", "the key to limit this call by is missing or cannot be used")
}

// misused returns the rejection of a call whose requests are a mistake of the application. The client does not see it.
func misused() *RejectionError {
	return &RejectionError{Code: Internal, Message: "the limits of this call could not be determined"}
}

// admit takes the requests, and holds the slots among them until release.
func (g *Gate[Call]) admit(ctx context.Context, method string,
	requests []ratelimit.Request,
) (held context.Context, release func(), _ error) {
	outer, _ := ctx.Value(admittedKey{}).(*admitted)
	for around := outer; around != nil; around = around.outer {
		g.gate.WarnTwice(ctx, method, around.gate, around.requests, requests)
	}
	outcome, err := g.decide(ctx, method, requests, guard.Take)
	if err != nil {
		return nil, nil, err
	}
	if outcome.Result == guard.Allowed {
		ctx = context.WithValue(ctx, admittedKey{}, &admitted{outcome.Decision, g.gate, requests, outer})
	}
	held, release = g.gate.Hold(ctx, method, outcome.Lease)
	return held, release, nil
}

// decide returns the answer of take, or an error for the client.
func (g *Gate[Call]) decide(ctx context.Context, method string, requests []ratelimit.Request,
	take guard.Taking,
) (guard.Outcome, error) {
	outcome := g.gate.Decide(ctx, method, requests, take)
	switch {
	case outcome.Passes:
		return outcome, nil
	case outcome.Result == guard.Refused:
		return outcome, Refused(outcome.Decision, g.config.Domain)
	case outcome.Result == guard.Cancelled:
		return outcome, gone(ctx)
	case outcome.Result == guard.BadKey:
		return outcome, g.withoutKey()
	case outcome.Result == guard.TooCostly:
		return outcome, g.rejection(InvalidArgument, "COST_EXCEEDS_CAPACITY",
			"this call costs more than its limit can ever allow at once")
	case outcome.Result == guard.BadCost:
		return outcome, g.rejection(InvalidArgument, "INVALID_COST", "the cost of this call is not a usable number")
	case guard.IsMisuse(outcome.Err):
		return outcome, misused()
	}
	r := g.rejection(Unavailable, "RATE_LIMIT_UNAVAILABLE", "the limits of this call could not be asked")
	r.RetryAfter = retryFailure
	return outcome, r
}

func (g *Gate[Call]) rejection(c Code, reason, message string) *RejectionError {
	return &RejectionError{Code: c, Message: message, Reason: reason, Domain: g.config.Domain}
}

// gone returns the rejection of a call whose own context has ended, and nil when it has not.
func gone(ctx context.Context) *RejectionError {
	switch {
	case errors.Is(ctx.Err(), context.Canceled):
		return &RejectionError{Code: Canceled, Message: "the call was cancelled while its limits were asked"}
	case guard.Ended(ctx) != nil:
		return &RejectionError{Code: DeadlineExceeded, Message: "the call's deadline passed while its limits were asked"}
	}
	return nil
}

// admitted is a decision that allowed a call, in the context of its handler.
type admitted struct {
	decision ratelimit.Decision
	gate     *guard.Gate
	requests []ratelimit.Request
	outer    *admitted // of a Gate around this one; nil if there is none
}

type admittedKey struct{}

// Decision returns the decision that Admit put into the context, and false if the call was allowed without one.
func Decision(ctx context.Context) (d ratelimit.Decision, decided bool) {
	a, decided := ctx.Value(admittedKey{}).(*admitted)
	if decided {
		d = a.decision
	}
	return d, decided
}

// PeerIsKey logs, once, that the key of a forwarded call is its peer. Then all clients of a proxy share a bucket.
func (g *Gate[Call]) PeerIsKey(ctx context.Context, method string) {
	g.proxied.Do(func() {
		g.config.Logger.WarnContext(ctx, "ratelimit: a forwarded call has the key of its peer; if the peer is a proxy, all "+
			"its clients share a bucket: take the key from a header that the proxy sets",
			slog.String("method", strings.ToValidUTF8(method, "?")))
	})
}
