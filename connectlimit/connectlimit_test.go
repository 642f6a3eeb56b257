package connectlimit_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/pgratelimit/pgratelimit/connectlimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Package rpclimit decides, and tests that. These tests are about the translation for Connect.

func TestRefusalSaysWhichLimitAndHowLong(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		options       []connect.ClientOption
		header, value string
	}{
		"Connect":      {nil, "Retry-After", "30"},
		"Connect GET":  {[]connect.ClientOption{connect.WithHTTPGet()}, "Retry-After", "30"},
		"Connect JSON": {[]connect.ClientOption{connect.WithProtoJSON()}, "Retry-After", "30"},
		"gRPC":         {[]connect.ClientOption{connect.WithGRPC()}, "Grpc-Retry-Pushback-Ms", "29999"},
		"gRPC-Web":     {[]connect.ClientOption{connect.WithGRPCWeb()}, "Grpc-Retry-Pushback-Ms", "29999"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t, connectlimit.Config{Domain: "echo.example", Requests: asking(perUser.For("17"), everybody.Global())})
			b.say = func(ctx context.Context, _ string) (string, error) {
				d, decided := connectlimit.FromContext(ctx)
				return fmt.Sprint(decided, d.Remaining), nil
			}
			client := b.client(say, append(c.options, connect.WithIdempotency(connect.IdempotencyNoSideEffects))...)
			for _, want := range []string{"true 1", "true 0"} {
				response, err := client.CallUnary(t.Context(), connect.NewRequest(wrapperspb.String("hello")))
				require.NoError(t, err)
				require.Equal(t, want, response.Msg.GetValue())
			}
			b.clock.Advance(1500 * time.Microsecond)
			_, err := client.CallUnary(t.Context(), connect.NewRequest(wrapperspb.String("hello")))
			require.Equal(t, connect.CodeResourceExhausted, connect.CodeOf(err))
			require.Equal(t, "limited by perUser: retry after 29.999s", asError(t, err).Message())
			require.Equal(t, 29998500*time.Microsecond, detail[*errdetails.RetryInfo](t, err).GetRetryDelay().AsDuration())
			require.Equal(t, c.value, asError(t, err).Meta().Get(c.header), "never too early")

			info := detail[*errdetails.ErrorInfo](t, err)
			require.Equal(t, "RATE_LIMITED", info.GetReason())
			require.Equal(t, "echo.example", info.GetDomain())
			violations := detail[*errdetails.QuotaFailure](t, err).GetViolations()
			require.Len(t, violations, 1, "everybody had enough")
			require.Equal(t, "limit:perUser", violations[0].GetSubject())
			require.Equal(t, "perUser", violations[0].GetQuotaId())
			require.Equal(t, "perUser: 2 per minute", violations[0].GetDescription())
			require.EqualValues(t, 2, b.handled.Load(), "a refused call does not reach the handler")
		})
	}
}

// A client that speaks plain HTTP gets an HTTP status.
func TestStatusOverHTTP(t *testing.T) {
	t.Parallel()
	b := setup(t, connectlimit.Config{Requests: asking(perUser.For("17").Cost(2))})
	for _, want := range []int{http.StatusOK, http.StatusTooManyRequests} {
		request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, b.server.URL+say, strings.NewReader(`"hello"`))
		require.NoError(t, err)
		request.Header.Set("Content-Type", "application/json")
		response, err := b.server.Client().Do(request)
		require.NoError(t, err)
		require.NoError(t, response.Body.Close())
		require.Equal(t, want, response.StatusCode)
		if want == http.StatusTooManyRequests {
			require.Equal(t, "60", response.Header.Get("Retry-After"))
		}
	}
}

