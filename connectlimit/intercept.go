package connectlimit

import (
	"context"
	"errors"
	"slices"

	"connectrpc.com/connect"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/pgratelimit/pgratelimit/internal/rpclimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// WrapUnary is for Connect.
func (i *Interceptor) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, request connect.AnyRequest) (connect.AnyResponse, error) {
		call := Call{Spec: request.Spec(), Peer: request.Peer(), Header: request.Header()}
		if call.Spec.IsClient || i.skips(ctx, call) {
			return next(ctx, request)
		}
		requests, err := i.requests(ctx, call)
		if err != nil {
			return nil, err
		}
		more, err := i.message(ctx, call, request.Any())
		if err != nil {
			return nil, err
		}
		admitted, release, rejection := i.gate.Admit(ctx, call.Spec.Procedure, slices.Concat(requests, more))
		if rejection != nil {
			return nil, errorOf(rejection, call.Peer.Protocol)
		}
		defer release()
		return next(admitted, request)
	}
}

// WrapStreamingClient is for Connect. It changes nothing.
func (i *Interceptor) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

// WrapStreamingHandler is for Connect. The stream is charged when it opens. A message that Config.Message
// charges for and that is refused fails the handler's Receive, and every one after it; return that error.
func (i *Interceptor) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) error {
		call := Call{Spec: conn.Spec(), Peer: conn.Peer(), Header: conn.RequestHeader()}
		if i.skips(ctx, call) {
			return next(ctx, conn)
		}
		requests, err := i.requests(ctx, call)
		if err != nil {
			return err
		}
		admitted, release, rejection := i.gate.Admit(ctx, call.Spec.Procedure, requests)
		if rejection != nil {
			return errorOf(rejection, call.Peer.Protocol)
		}
		defer release()
		return next(admitted, &limitedConn{StreamingHandlerConn: conn, ctx: admitted, interceptor: i, call: call})
	}
}

// limitedConn charges for the messages it receives.
type limitedConn struct {
	connect.StreamingHandlerConn

	ctx         context.Context //nolint:containedctx // Receive is given none
	interceptor *Interceptor
	call        Call
	refused     error
}

func (c *limitedConn) Receive(message any) error {
	if c.refused != nil {
		return c.refused
	}
	if err := c.StreamingHandlerConn.Receive(message); err != nil {
		return err
	}
	requests, err := c.interceptor.message(c.ctx, c.call, message)
	if err == nil && len(requests) > 0 {
		if rejection := c.interceptor.gate.AdmitMessage(c.ctx, c.call.Spec.Procedure, requests); rejection != nil {
			err = errorOf(rejection, c.call.Peer.Protocol)
		}
	}
	c.refused = err
	return err
}

func (i *Interceptor) skips(ctx context.Context, call Call) bool {
	return i.config.Skip != nil && i.config.Skip(ctx, call)
}

// requests returns what a call asks for, and an error for its client when that cannot be said.
func (i *Interceptor) requests(ctx context.Context, call Call) ([]ratelimit.Request, error) {
	requests, err := i.config.Requests(ctx, call)
	if err == nil && len(requests) == 0 {
		err = errors.New("Config.Requests returned none; use Config.Skip for calls that are not limited")
	}
	return requests, i.coded(ctx, call, err)
}

// message returns what a message asks for.
func (i *Interceptor) message(ctx context.Context, call Call, message any) ([]ratelimit.Request, error) {
	if i.config.Message == nil {
		return nil, nil
	}
	requests, err := i.config.Message(ctx, call, message)
	return requests, i.coded(ctx, call, err)
}

// coded returns an error of the application's for the client: as it is when it has a code.
func (i *Interceptor) coded(ctx context.Context, call Call, err error) error {
	var coded *connect.Error
	if err == nil || errors.As(err, &coded) {
		return err
	}
	return errorOf(i.gate.Misnamed(ctx, call.Spec.Procedure, err), call.Peer.Protocol)
}

func errorOf(r *rpclimit.Rejection, protocol string) error {
	err := connect.NewError(connect.Code(r.Code), errors.New(r.Message))
	for _, d := range details(r) {
		if detail, failed := connect.NewErrorDetail(d); failed == nil { // otherwise the client gets the code alone
			err.AddDetail(detail)
		}
	}
	switch {
	case r.RetryAfter <= 0:
	case protocol == connect.ProtocolConnect:
		err.Meta().Set("Retry-After", r.RetryAfterSeconds())
	default:
		err.Meta().Set(rpclimit.Pushback, r.PushbackMillis())
	}
	return err
}

// details returns the standard details of a rejection.
func details(r *rpclimit.Rejection) (all []proto.Message) {
	if r.Reason != "" {
		all = append(all, &errdetails.ErrorInfo{Reason: r.Reason, Domain: r.Domain})
	}
	if r.RetryAfter > 0 {
		all = append(all, &errdetails.RetryInfo{RetryDelay: durationpb.New(r.RetryAfter)})
	}
	if len(r.Violations) > 0 {
		quota := &errdetails.QuotaFailure{}
		for _, v := range r.Violations {
			quota.Violations = append(quota.Violations, &errdetails.QuotaFailure_Violation{
				Subject: "limit:" + v.Limit, Description: v.Description, QuotaId: v.Limit,
			})
		}
		all = append(all, quota)
	}
	return all
}
