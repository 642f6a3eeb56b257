package grpclimit_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/pgratelimit/pgratelimit/grpclimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Package rpclimit decides, and tests that. These tests are about the translation for gRPC.

func TestRefusalSaysWhichLimitAndHowLong(t *testing.T) {
	t.Parallel()
	b := setup(t, grpclimit.Config{Domain: "echo.example", Requests: asking(perUser.For("17"), everybody.Global())})
	b.say = func(ctx context.Context, _ string) (string, error) {
		d, decided := grpclimit.FromContext(ctx)
		return fmt.Sprint(decided, d.Remaining), nil
	}
	for _, want := range []string{"true 1", "true 0"} {
		text, err := b.call(t.Context(), "hello")
		require.NoError(t, err)
		require.Equal(t, want, text)
	}
	b.clock.Advance(1500 * time.Microsecond)
	var trailer metadata.MD
	_, err := b.call(t.Context(), "hello", grpc.Trailer(&trailer))
	require.Equal(t, codes.ResourceExhausted, status.Code(err))
	require.Equal(t, "limited by perUser: retry after 29.999s", status.Convert(err).Message())
	require.Equal(t, 29998500*time.Microsecond, detail[*errdetails.RetryInfo](err).GetRetryDelay().AsDuration())
	require.Equal(t, []string{"29999"}, trailer.Get("grpc-retry-pushback-ms"), "never too early")

	info := detail[*errdetails.ErrorInfo](err)
	require.Equal(t, "RATE_LIMITED", info.GetReason())
	require.Equal(t, "echo.example", info.GetDomain())
	violations := detail[*errdetails.QuotaFailure](err).GetViolations()
	require.Len(t, violations, 1, "everybody had enough")
	require.Equal(t, "limit:perUser", violations[0].GetSubject())
	require.Equal(t, "perUser", violations[0].GetQuotaId())
	require.Equal(t, "perUser: 2 per minute", violations[0].GetDescription())
	require.EqualValues(t, 2, b.handled.Load(), "a refused call does not reach the handler")
}

// What no wait helps against is not answered with a wait, and an error with a code is the answer.
func TestAnswersWithoutAWait(t *testing.T) {
	t.Parallel()
	failing := func(err error) func(context.Context, string) ([]ratelimit.Request, error) {
		return func(context.Context, string) ([]ratelimit.Request, error) { return nil, err }
	}
	for name, c := range map[string]struct {
		config grpclimit.Config
		code   codes.Code
		reason string
	}{
		"TooCostly":        {grpclimit.Config{Requests: asking(perUser.For("17").Cost(3))}, codes.InvalidArgument, "COST_EXCEEDS_CAPACITY"},
		"KeyOfAnotherCode": {grpclimit.Config{InvalidKey: codes.Unauthenticated, Requests: asking(perUser.For(""))}, codes.Unauthenticated, "INVALID_KEY"},
		"Failing":          {grpclimit.Config{Requests: failing(errors.New("no session store"))}, codes.Internal, ""},
		"OwnCode":          {grpclimit.Config{Requests: failing(status.Error(codes.PermissionDenied, "sign in"))}, codes.PermissionDenied, ""},
		"OwnCodeOfTheMessage": {grpclimit.Config{Requests: asking(perUser.For("17")), Message: func(_ context.Context, _ string, message any) ([]ratelimit.Request, error) {
			return nil, status.Error(codes.OutOfRange, message.(*wrapperspb.StringValue).GetValue())
		}}, codes.OutOfRange, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t, c.config)
			var trailer metadata.MD
			_, err := b.call(t.Context(), "hello", grpc.Trailer(&trailer))
			require.Equal(t, c.code, status.Code(err), err)
			require.Equal(t, c.reason, detail[*errdetails.ErrorInfo](err).GetReason())
			require.Nil(t, detail[*errdetails.RetryInfo](err))
			require.Empty(t, trailer.Get("grpc-retry-pushback-ms"))
			require.Zero(t, b.handled.Load())
		})
	}
}