// What no wait helps against is not answered with a wait, and an error with a code is the answer.
func TestAnswersWithoutAWait(t *testing.T) {
	t.Parallel()
	failing := func(err error) func(context.Context, connectlimit.Call) ([]ratelimit.Request, error) {
		return func(context.Context, connectlimit.Call) ([]ratelimit.Request, error) { return nil, err }
	}
	for name, c := range map[string]struct {
		config connectlimit.Config
		code   connect.Code
		reason string
	}{
		"TooCostly":        {connectlimit.Config{Requests: asking(perUser.For("17").Cost(3))}, connect.CodeInvalidArgument, "COST_EXCEEDS_CAPACITY"},
		"KeyOfAnotherCode": {connectlimit.Config{InvalidKey: connect.CodeUnauthenticated, Requests: asking(perUser.For(""))}, connect.CodeUnauthenticated, "INVALID_KEY"},
		"Failing":          {connectlimit.Config{Requests: failing(errors.New("no sessions"))}, connect.CodeInternal, ""},
		"OwnCode":          {connectlimit.Config{Requests: failing(connect.NewError(connect.CodePermissionDenied, nil))}, connect.CodePermissionDenied, ""},
		"OwnCodeOfTheMessage": {connectlimit.Config{Requests: asking(perUser.For("17")), Message: func(_ context.Context, _ connectlimit.Call, message any) ([]ratelimit.Request, error) {
			return nil, connect.NewError(connect.CodeOutOfRange, errors.New(message.(*text).GetValue()))
		}}, connect.CodeOutOfRange, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t, c.config)
			_, err := b.call(t.Context(), "hello")
			require.Equal(t, c.code, connect.CodeOf(err), err)
			require.Equal(t, c.reason, detail[*errdetails.ErrorInfo](t, err).GetReason())
			require.Nil(t, detail[*errdetails.RetryInfo](t, err))
			require.Empty(t, asError(t, err).Meta().Get("Retry-After"))
			require.Zero(t, b.handled.Load())
		})
	}
}

func TestStoreDownFailsClosed(t *testing.T) {
	t.Parallel()
	pool, err := pgxpool.New(t.Context(), "postgres://nobody@127.0.0.1:1/none")
	require.NoError(t, err)
	pool.Close()
	b := setupOn(t, pool, connectlimit.Config{RetryAfter: 2500 * time.Millisecond, Requests: asking(perUser.For("hunter2"))})
	_, err = b.call(t.Context(), "hello")
	_, ofStream := exchange(b.open(t))
	for _, err := range []error{err, ofStream} {
		require.Equal(t, connect.CodeUnavailable, connect.CodeOf(err), err)
		require.Equal(t, "RATE_LIMIT_UNAVAILABLE", detail[*errdetails.ErrorInfo](t, err).GetReason())
		require.Equal(t, 2500*time.Millisecond, detail[*errdetails.RetryInfo](t, err).GetRetryDelay().AsDuration())
		require.Equal(t, "3", asError(t, err).Meta().Get("Retry-After"))
	}
	require.Contains(t, b.logged.String(), "method="+say)
	require.NotContains(t, b.logged.String(), "hunter2")
	require.Zero(t, b.handled.Load())

	b = setupOn(t, pool, connectlimit.Config{FailOpen: true, Requests: asking(perUser.For("hunter2"))})
	answer, err := b.call(t.Context(), "hello")
	require.NoError(t, err)
	require.Equal(t, "hello", answer)
}

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
					answer, err := exchange(stream)
					require.NoError(t, err)
					require.Equal(t, "hello", answer)
				}
				require.NoError(t, stream.CloseRequest())
				_, err := stream.Receive()
				require.ErrorIs(t, err, io.EOF)
			}
			_, err := exchange(b.open(t, c.options...))
			require.Equal(t, connect.CodeResourceExhausted, connect.CodeOf(err))
			require.NotNil(t, detail[*errdetails.RetryInfo](t, err))
			require.Equal(t, c.value, asError(t, err).Meta().Get(c.header))
			require.EqualValues(t, 2, b.handled.Load())
		})
	}
}

// Messages are charged when they arrive. A handler that goes on after a refusal receives nothing more.
func TestRefusedStreamStaysRefused(t *testing.T) {
	t.Parallel()
	b := setup(t, connectlimit.Config{
		Requests: asking(everybody.Global()),
		Message: func(_ context.Context, _ connectlimit.Call, message any) ([]ratelimit.Request, error) {
			if message.(*text).GetValue() == "free" {
				return nil, nil
			}
			return []ratelimit.Request{perUser.For("17")}, nil
		},
	})
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
	require.Equal(t, 99.0, b.left(t, everybody.Global()), "opened once")
	_, err = send("three", "free")
	require.Equal(t, connect.CodeResourceExhausted, connect.CodeOf(err), "though the last message was free")
	require.Equal(t, "30", asError(t, err).Meta().Get("Retry-After"))
}

