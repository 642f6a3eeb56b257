package grpclimit_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/pgratelimit/pgratelimit/grpclimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

func TestStreamIsChargedWhenItOpens(t *testing.T) {
	t.Parallel()
	b := setup(t, grpclimit.Config{Requests: asking(perUser.For("17"))})
	for range 2 {
		stream := b.open(t)
		for range 5 {
			text, err := exchange(stream, "hello")
			require.NoError(t, err)
			require.Equal(t, "hello", text)
		}
		require.NoError(t, stream.CloseSend())
		require.ErrorIs(t, stream.RecvMsg(new(wrapperspb.StringValue)), io.EOF)
	}
	stream := b.open(t)
	_, err := exchange(stream, "hello")
	require.Equal(t, codes.ResourceExhausted, status.Code(err))
	require.NotNil(t, detail[*errdetails.RetryInfo](err))
	require.Equal(t, []string{"30000"}, stream.Trailer().Get("grpc-retry-pushback-ms"))
	require.EqualValues(t, 2, b.handled.Load())
}

// perMessage charges opening to everybody and each message to the user; "free" is free.
func perMessage() grpclimit.Config {
	return grpclimit.Config{
		Requests: asking(everybody.Global()),
		Message: func(_ context.Context, _ string, message any) ([]ratelimit.Request, error) {
			switch message.(*wrapperspb.StringValue).GetValue() {
			case "free":
				return nil, nil
			case "bad":
				return nil, status.Error(codes.InvalidArgument, "bad message")
			}
			return []ratelimit.Request{perUser.For("17")}, nil
		},
	}
}

func TestMessagesAreCharged(t *testing.T) {
	t.Parallel()
	b := setup(t, perMessage())
	stream := b.open(t)
	for _, text := range []string{"one", "free", "two", "free"} {
		answer, err := exchange(stream, text)
		require.NoError(t, err)
		require.Equal(t, text, answer)
	}
	_, err := exchange(stream, "three")
	require.Equal(t, codes.ResourceExhausted, status.Code(err))
	require.Equal(t, "limit:perUser", detail[*errdetails.QuotaFailure](err).GetViolations()[0].GetSubject())
	require.Equal(t, []string{"30000"}, stream.Trailer().Get("grpc-retry-pushback-ms"))
	require.Equal(t, 99.0, b.left(t, everybody.Global()), "opened once")

	_, err = exchange(b.open(t), "bad")
	require.Equal(t, codes.InvalidArgument, status.Code(err))
}

// A handler that continues after a refusal receives nothing more, and a handler that wraps the refusal does not hide it.
func TestRefusedStreamStaysRefused(t *testing.T) {
	t.Parallel()
	b := setup(t, perMessage())
	received := make(chan string, 10)
	b.chat = func(stream grpc.ServerStream) error {
		d, decided := grpclimit.FromContext(stream.Context())
		require.True(t, decided)
		require.Equal(t, 99.0, d.Remaining)
		var refusals []error
		for len(refusals) < 3 {
			in := new(wrapperspb.StringValue)
			if err := stream.RecvMsg(in); err != nil {
				refusals = append(refusals, err)
				continue
			}
			received <- in.GetValue()
		}
		close(received)
		return fmt.Errorf("after %w", errors.Join(refusals...))
	}
	stream := b.open(t)
	for _, text := range []string{"one", "two", "three", "free", "free"} {
		require.NoError(t, stream.SendMsg(wrapperspb.String(text)))
	}
	require.Equal(t, codes.ResourceExhausted, status.Code(stream.RecvMsg(new(wrapperspb.StringValue))))
	require.Equal(t, []string{"one", "two"}, []string{<-received, <-received})
	_, more := <-received
	require.False(t, more)
}
