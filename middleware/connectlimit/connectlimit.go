// Package connectlimit limits the calls of a Connect server: an interceptor for connectrpc.com/connect, whose handlers
// speak the Connect, gRPC and gRPC-Web protocols.
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
// A call takes from all of its limits or from none, in one decision that commits before the handler runs. The tokens
// stay taken even if the handler fails, but it can return them with [ratelimit.Limiter.Credit]. Connect reads a unary
// call's message before its interceptors run, and a stream's messages after. Slots of a [ratelimit.Concurrency] are
// held while the handler runs, or while the stream is open. If a lease is lost, the handler's context ends with the
// cause [ratelimit.ErrLeaseLost].
//
// [Interceptor] lists the answers. With stored rules, name the caller's plan: PerCustomer.For(customer).Plan("pro").
package connectlimit

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"time"

	"connectrpc.com/connect"

	"github.com/pgratelimit/pgratelimit/middleware/internal/rpclimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// ErrInvalidConfig is returned by New if the limiter or a field of Config cannot be used.
var ErrInvalidConfig = errors.New("connectlimit: invalid configuration")

// Call is a call before its handler runs.
type Call struct {
	// Spec has the procedure.
	Spec connect.Spec
	// Peer has the address of the client, and the protocol.
	Peer connect.Peer
	// Header has the HTTP headers. Read only.
	Header http.Header

	peerIsKey func() // for PeerAddress of a forwarded call; nil otherwise
}

// Config configures an Interceptor. Only Requests is required.
type Config struct {
	// Requests returns the requests of a call, at least one. To answer with a code of its own it returns a
	// *connect.Error. Any other error, and no requests, are answered with CodeInternal.
	Requests func(ctx context.Context, call Call) ([]ratelimit.Request, error)
	// Message returns the requests of a received message, for example by its size, in addition to Requests. A unary call
	// makes one decision for both; a stream decides when the message arrives, and cannot take slots. It returns none for
	// a message that costs nothing. Errors are answered as errors of Requests. A nil Message means that messages cost
	// nothing, and a stream is charged when it opens.
	Message func(ctx context.Context, call Call, message any) ([]ratelimit.Request, error)
	// Skip reports whether a call needs no decision, for example a health check. A nil Skip means that no call is
	// skipped.
	Skip func(ctx context.Context, call Call) bool
	// Timeout bounds the time of a decision. Defaults to 1 second.
	Timeout time.Duration
	// FailOpen allows calls on which the database didn't decide, and logs them, but not calls that failed because of many
	// calls (ratelimit.ErrContended, ratelimit.ErrOverloaded), or any after Close of the limiter. Defaults to false.
	FailOpen bool
	// InvalidKey is the code for a key that is missing, empty, or cannot be stored. Defaults to CodeInvalidArgument, for
	// keys that clients send; CodeUnauthenticated and CodeInternal may fit better.
	InvalidKey connect.Code
	// Domain is the domain in ErrorInfo: the name of your service. Defaults to "pgratelimit".
	Domain string
	// Logger receives failures that answers do not contain: the first of a kind, then lines at growing intervals of up to
	// a minute with the number of failures left out, and a line when calls are decided again. Defaults to slog.Default.
	Logger *slog.Logger
}

// Interceptor limits the calls that a server receives. Calls that a client makes pass through it. It is safe for
// concurrent use. Its answers:
//
//	refused              CodeResourceExhausted (429), with RetryInfo, QuotaFailure and ErrorInfo
//	no decision          CodeUnavailable (503), with RetryInfo (1 second) and ErrorInfo, unless Config.FailOpen allows it
//	cost above capacity  CodeInvalidArgument, with ErrorInfo; no RetryInfo, because waiting doesn't help
//	invalid cost         CodeInvalidArgument, with ErrorInfo
//	no key               Config.InvalidKey, with ErrorInfo: calls without a key never share a bucket
//	misuse               CodeInternal: no limits, or limits that contradict each other
//	ended meanwhile      CodeCanceled or CodeDeadlineExceeded, if the call's own context ended
//
// ErrorInfo has the reasons RATE_LIMITED, LIMIT_PAUSED, RATE_LIMIT_UNAVAILABLE, COST_EXCEEDS_CAPACITY, INVALID_COST and
// INVALID_KEY. With RetryInfo comes the header Retry-After in the Connect protocol, and the trailer
// grpc-retry-pushback-ms in the others. No answer has a key, a pause's reason, or a failure's text, which is logged. If
// a call ends without a decision, its tokens may be taken.
//
// The limiter's Observer receives an [event.Answered], with the method as route, for each call and each message with
// a cost. If your function answered with a code of its own, the result is bad_key for Requests and bad_cost for
// Message.
type Interceptor struct{ gate *rpclimit.Gate[Call] }

var _ connect.Interceptor = (*Interceptor)(nil)

// New returns an Interceptor that takes from limiter.
func New(limiter *ratelimit.Limiter, config Config) (*Interceptor, error) {
	gate, err := rpclimit.New(limiter, rpclimit.Config[Call]{
		Method: func(c Call) string { return c.Spec.Procedure }, HasCode: hasCode,
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

// PeerAddress returns the IP address of the call's peer, as a key. Of an IPv6 address it returns the /64, and of an
// IPv4 address mapped into IPv6 the IPv4 address. Behind a proxy it is the proxy's address: use HeaderValue with a
// value that the proxy sets and clients cannot. If a call has X-Forwarded-For or Forwarded, the interceptor logs that
// once. Its error has the code CodeInternal, for example on a Unix socket.
func (c Call) PeerAddress() (string, error) {
	if c.peerIsKey != nil {
		c.peerIsKey()
	}
	key, err := rpclimit.AddressKey(c.Peer.Addr)
	if err != nil {
		return "", connect.NewError(connect.CodeInternal, err)
	}
	return key, nil
}

// HeaderValue returns the one value of the call's header name, as a key: without spaces around it, and in Authorization
// "bearer x" is the key "Bearer x", so that a client has one bucket. If the value is absent, empty, or not the only
// one, the error wraps [ratelimit.ErrInvalidKey]. The interceptor answers it with Config.InvalidKey. Elsewhere it has
// the code CodeInvalidArgument.
func (c Call) HeaderValue(name string) (string, error) {
	key, err := rpclimit.OnlyValue("header", name, c.Header.Values(name))
	if err != nil {
		return "", connect.NewError(connect.CodeInvalidArgument, err)
	}
	return key, nil
}