func TestStoreDownFailsClosed(t *testing.T) {
	t.Parallel()
	pool, err := pgxpool.New(t.Context(), "postgres://nobody@127.0.0.1:1/none")
	require.NoError(t, err)
	pool.Close()
	b := setupOn(t, pool, grpclimit.Config{RetryAfter: 2500 * time.Microsecond, Requests: asking(perUser.For("hunter2"))})
	var trailer metadata.MD
	_, err = b.call(t.Context(), "hello", grpc.Trailer(&trailer))
	require.Equal(t, codes.Unavailable, status.Code(err), err)
	require.Equal(t, "RATE_LIMIT_UNAVAILABLE", detail[*errdetails.ErrorInfo](err).GetReason())
	require.Equal(t, 2500*time.Microsecond, detail[*errdetails.RetryInfo](err).GetRetryDelay().AsDuration())
	require.Equal(t, []string{"3"}, trailer.Get("grpc-retry-pushback-ms"))
	require.Contains(t, b.logged.String(), "method="+say)
	require.NotContains(t, b.logged.String(), "hunter2")
	_, err = exchange(b.open(t))
	require.Equal(t, codes.Unavailable, status.Code(err))
	require.Zero(t, b.handled.Load())

	b = setupOn(t, pool, grpclimit.Config{FailOpen: true, Requests: asking(perUser.For("hunter2"))})
	text, err := b.call(t.Context(), "hello")
	require.NoError(t, err)
	require.Equal(t, "hello", text)
}

// A stock client with a retry policy waits as long as the server says, and is allowed then.
func TestRetryPolicyWaits(t *testing.T) {
	t.Parallel()
	const policy = `{"methodConfig": [{"name": [{"service": "test.Echo"}], "retryPolicy": {
		"maxAttempts": 2, "initialBackoff": "0.001s", "maxBackoff": "0.001s", "backoffMultiplier": 1,
		"retryableStatusCodes": ["RESOURCE_EXHAUSTED"]}}]}`
	const wait = 300 * time.Millisecond
	quick := ratelimit.Define("quick", ratelimit.TokenBucket{Rate: 1, Period: wait})

	var b *bundle
	var attempts []time.Time
	b = setup(t, grpclimit.Config{Requests: func(context.Context, string) ([]ratelimit.Request, error) {
		attempts = append(attempts, time.Now())
		if len(attempts) == 3 {
			b.clock.Advance(wait)
		}
		return []ratelimit.Request{quick.For("17")}, nil
	}}, grpc.WithDefaultServiceConfig(policy))
	for range 2 {
		_, err := b.call(t.Context(), "hello")
		require.NoError(t, err)
	}
	require.Len(t, attempts, 3, "the second call was refused once")
	require.GreaterOrEqual(t, attempts[2].Sub(attempts[1]), wait)
}

func TestStreamIsChargedWhenItOpens(t *testing.T) {
	t.Parallel()
	b := setup(t, grpclimit.Config{Requests: asking(perUser.For("17"))})
	for range 2 {
		stream := b.open(t)
		for range 5 {
			text, err := exchange(stream)
			require.NoError(t, err)
			require.Equal(t, "hello", text)
		}
		require.NoError(t, stream.CloseSend())
		require.ErrorIs(t, stream.RecvMsg(new(wrapperspb.StringValue)), io.EOF)
	}
	stream := b.open(t)
	_, err := exchange(stream)
	require.Equal(t, codes.ResourceExhausted, status.Code(err))
	require.NotNil(t, detail[*errdetails.RetryInfo](err))
	require.Equal(t, []string{"30000"}, stream.Trailer().Get("grpc-retry-pushback-ms"))
	require.EqualValues(t, 2, b.handled.Load())
}

