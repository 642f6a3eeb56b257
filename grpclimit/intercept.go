package grpclimit

import (
	"context"
	"errors"
	"slices"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/pgratelimit/pgratelimit/internal/rpclimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Unary is a grpc.UnaryServerInterceptor.
func (i *Interceptor) Unary(ctx context.Context, message any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
	if i.config.Skip != nil && i.config.Skip(ctx, info.FullMethod) {
		return handle(ctx, message)
	}
	requests, err := i.requests(ctx, info.FullMethod)
	if err != nil {
		return nil, err
	}
	more, err := i.message(ctx, info.FullMethod, message)
	if err != nil {
		return nil, err
	}
	admitted, release, err := i.admit(ctx, info.FullMethod, slices.Concat(requests, more), func(trailer metadata.MD) {
		_ = grpc.SetTrailer(ctx, trailer) // fails outside a server only, where nobody reads it
	})
	if err != nil {
		return nil, err
	}
	defer release()
	return handle(admitted, message)
}

// Stream is a grpc.StreamServerInterceptor. The stream is charged when it opens. A message that Config.Message
// charges for and that is refused fails the handler's RecvMsg, and every one after it; return that error.
func (i *Interceptor) Stream(server any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
	ctx := stream.Context()
	if i.config.Skip != nil && i.config.Skip(ctx, info.FullMethod) {
		return handle(server, stream)
	}
	requests, err := i.requests(ctx, info.FullMethod)
	if err != nil {
		return err
	}
	admitted, release, err := i.admit(ctx, info.FullMethod, requests, stream.SetTrailer)
	if err != nil {
		return err
	}
	defer release()
	return handle(server, &limitedStream{ServerStream: stream, ctx: admitted, interceptor: i, method: info.FullMethod})
}

// limitedStream charges for the messages it receives.
type limitedStream struct {
	grpc.ServerStream

	ctx         context.Context //nolint:containedctx // it is how a stream passes its context on
	interceptor *Interceptor
	method      string
	refused     error
}

func (s *limitedStream) Context() context.Context { return s.ctx }

func (s *limitedStream) RecvMsg(message any) error {
	if s.refused != nil {
		return s.refused
	}
	if err := s.ServerStream.RecvMsg(message); err != nil {
		return err
	}
	requests, err := s.interceptor.message(s.ctx, s.method, message)
	if err == nil && len(requests) > 0 {
		err = rejected(s.interceptor.gate.AdmitMessage(s.ctx, s.method, requests), s.SetTrailer)
	}
	s.refused = err
	return err
}

// requests returns what a call asks for, and an error for its client when that cannot be said.
func (i *Interceptor) requests(ctx context.Context, method string) ([]ratelimit.Request, error) {
	requests, err := i.config.Requests(ctx, method)
	if err == nil && len(requests) == 0 {
		err = errors.New("Config.Requests returned none; use Config.Skip for calls that are not limited")
	}
	return requests, i.coded(ctx, method, err)
}

// message returns what a message asks for.
func (i *Interceptor) message(ctx context.Context, method string, message any) ([]ratelimit.Request, error) {
	if i.config.Message == nil {
		return nil, nil
	}
	requests, err := i.config.Message(ctx, method, message)
	return requests, i.coded(ctx, method, err)
}

// coded returns an error of the application's for the client: as it is when it has a code.
func (i *Interceptor) coded(ctx context.Context, method string, err error) error {
	if err == nil {
		return nil
	}
	if s, ok := status.FromError(err); ok && s.Code() != codes.OK {
		return err
	}
	return statusOf(i.gate.Misnamed(ctx, method, err))
}

// admit takes what is asked for and returns the context with the decision, and what releases the slots that the call
// holds; or an error for the client.
func (i *Interceptor) admit(
	ctx context.Context, method string, requests []ratelimit.Request, setTrailer func(metadata.MD),
) (admitted context.Context, release func(), _ error) {
	admitted, release, rejection := i.gate.Admit(ctx, method, requests)
	return admitted, release, rejected(rejection, setTrailer)
}

// rejected returns the error for the client of a rejection, and nil when there is none.
func rejected(rejection *rpclimit.Rejection, setTrailer func(metadata.MD)) error {
	if rejection == nil {
		return nil
	}
	if rejection.RetryAfter > 0 {
		setTrailer(metadata.Pairs(rpclimit.Pushback, rejection.PushbackMillis()))
	}
	return statusOf(rejection)
}

func statusOf(r *rpclimit.Rejection) error {
	s := status.New(codes.Code(r.Code), r.Message)
	if detailed, err := s.WithDetails(details(r)...); err == nil { // otherwise the client gets the code alone
		s = detailed
	}
	return s.Err()
}

// details returns the standard details of a rejection.
func details(r *rpclimit.Rejection) (all []protoadapt.MessageV1) {
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