// TestSlotsAreHeldWhileTheHandlerRuns promises a slot for a call and for a stream until its handler has ended.
func TestSlotsAreHeldWhileTheHandlerRuns(t *testing.T) {
	t.Parallel()
	atOnce := ratelimit.Define("atOnce", ratelimit.Concurrency{Most: 1})
	b := setup(t, connectlimit.Config{Requests: asking(atOnce.For("17"))})
	b.say = func(ctx context.Context, said string) (string, error) {
		if _, held := ratelimit.LeaseFromContext(ctx); !held || said != "outer" {
			return "", connect.NewError(connect.CodeInternal, nil)
		}
		_, err := b.call(ctx, "inner")
		return connect.CodeOf(err).String(), nil
	}
	for range 2 {
		said, err := b.call(t.Context(), "outer")
		require.NoError(t, err)
		require.Equal(t, connect.CodeResourceExhausted.String(), said)
		stream := b.open(t)
		_, err = exchange(stream)
		require.NoError(t, err)
		_, err = b.call(t.Context(), "beside")
		require.Equal(t, connect.CodeResourceExhausted, connect.CodeOf(err))
		require.NoError(t, stream.CloseRequest())
		require.Eventually(t, func() bool { return b.left(t, atOnce.For("17")) == 1 }, deadline, time.Millisecond)
	}
}

// The interceptor of a server may be given to its clients too.
func TestClientsAreNotLimited(t *testing.T) {
	t.Parallel()
	b := setup(t, connectlimit.Config{Requests: asking(everybody.Global())})
	limits, err := connectlimit.New(b.limiter, connectlimit.Config{Requests: asking(perUser.For("17").Cost(2))})
	require.NoError(t, err)
	client := b.client(say, connect.WithInterceptors(limits))
	for range 2 {
		_, err := client.CallUnary(t.Context(), connect.NewRequest(wrapperspb.String("hello")))
		require.NoError(t, err)
	}
	_, err = exchange(b.open(t, connect.WithInterceptors(limits)))
	require.NoError(t, err)
	require.Equal(t, 2.0, b.left(t, perUser.For("17")))
}

func TestKeys(t *testing.T) {
	t.Parallel()
	b := setup(t, connectlimit.Config{
		Requests: func(_ context.Context, call connectlimit.Call) ([]ratelimit.Request, error) {
			token, err := call.HeaderValue("X-Api-Key")
			if err != nil {
				return nil, err
			}
			address, err := call.PeerAddress()
			return []ratelimit.Request{perUser.For(token), perUser.For(address).Cost(0.5)}, err
		},
		Skip: func(_ context.Context, call connectlimit.Call) bool { return call.Header.Get("X-Health") != "" },
	})
	for _, wrong := range [][]string{nil, {"X-Api-Key", ""}, {"X-Api-Key", "a", "X-Api-Key", "b"}} {
		_, err := b.call(t.Context(), "hello", wrong...)
		require.Equal(t, connect.CodeInvalidArgument, connect.CodeOf(err))
		require.ErrorContains(t, err, "X-Api-Key")
	}
	_, err := b.call(t.Context(), "hello", "X-Api-Key", "a")
	require.NoError(t, err)
	require.Equal(t, 1.0, b.left(t, perUser.For("a")))
	require.Equal(t, 1.5, b.left(t, perUser.For("127.0.0.1")))
	_, err = b.call(t.Context(), "hello", "X-Health", "1")
	require.NoError(t, err, "skipped")

	_, err = connectlimit.Call{}.PeerAddress()
	require.Equal(t, connect.CodeInternal, connect.CodeOf(err), "no call")
	_, err = connectlimit.New(b.limiter, connectlimit.Config{})
	require.ErrorIs(t, err, connectlimit.ErrInvalidConfig)
}
