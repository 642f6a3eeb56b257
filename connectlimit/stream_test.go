package connectlimit_test

import (
	"context"
	"errors"
	"io"
	"testing"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/pgratelimit/pgratelimit/connectlimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

func TestStreamIsChargedWhenItOpens(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		options       []connect.ClientOption
		header, value string
	}{
		"Connect": {nil, "Retry-After", "30"},
		"gRPC":    {[]connect.ClientOption{connect.WithGRPC()}, "Grpc-Retry-Pushback-Ms", "30000"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t, connectlimit.Config{Requests: asking(perUser.For("17"))})
			for range 2 {
				stream := b.open(t, c.options...)
				for range 5 {
					answer, err := exchange(stream, "hello")
					require.NoError(t, err)
					require.Equal(t, "hello", answer)
				}
				require.NoError(t, stream.CloseRequest())
				_, err := stream.Receive()
				require.ErrorIs(t, err, io.EOF)
			}
			_, err := exchange(b.open(t, c.options...), "hello")
			require.Equal(t, connect.CodeResourceExhausted, connect.CodeOf(err))
			require.NotNil(t, detail[*errdetails.RetryInfo](t, err))
			require.Equal(t, c.value, asError(t, err).Meta().Get(c.header))
			require.EqualValues(t, 2, b.handled.Load())
		})
	}
}

// perMessage charges opening to everybody and each message to the user; "free" is free.
func perMessage() connectlimit.Config {
	return connectlimit.Config{
		Requests: asking(everybody.Global()),
		Message: func(_ context.Context, _ connectlimit.Call, message any) ([]ratelimit.Request, error) {
			switch message.(*text).GetValue() {
			case "free":
				return nil, nil
			case "bad":
				return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("bad message"))
			}
			return []ratelimit.Request{perUser.For("17")}, nil
		},
	}
}

func TestMessagesAreCharged(t *testing.T) {
	t.Parallel()
	b := setup(t, perMessage())
	stream := b.open(t)
	for _, said := range []string{"one", "free", "two", "free"} {
		answer, err := exchange(stream, said)
		require.NoError(t, err)
		require.Equal(t, said, answer)
	}
	_, err := exchange(stream, "three")
	require.Equal(t, connect.CodeResourceExhausted, connect.CodeOf(err))
	require.Equal(t, "limit:perUser", detail[*errdetails.QuotaFailure](t, err).GetViolations()[0].GetSubject())
	require.Equal(t, 99.0, b.left(t, everybody.Global()), "opened once")

	_, err = exchange(b.open(t), "bad")
	require.Equal(t, connect.CodeInvalidArgument, connect.CodeOf(err))
}

// A handler that goes on after a refusal receives nothing more.
func TestRefusedStreamStaysRefused(t *testing.T) {
	t.Parallel()
	b := setup(t, perMessage())
	send := func(said ...string) (string, error) {
		stream := b.client(upload).CallClientStream(t.Context())
		for _, s := range said {
			if err := stream.Send(wrapperspb.String(s)); err != nil {
				require.ErrorIs(t, err, io.EOF) // the server has answered
			}
		}
		response, err := stream.CloseAndReceive()
		if err != nil {
			return "", err
		}
		return response.Msg.GetValue(), nil
	}
	got, err := send("one", "free", "two")
	require.NoError(t, err)
	require.Equal(t, "onefreetwo", got)
	_, err = send("three", "free")
	require.Equal(t, connect.CodeResourceExhausted, connect.CodeOf(err), "though the last message was free")
}
