package connectlimit_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/pgratelimit/pgratelimit/connectlimit"
	"github.com/pgratelimit/pgratelimit/internal/logtest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

// Package rpclimit decides, and its tests cover that. These tests cover the translation for Connect.

// deadline is the longest wait for an expected event. It only ends a test that hangs.
const deadline = 2 * time.Minute

const (
	say  = "/test.Echo/Say"
	chat = "/test.Echo/Chat"
)

var (
	perUser   = ratelimit.Define("perUser", ratelimit.TokenBucket{Rate: 2, Period: time.Minute})
	everybody = ratelimit.Define("everybody", ratelimit.PerHour(100))
)

// text is the message of the tests.
type text = wrapperspb.StringValue

// bundle is a server that echoes, with limits on a clock that stands still.
type bundle struct {
	limiter *ratelimit.Limiter
	server  *httptest.Server
	clock   *ratelimittest.Clock
	logged  *logtest.Journal
	// say takes the place of the answer when it is set.
	say func(ctx context.Context) (string, error)
}

func setup(t *testing.T, pool ratelimit.Pool, config connectlimit.Config) *bundle {
	t.Helper()
	b := &bundle{clock: ratelimittest.NewClock(), logged: &logtest.Journal{}}
	limiter, err := ratelimit.New(pool, ratelimit.Config{AsOf: b.clock.Now})
	require.NoError(t, err)
	b.limiter = limiter
	config.Timeout, config.Logger = deadline, slog.New(slog.NewTextHandler(b.logged, nil))
	limits, err := connectlimit.New(limiter, config)
	require.NoError(t, err)

	mux, with := http.NewServeMux(), connect.WithInterceptors(limits)
	mux.Handle(say, connect.NewUnaryHandler(say, func(ctx context.Context, request *connect.Request[text]) (*connect.Response[text], error) {
		if b.say == nil {
			return connect.NewResponse(request.Msg), nil
		}
		said, err := b.say(ctx)
		return connect.NewResponse(wrapperspb.String(said)), err
	}, with, connect.WithIdempotency(connect.IdempotencyNoSideEffects)))
	mux.Handle(chat, connect.NewBidiStreamHandler(chat, func(_ context.Context, stream *connect.BidiStream[text, text]) error {
		for {
			message, err := stream.Receive()
			if errors.Is(err, io.EOF) {
				return nil
			}
			if err != nil {
				return err
			}
			if err := stream.Send(message); err != nil {
				return err
			}
		}
	}, with))
	b.server = httptest.NewUnstartedServer(mux)
	b.server.EnableHTTP2 = true
	b.server.StartTLS()
	t.Cleanup(b.server.Close)
	return b
}

// call says hello to the server and returns its answer. Headers come in pairs.
func (b *bundle) call(ctx context.Context, options []connect.ClientOption, headers ...string) (string, error) {
	request := connect.NewRequest(wrapperspb.String("hello"))
	for i := 0; i < len(headers); i += 2 {
		request.Header().Add(headers[i], headers[i+1])
	}
	options = append(options, connect.WithIdempotency(connect.IdempotencyNoSideEffects))
	response, err := connect.NewClient[text, text](b.server.Client(), b.server.URL+say, options...).CallUnary(ctx, request)
	if err != nil {
		return "", err
	}
	return response.Msg.GetValue(), nil
}

// open begins a chat.
func (b *bundle) open(t *testing.T, options ...connect.ClientOption) *connect.BidiStreamForClient[text, text] {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), deadline)
	t.Cleanup(cancel)
	stream := connect.NewClient[text, text](b.server.Client(), b.server.URL+chat, options...).CallBidiStream(ctx)
	t.Cleanup(func() { _ = stream.CloseResponse() })
	return stream
}

// exchange sends "hello" and returns the answer.
func exchange(stream *connect.BidiStreamForClient[text, text]) (string, error) {
	if err := stream.Send(wrapperspb.String("hello")); err != nil && !errors.Is(err, io.EOF) {
		return "", err
	}
	message, err := stream.Receive()
	return message.GetValue(), err
}

// left returns how many tokens the bucket of request holds.
func (b *bundle) left(t *testing.T, request ratelimit.Request) float64 {
	t.Helper()
	value, err := b.limiter.Value(t.Context(), request)
	require.NoError(t, err)
	return value.Tokens
}

// asking returns a function that always returns the same requests.
func asking(requests ...ratelimit.Request) func(context.Context, connectlimit.Call) ([]ratelimit.Request, error) {
	return func(context.Context, connectlimit.Call) ([]ratelimit.Request, error) { return requests, nil }
}

// asError returns err as Connect's error.
func asError(t *testing.T, err error) *connect.Error {
	t.Helper()
	var found *connect.Error
	require.ErrorAs(t, err, &found)
	return found
}

