// Package connectlimit limits the calls of a Connect server: an interceptor for connectrpc.com/connect, whose
// handlers speak the Connect, gRPC and gRPC-Web protocols.
//
//	limits, err := connectlimit.New(limiter, connectlimit.Config{
//		Requests: func(ctx context.Context, call connectlimit.Call) ([]ratelimit.Request, error) {
//			address, err := call.PeerAddress()
//			if err != nil {
//				return nil, err
//			}
//			return []ratelimit.Request{PerAddress.For(address), Everybody.Global()}, nil
//		},
//	})
//	mux.Handle(pingv1connect.NewPingServiceHandler(service, connect.WithInterceptors(limits)))
//
// The limits of a call are asked together, and it takes from all of them or from none. The tokens are
// taken and committed before the handler runs, and stay taken whatever it returns: a handler gives them
// back with [ratelimit.Limiter.Credit], and one that wants the charge in its own transaction takes them itself.
// Connect reads the message of a unary call before its interceptors run, and a stream's after.
//
// Slots of a [ratelimit.Concurrency] are held while the handler runs, a stream's for as long as it is open, and released
// afterwards. A handler that loses its lease has its context end with the cause [ratelimit.ErrLeaseLost], and finds it
// with [ratelimit.LeaseFromContext]. Config.Message takes slots for unary calls only: for a message in a stream that is a misuse.
//
// # What the client gets
//
//	refused              CodeResourceExhausted (429), with RetryInfo, QuotaFailure, which names the limits that refused, and ErrorInfo
//	no decision          CodeUnavailable (503), with RetryInfo and ErrorInfo, unless Config.FailOpen lets the call through
//	cost above capacity  CodeInvalidArgument with ErrorInfo and no RetryInfo, since no wait helps; so too a cost that is no number
//	no key               Config.InvalidKey with ErrorInfo: there is never a bucket that those without a key share
//	a misuse             CodeInternal: no limits named, or ones that contradict each other
//	gone meanwhile       CodeCanceled or CodeDeadlineExceeded, when the call's own context ended
//
// ErrorInfo has the reasons RATE_LIMITED, LIMIT_PAUSED, RATE_LIMIT_UNAVAILABLE, COST_EXCEEDS_CAPACITY, INVALID_COST and INVALID_KEY.
// With RetryInfo comes the header Retry-After in the Connect protocol, and the trailer grpc-retry-pushback-ms
// in the others. No answer holds a key or the text of a failure, which is logged. When a call ends without a
// decision, its tokens may have been taken: the answer can be lost on its way.
//
// Where the limiter has [ratelimit.Config.Policies], they decide, and the answer names the policy that did. A request says
// which plan its caller is on: PerCustomer.For(customer).Plan("pro"). A limit that is paused refuses until its pause ends,
// and why it is paused is not told. One that its rule only tries, or has switched off, refuses nobody.
//
// The limiter's Observer is told what became of each call, and of each message that is charged for, as a
// [ratelimit.Answered] whose route is the method; of one that your functions answer with a code of their own it is not.
package connectlimit

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"time"

	"connectrpc.com/connect"

	"github.com/pgratelimit/pgratelimit/internal/rpclimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// ErrInvalidConfig is returned by New when the limiter or a field of Config cannot be used.
var ErrInvalidConfig = errors.New("connectlimit: invalid configuration")

// Call is what is known of a call before its handler runs.
type Call struct {
	// Spec says which procedure it is.
	Spec connect.Spec
	// Peer is where it came from, and by which protocol.
	Peer connect.Peer
	// Header holds its HTTP headers. Read only.
	Header http.Header
}

// Config is how calls are limited. Only Requests has to be set.
type Config struct {
	// Requests returns what a call asks of which limits: one or several. To answer with a code of its own
	// it returns a *connect.Error; any other error, and no requests, is answered with CodeInternal.
	Requests func(ctx context.Context, call Call) ([]ratelimit.Request, error)
	// Message returns what a received message asks for, such as its size, on top of Requests: for a unary call in
	// the same decision, in a stream when the message arrives. None is for a message that is free. Errors are
	// those of Requests. Defaults to nil: messages are free, and a stream is charged when it opens.
	Message func(ctx context.Context, call Call, message any) ([]ratelimit.Request, error)
	// Skip reports whether a call is not limited at all, as those of a health check. Defaults to nil: all are.
	Skip func(ctx context.Context, call Call) bool
	// Timeout is how long to wait for a decision. Defaults to 1 second.
	Timeout time.Duration
	// FailOpen lets calls through, and logs it, when the database did not decide on them. Refused all the same are
	// calls that clients could have provoked by asking much (ratelimit.ErrContended, ratelimit.ErrOverloaded), and all
	// after Close of the limiter. Defaults to false.
	FailOpen bool
	// RetryAfter is when a client may try again that was refused because there was no decision. Defaults to
	// 1 second.
	RetryAfter time.Duration
	// InvalidKey is the code for a key that is empty or cannot be stored. Defaults to CodeInvalidArgument,
	// which says that it came from the client; CodeUnauthenticated and CodeInternal may fit better.
	InvalidKey connect.Code
	// Domain is the domain in ErrorInfo: the name of your service. Defaults to "pgratelimit".
	Domain string
	// Logger gets the failures that clients are not told. Defaults to slog.Default.
	Logger *slog.Logger
}

// Interceptor limits the calls that a server receives; those that a client makes pass through it. It is safe for
// concurrent use.
type Interceptor struct{ gate *rpclimit.Gate[Call] }

var _ connect.Interceptor = (*Interceptor)(nil)

// New returns an Interceptor that takes from limiter.
func New(limiter *ratelimit.Limiter, config Config) (*Interceptor, error) {
	gate, err := rpclimit.New(limiter, rpclimit.Config[Call]{
		Method: func(c Call) string { return c.Spec.Procedure }, HasCode: hasCode,
		Requests: config.Requests, Message: config.Message, Skip: config.Skip,
		Timeout: config.Timeout, FailOpen: config.FailOpen, RetryAfter: config.RetryAfter,
		InvalidKey: rpclimit.Code(config.InvalidKey), Domain: config.Domain, Logger: config.Logger,
	})
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalidConfig, err)
	}
	return &Interceptor{gate}, nil
}

// FromContext returns the decision on the call whose context this is, for a handler that shows the remainder
// or gives back what it did not need. It returns false when the call was skipped, or let through undecided.
func FromContext(ctx context.Context) (ratelimit.Decision, bool) { return rpclimit.Decision(ctx) }

// PeerAddress returns the IP address that the call came from, as a key: of IPv6 the /64, and IPv4 as it is,
// also when it came mapped into IPv6. Behind a proxy it is the proxy's: use HeaderValue with what the proxy sets
// and clients cannot. Its error has the code CodeInternal, as on a Unix socket.
func (c Call) PeerAddress() (string, error) {
	key, err := rpclimit.AddressKey(c.Peer.Addr)
	if err != nil {
		return "", connect.NewError(connect.CodeInternal, err)
	}
	return key, nil
}

// HeaderValue returns the one value of the call's header name, as a key. Its error, when there is none, an
// empty one, or more than one, has the code CodeInvalidArgument.
func (c Call) HeaderValue(name string) (string, error) {
	key, err := rpclimit.OnlyValue("header "+name, c.Header.Values(name))
	if err != nil {
		return "", connect.NewError(connect.CodeInvalidArgument, err)
	}
	return key, nil
}
