package connectlimit

import (
	"context"
	"errors"
	"net/http"

	"connectrpc.com/connect"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/pgratelimit/pgratelimit/middleware/internal/rpclimit"
)

// WrapUnary is for Connect.
func (i *Interceptor) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, request connect.AnyRequest) (connect.AnyResponse, error) {
		call := i.callOf(ctx, request.Spec(), request.Peer(), request.Header())
		if call.Spec.IsClient {
			return next(ctx, request)
		}
		admitted, release, err := i.gate.Unary(ctx, call, request.Any())
		if err != nil {
			return nil, errorOf(err, call.Peer.Protocol)
		}
		defer release()
		return next(admitted, request)
	}
}

func (i *Interceptor) callOf(ctx context.Context, spec connect.Spec, peer connect.Peer, header http.Header) Call {
	call := Call{Spec: spec, Peer: peer, Header: header}
	if len(header["X-Forwarded-For"]) > 0 || len(header["Forwarded"]) > 0 {
		call.peerIsKey = func() { i.gate.PeerIsKey(ctx, spec.Procedure) }
	}
	return call
}

// WrapStreamingClient is for Connect. It changes nothing.
func (i *Interceptor) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

// WrapStreamingHandler is for Connect. The stream is charged when it opens. A message that Config.Message
// charges for and that is refused fails the handler's Receive, and every one after it; return that error.
func (i *Interceptor) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) error {
		admitted, release, err := i.gate.Open(ctx, i.callOf(ctx, conn.Spec(), conn.Peer(), conn.RequestHeader()))
		if err != nil {
			return errorOf(err, conn.Peer().Protocol)
		}
		defer release()
		return next(admitted.Context, &limitedConn{conn, admitted})
	}
}

// limitedConn charges for the messages that it receives.
type limitedConn struct {
	connect.StreamingHandlerConn

	admitted *rpclimit.Stream[Call]
}

func (c *limitedConn) Receive(message any) error {
	return c.admitted.Receive(message, c.StreamingHandlerConn.Receive,
		func(err error) error { return errorOf(err, c.Peer().Protocol) })
}

// hasCode reports whether an error of the application's functions has a code.
func hasCode(err error) bool {
	_, ok := errors.AsType[*connect.Error](err)
	return ok
}

// errorOf returns the error for the client.
func errorOf(err error, protocol string) error {
	r, ok := errors.AsType[*rpclimit.RejectionError](err)
	if !ok {
		return err
	}
	answer := connect.NewError(connect.Code(r.Code), errors.New(r.Message))
	for _, d := range details(r) {
		if detail, failed := connect.NewErrorDetail(d); failed == nil { // otherwise the client gets the code alone
			answer.AddDetail(detail)
		}
	}
	switch {
	case r.RetryAfter <= 0:
	case protocol == connect.ProtocolConnect:
		answer.Meta().Set("Retry-After", r.RetryAfterSeconds())
	default:
		answer.Meta().Set(rpclimit.Pushback, r.PushbackMillis())
	}
	return answer
}

func details(r *rpclimit.RejectionError) (all []proto.Message) {
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