// detail returns the detail of type T in err, or the zero T.
func detail[T any](t *testing.T, err error) (found T) {
	t.Helper()
	for _, d := range asError(t, err).Details() {
		value, err := d.Value()
		require.NoError(t, err)
		if value, ok := value.(T); ok {
			return value
		}
	}
	return found
}

// TestRefusals promises that a unary call is charged once and a stream when it opens, and that the refusal of both names the limit and
// the wait in each protocol.
func TestRefusals(t *testing.T) {
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
			b := setup(t, ratelimittest.NewDB(), connectlimit.Config{
				Domain: "echo.example", Requests: asking(perUser.For("17"), everybody.Global()),
			})
			b.say = func(ctx context.Context) (string, error) {
				d, decided := connectlimit.FromContext(ctx)
				return fmt.Sprint(decided, d.Remaining), nil
			}
			said, err := b.call(t.Context(), c.options)
			require.NoError(t, err)
			require.Equal(t, "true 1", said)
			stream := b.open(t, c.options...)
			for range 5 {
				said, err = exchange(stream)
				require.NoError(t, err)
				require.Equal(t, "hello", said)
			}
			b.clock.Advance(1500 * time.Microsecond)
			_, unary := b.call(t.Context(), c.options)
			_, streamed := exchange(b.open(t, c.options...))
			for _, err := range []error{unary, streamed} {
				require.Equal(t, connect.CodeResourceExhausted, connect.CodeOf(err))
				require.Equal(t, "limited by perUser: retry after 29.999s", asError(t, err).Message())
				require.Equal(t, 29998500*time.Microsecond, detail[*errdetails.RetryInfo](t, err).GetRetryDelay().AsDuration())
				require.Equal(t, c.value, asError(t, err).Meta().Get(c.header), "never too early")
				info := detail[*errdetails.ErrorInfo](t, err)
				require.Equal(t, "RATE_LIMITED of echo.example", info.GetReason()+" of "+info.GetDomain())
				violations := detail[*errdetails.QuotaFailure](t, err).GetViolations()
				require.Len(t, violations, 1, "everybody had enough")
				require.Equal(t, "limit:perUser", violations[0].GetSubject())
				require.Equal(t, "perUser", violations[0].GetQuotaId())
				require.Equal(t, "perUser: 2 per minute", violations[0].GetDescription())
			}
		})
	}
}

// TestAnswersWithoutAWait promises the code of an answer that no wait helps against, and that an error of the program keeps its code.
func TestAnswersWithoutAWait(t *testing.T) {
	t.Parallel()
	own := connect.NewError(connect.CodePermissionDenied, nil)
	for name, c := range map[string]struct {
		config connectlimit.Config
		code   connect.Code
		reason string
	}{
		"TooCostly":        {connectlimit.Config{Requests: asking(perUser.For("17").Cost(3))}, connect.CodeInvalidArgument, "COST_EXCEEDS_CAPACITY"},
		"KeyOfAnotherCode": {connectlimit.Config{InvalidKey: connect.CodeUnauthenticated, Requests: asking(perUser.For(""))}, connect.CodeUnauthenticated, "INVALID_KEY"},
		"OwnCode": {connectlimit.Config{Requests: func(context.Context, connectlimit.Call) ([]ratelimit.Request, error) {
			return nil, own
		}}, connect.CodePermissionDenied, ""},
		"OwnCodeOfTheMessage": {connectlimit.Config{Requests: asking(perUser.For("17")), Message: func(_ context.Context, _ connectlimit.Call, message any) ([]ratelimit.Request, error) {
			return nil, connect.NewError(connect.CodeOutOfRange, errors.New(message.(*text).GetValue()))
		}}, connect.CodeOutOfRange, ""},
	} {
		b := setup(t, ratelimittest.NewDB(), c.config)
		b.say = func(context.Context) (string, error) { t.Error("the handler ran"); return "", nil }
		_, err := b.call(t.Context(), nil)
		require.Equal(t, c.code, connect.CodeOf(err), name)
		require.Equal(t, c.reason, detail[*errdetails.ErrorInfo](t, err).GetReason(), name)
		require.Nil(t, detail[*errdetails.RetryInfo](t, err), name)
		require.Empty(t, asError(t, err).Meta().Get("Retry-After"), name)
	}
}

