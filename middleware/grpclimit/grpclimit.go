// Package grpclimit limits the calls of a gRPC server: interceptors for google.golang.org/grpc.
//
//	limits, err := grpclimit.New(limiter, grpclimit.Config{
//		Requests: func(ctx context.Context, fullMethod string) ([]ratelimit.Request, error) {
//			address, err := grpclimit.PeerAddress(ctx)
//			if err != nil {
//				return nil, err
//			}
//			return []ratelimit.Request{PerAddress.For(address), Everybody.Global()}, nil
//		},
//	})
//	server := grpc.NewServer(grpc.ChainUnaryInterceptor(limits.Unary), grpc.ChainStreamInterceptor(limits.Stream))
//
// A call takes from all of its limits or from none, in one decision that commits before the handler runs. The tokens
// stay taken even if the handler fails, but it can return them with [ratelimit.Limiter.Credit]. Slots of a
// [ratelimit.Concurrency] are held while the handler runs, or while the stream is open. If a lease is lost, the
// handler's context ends with the cause [ratelimit.ErrLeaseLost].
//
// [Interceptor] lists the answers. With stored rules, name the caller's plan: PerCustomer.For(customer).Plan("pro").
package grpclimit

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/pgratelimit/pgratelimit/middleware/internal/rpclimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// ErrInvalidConfig is returned by New if the limiter or a field of Config cannot be used.
var ErrInvalidConfig = errors.New("grpclimit: invalid configuration")

// Config configures an Interceptor. Only Requests is required.
type Config struct {
	// Requests returns the requests of a call, at least one. To answer with a code of its own it returns an error of
	// package status. Any other error, and no requests, are answered with Internal.
	Requests func(ctx context.Context, fullMethod string) ([]ratelimit.Request, error)
	// Message returns the requests of a received message, for example by its size, in addition to Requests. A unary call
	// makes one decision for both; a stream decides when the message arrives, and cannot take slots. It returns none for
	// a message that costs nothing. Errors are answered as errors of Requests. A nil Message means that messages cost
	// nothing, and a stream is charged when it opens.
	Message func(ctx context.Context, fullMethod string, message any) ([]ratelimit.Request, error)
	// Skip reports whether a call needs no decision, for example a health check. A nil Skip means that no call is
	// skipped.
	Skip func(ctx context.Context, fullMethod string) bool
	// Timeout bounds the time of a decision. Defaults to 1 second.
	Timeout time.Duration
	// FailOpen allows calls on which the database didn't decide, and logs them, but not calls that failed because of many
	// calls (ratelimit.ErrContended, ratelimit.ErrOverloaded), or any after Close of the limiter. Defaults to false.
	FailOpen bool
	// InvalidKey is the code for a key that is missing, empty, or cannot be stored. Defaults to codes.InvalidArgument, for
	// keys that clients send; codes.Unauthenticated and codes.Internal may fit better.
	InvalidKey codes.Code
	// Domain is the domain in ErrorInfo: the name of your service. Defaults to "pgratelimit".
	Domain string
	// Logger receives failures that answers do not contain: the first of a kind, then lines at growing intervals of up to
	// a minute with the number of failures left out, and a line when calls are decided again. Defaults to slog.Default.
	Logger *slog.Logger
}

// Interceptor limits calls. It is safe for concurrent use. Its answers:
//
//	refused              ResourceExhausted, with RetryInfo, QuotaFailure and ErrorInfo
//	no decision          Unavailable, with RetryInfo (1 second) and ErrorInfo, unless Config.FailOpen allows the call
//	cost above capacity  InvalidArgument, with ErrorInfo; no RetryInfo, because waiting doesn't help
//	invalid cost         InvalidArgument, with ErrorInfo
//	no key               Config.InvalidKey, with ErrorInfo: calls without a key never share a bucket
//	misuse               Internal: no limits, or limits that contradict each other
//	ended meanwhile      Canceled or DeadlineExceeded, if the call's own context ended
//
// ErrorInfo has the reasons RATE_LIMITED, LIMIT_PAUSED, RATE_LIMIT_UNAVAILABLE, COST_EXCEEDS_CAPACITY, INVALID_COST and
// INVALID_KEY. With RetryInfo comes the trailer grpc-retry-pushback-ms, for clients' retry policies. No answer has a
// key, a pause's reason, or a failure's text, which is logged. If a call ends without a decision, its tokens may be
// taken.
//
// The limiter's Observer receives an [event.Answered], with the method as route, for each call and each message with
// a cost. If your function answered with a code of its own, the result is bad_key for Requests and bad_cost for
// Message.
type Interceptor struct{ gate *rpclimit.Gate[string] }

// New returns an Interceptor that takes from limiter.
func New(limiter *ratelimit.Limiter, config Config) (*Interceptor, error) {
	gate, err := rpclimit.New(limiter, rpclimit.Config[string]{
		Method: func(fullMethod string) string { return fullMethod }, HasCode: hasCode,
		Requests: config.Requests, Message: config.Message, Skip: config.Skip,
		Timeout: config.Timeout, FailOpen: config.FailOpen, InvalidKey: rpclimit.Code(config.InvalidKey),
		Domain: config.Domain, Logger: config.Logger,
	})
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalidConfig, err)
	}
	return &Interceptor{gate}, nil
}

// FromContext returns the decision on the call with this context, for a handler that shows the tokens left or returns
// unused ones. It returns false if the call was skipped, or allowed without a decision.
func FromContext(ctx context.Context) (ratelimit.Decision, bool) { return rpclimit.Decision(ctx) }