// Messages are charged when they arrive. A handler that continues after a refusal receives nothing more, and a handler that wraps the
// refusal does not hide it.
func TestRefusedStreamStaysRefused(t *testing.T) {
	t.Parallel()
	b := setup(t, grpclimit.Config{
		Requests: asking(everybody.Global()),
		Message: func(_ context.Context, _ string, message any) ([]ratelimit.Request, error) {
			if message.(*wrapperspb.StringValue).GetValue() == "free" {
				return nil, nil
			}
			return []ratelimit.Request{perUser.For("17")}, nil
		},
	})
	received := make(chan string, 10)
	b.chat = func(stream grpc.ServerStream) error {
		if d, decided := grpclimit.FromContext(stream.Context()); !decided || d.Remaining != 99 {
			return status.Error(codes.Internal, "the decision is not in the context")
		}
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
	for _, text := range []string{"one", "free", "two", "three", "free", "free"} {
		require.NoError(t, stream.SendMsg(wrapperspb.String(text)))
	}
	err := stream.RecvMsg(new(wrapperspb.StringValue))
	require.Equal(t, codes.ResourceExhausted, status.Code(err))
	require.Equal(t, []string{"30000"}, stream.Trailer().Get("grpc-retry-pushback-ms"))
	require.Equal(t, []string{"one", "free", "two"}, []string{<-received, <-received, <-received})
	_, more := <-received
	require.False(t, more)
}

// TestSlotsAreHeldWhileTheHandlerRuns promises a slot for a call and for a stream until its handler has ended.
func TestSlotsAreHeldWhileTheHandlerRuns(t *testing.T) {
	t.Parallel()
	atOnce := ratelimit.Define("atOnce", ratelimit.Concurrency{Most: 1})
	b := setup(t, grpclimit.Config{Requests: asking(atOnce.For("17"))})
	inner := func(ctx context.Context) (string, error) {
		if _, held := ratelimit.LeaseFromContext(ctx); !held {
			return "", status.Error(codes.Internal, "nothing is held")
		}
		_, err := b.call(ctx, "inner")
		return status.Code(err).String(), err
	}
	b.say = func(ctx context.Context, _ string) (string, error) {
		text, _ := inner(ctx)
		return text, nil
	}
	b.chat = func(stream grpc.ServerStream) error {
		_, err := inner(stream.Context())
		return err
	}
	for range 2 {
		text, err := b.call(t.Context(), "outer")
		require.NoError(t, err)
		require.Equal(t, codes.ResourceExhausted.String(), text)
		_, err = exchange(b.open(t))
		require.Equal(t, codes.ResourceExhausted, status.Code(err))
		require.Eventually(t, func() bool { return b.left(t, atOnce.For("17")) == 1 }, deadline, time.Millisecond)
	}
}

func TestKeys(t *testing.T) {
	t.Parallel()
	byPeerAndToken := func(ctx context.Context, _ string) ([]ratelimit.Request, error) {
		token, err := grpclimit.Metadata(ctx, "X-Api-Key")
		if err != nil {
			return nil, err
		}
		address, err := grpclimit.PeerAddress(ctx)
		return []ratelimit.Request{perUser.For(token), perUser.For(address).Cost(0.5)}, err
	}
	b := setup(t, grpclimit.Config{Requests: byPeerAndToken, Skip: func(_ context.Context, method string) bool { return method == chat }})
	for _, wrong := range [][]string{nil, {"x-api-key", ""}, {"x-api-key", "a", "x-api-key", "b"}} {
		_, err := b.call(metadata.AppendToOutgoingContext(t.Context(), wrong...), "hello")
		require.Equal(t, codes.InvalidArgument, status.Code(err))
		require.ErrorContains(t, err, "X-Api-Key")
	}
	_, err := b.call(metadata.AppendToOutgoingContext(t.Context(), "x-api-key", "a"), "hello")
	require.NoError(t, err)
	require.Equal(t, 1.0, b.left(t, perUser.For("a")))
	require.Equal(t, 1.5, b.left(t, perUser.For("127.0.0.1")))
	_, err = exchange(b.open(t))
	require.NoError(t, err, "skipped")

	_, err = grpclimit.PeerAddress(t.Context())
	require.Equal(t, codes.Internal, status.Code(err), "no call")
	_, err = grpclimit.New(b.limiter, grpclimit.Config{})
	require.ErrorIs(t, err, grpclimit.ErrInvalidConfig)
}