func TestStoreDownFailsClosed(t *testing.T) {
	t.Parallel()
	pool, err := pgxpool.New(t.Context(), "postgres://nobody@127.0.0.1:1/none")
	require.NoError(t, err)
	pool.Close()
	b := setup(t, pool, connectlimit.Config{RetryAfter: 2500 * time.Millisecond, Requests: asking(perUser.For("hunter2"))})
	b.say = func(context.Context) (string, error) { t.Error("the handler ran"); return "", nil }
	_, unary := b.call(t.Context(), nil)
	_, streamed := exchange(b.open(t))
	for _, err := range []error{unary, streamed} {
		require.Equal(t, connect.CodeUnavailable, connect.CodeOf(err), err)
		require.Equal(t, "RATE_LIMIT_UNAVAILABLE", detail[*errdetails.ErrorInfo](t, err).GetReason())
		require.Equal(t, 2500*time.Millisecond, detail[*errdetails.RetryInfo](t, err).GetRetryDelay().AsDuration())
		require.Equal(t, "3", asError(t, err).Meta().Get("Retry-After"))
	}
	require.Contains(t, b.logged.String(), "method="+say)
	require.NotContains(t, b.logged.String(), "hunter2")

	b = setup(t, pool, connectlimit.Config{FailOpen: true, Requests: asking(perUser.For("hunter2"))})
	_, err = b.call(t.Context(), nil)
	require.NoError(t, err)
}

// TestMessagesAreCharged promises that a message of a stream is charged when it arrives, and that a refused one ends the stream.
func TestMessagesAreCharged(t *testing.T) {
	t.Parallel()
	b := setup(t, ratelimittest.NewDB(), connectlimit.Config{
		Requests: asking(everybody.Global()),
		Message: func(_ context.Context, _ connectlimit.Call, message any) ([]ratelimit.Request, error) {
			return []ratelimit.Request{perUser.For(message.(*text).GetValue())}, nil
		},
	})
	stream := b.open(t)
	for range 2 {
		_, err := exchange(stream)
		require.NoError(t, err)
	}
	require.Equal(t, 99.0, b.left(t, everybody.Global()), "opened once")
	_, err := exchange(stream)
	require.Equal(t, connect.CodeResourceExhausted, connect.CodeOf(err))
	require.Equal(t, "30", asError(t, err).Meta().Get("Retry-After"))
}

// TestSlotsAreHeldWhileTheHandlerRuns promises a slot for a call and for a stream until its handler has ended.
func TestSlotsAreHeldWhileTheHandlerRuns(t *testing.T) {
	t.Parallel()
	atOnce := ratelimit.Define("atOnce", ratelimit.Concurrency{Most: 1})
	b := setup(t, ratelimittest.NewDB(), connectlimit.Config{Requests: asking(atOnce.For("17"))})
	b.say = func(ctx context.Context) (string, error) {
		_, held := ratelimit.LeaseFromContext(ctx)
		_, err := b.call(ctx, nil)
		return fmt.Sprint(held, connect.CodeOf(err)), nil
	}
	for range 2 {
		said, err := b.call(t.Context(), nil)
		require.NoError(t, err)
		require.Equal(t, "true resource_exhausted", said)
		stream := b.open(t)
		_, err = exchange(stream)
		require.NoError(t, err)
		_, err = b.call(t.Context(), nil)
		require.Equal(t, connect.CodeResourceExhausted, connect.CodeOf(err))
		require.NoError(t, stream.CloseRequest())
		require.Eventually(t, func() bool { return b.left(t, atOnce.For("17")) == 1 }, deadline, time.Millisecond)
	}
}

// TestClientsAreNotLimited promises that the interceptor of a server may be given to its clients too.
func TestClientsAreNotLimited(t *testing.T) {
	t.Parallel()
	b := setup(t, ratelimittest.NewDB(), connectlimit.Config{Requests: asking(everybody.Global())})
	limits, err := connectlimit.New(b.limiter, connectlimit.Config{Requests: asking(perUser.For("17"))})
	require.NoError(t, err)
	_, err = b.call(t.Context(), []connect.ClientOption{connect.WithInterceptors(limits)})
	require.NoError(t, err)
	_, err = exchange(b.open(t, connect.WithInterceptors(limits)))
	require.NoError(t, err)
	require.Equal(t, 2.0, b.left(t, perUser.For("17")))
}

func TestKeys(t *testing.T) {
	t.Parallel()
	b := setup(t, ratelimittest.NewDB(), connectlimit.Config{
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
	_, err := b.call(t.Context(), nil, "X-Api-Key", "a", "X-Api-Key", "b")
	require.Equal(t, connect.CodeInvalidArgument, connect.CodeOf(err))
	require.ErrorContains(t, err, "X-Api-Key")
	_, err = b.call(t.Context(), nil, "X-Api-Key", "a")
	require.NoError(t, err)
	require.Equal(t, 1.0, b.left(t, perUser.For("a")))
	require.Equal(t, 1.5, b.left(t, perUser.For("127.0.0.1")))
	_, err = b.call(t.Context(), nil, "X-Health", "1")
	require.NoError(t, err, "skipped")

	_, err = connectlimit.Call{}.PeerAddress()
	require.Equal(t, connect.CodeInternal, connect.CodeOf(err), "no call")
	_, err = connectlimit.New(b.limiter, connectlimit.Config{})
	require.ErrorIs(t, err, connectlimit.ErrInvalidConfig)
}
