package grpclimit

import (
	"context"
	"errors"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/pgratelimit/pgratelimit/middleware/internal/rpclimit"
)

// Unary is a grpc.UnaryServerInterceptor.
func (i *Interceptor) Unary(ctx context.Context, message any, info *grpc.UnaryServerInfo,
	handle grpc.UnaryHandler,
) (any, error) {
	admitted, release, err := i.gate.Unary(i.watched(ctx, info.FullMethod), info.FullMethod, message)
	if err != nil {
		return nil, statusOf(err, func(trailer metadata.MD) {
			_ = grpc.SetTrailer(ctx, trailer) // it fails only outside of a server, without a reader
		})
	}
	defer release()
	return handle(admitted, message)
}

// Stream is a grpc.StreamServerInterceptor. The stream is charged when it opens. If a message with a cost is refused,
// the handler's RecvMsg fails, and each later call of it too; return that error.
func (i *Interceptor) Stream(server any, stream grpc.ServerStream, info *grpc.StreamServerInfo,
	handle grpc.StreamHandler,
) error {
	admitted, release, err := i.gate.Open(i.watched(stream.Context(), info.FullMethod), info.FullMethod)
	if err != nil {
		return statusOf(err, stream.SetTrailer)
	}
	defer release()
	return handle(server, &limitedStream{stream, admitted})
}

// limitedStream charges for the messages that it receives.
type limitedStream struct {
	grpc.ServerStream

	admitted *rpclimit.Stream[string]
}

func (s *limitedStream) Context() context.Context { return s.admitted.Context }

func (s *limitedStream) RecvMsg(message any) error {
	return s.admitted.Receive(message, s.ServerStream.RecvMsg,
		func(err error) error { return statusOf(err, s.SetTrailer) })
}

// hasCode reports whether an error of the application's functions has a code.
func hasCode(err error) bool {
	s, ok := status.FromError(err)
	return ok && s.Code() != codes.OK
}

// statusOf returns the error for the client, and sets the trailer of a rejection.
func statusOf(err error, setTrailer func(metadata.MD)) error {
	r, ok := errors.AsType[*rpclimit.RejectionError](err)
	if !ok {
		return err
	}
	if r.RetryAfter > 0 {
		setTrailer(metadata.Pairs(rpclimit.Pushback, r.PushbackMillis()))
	}
	s := status.New(codes.Code(r.Code), r.Message)
	if detailed, err := s.WithDetails(details(r)...); err == nil { // otherwise the client gets the code alone
		s = detailed
	}
	return s.Err()
}

func details(r *rpclimit.RejectionError) (all []protoadapt.MessageV1) {
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
