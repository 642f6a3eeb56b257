package connectlimit_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/middleware/connectlimit"
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
	logged  *testkit.Journal
	// say takes the place of the answer when it is set.
	say func(ctx context.Context) (string, error)
}

func setup(t *testing.T, pool ratelimit.Pool, config connectlimit.Config) *bundle {
	t.Helper()
	b := &bundle{clock: ratelimittest.NewClock(), logged: &testkit.Journal{}}
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

// answer returns the code of an error, its details, and the message of one with a wait.
func answer(t *testing.T, err error) string {
	t.Helper()
	if err == nil {
		return "ok"
	}
	all := []string{connect.CodeOf(err).String()}
	for _, d := range asError(t, err).Details() {
		value, fails := d.Value()
		require.NoError(t, fails)
		switch d := value.(type) {
		case *errdetails.ErrorInfo:
			all = append(all, d.GetReason()+" of "+d.GetDomain())
		case *errdetails.RetryInfo:
			all = append(all, "in "+d.GetRetryDelay().AsDuration().String(), asError(t, err).Message())
		case *errdetails.QuotaFailure:
			for _, v := range d.GetViolations() {
				all = append(all, v.GetSubject(), v.GetQuotaId(), v.GetDescription())
			}
		}
	}
	return strings.Join(all, ", ")
}

// TestAnswers promises the code and the details of the answer to a call and to a stream, a refusal in each protocol,
// and that an error of the program keeps its code. Only an allowed call arrives at the handler.
func TestAnswers(t *testing.T) {
	t.Parallel()
	down, err := pgxpool.New(t.Context(), "postgres://nobody@127.0.0.1:1/none")
	require.NoError(t, err)
	down.Close()
	memory, ada := ratelimit.Pool(ratelimittest.NewDB()), asking(perUser.For("hunter2"))
	own := func(context.Context, connectlimit.Call) ([]ratelimit.Request, error) {
		return nil, connect.NewError(connect.CodePermissionDenied, nil)
	}
	refusesMessage := func(_ context.Context, _ connectlimit.Call, message any) ([]ratelimit.Request, error) {
		return nil, connect.NewError(connect.CodeOutOfRange, errors.New(message.(*text).GetValue()))
	}
	ofMessage := connectlimit.Config{Requests: asking(everybody.Global()), Message: refusesMessage}
	costly := connectlimit.Config{Requests: asking(perUser.For("17").Cost(3))}
	noKey := connectlimit.Config{InvalidKey: connect.CodeUnauthenticated, Requests: asking(perUser.For(""))}
	plain := connect.WithClientOptions()
	const wait, pushback = "Retry-After", "Grpc-Retry-Pushback-Ms"
	const refused = "resource_exhausted, RATE_LIMITED of echo.example, in 29.9985s, limited by perUser: retry after 29.999s, " +
		"limit:perUser, perUser, perUser: 2 per minute"
	refuses := connectlimit.Config{Domain: "echo.example", Requests: asking(perUser.For("hunter2"), everybody.Global())}
	for _, c := range []struct {
		pool          ratelimit.Pool
		config        connectlimit.Config
		want          string
		header, value string // never too early
		protocol      connect.ClientOption
	}{
		{memory, refuses, refused, wait, "30", plain},
		{memory, refuses, refused, wait, "30", connect.WithHTTPGet()},
		{memory, refuses, refused, wait, "30", connect.WithProtoJSON()},
		{memory, refuses, refused, pushback, "29999", connect.WithGRPC()},
		{memory, refuses, refused, pushback, "29999", connect.WithGRPCWeb()},
		{
			down,
			connectlimit.Config{Requests: ada},
			"unavailable, RATE_LIMIT_UNAVAILABLE of pgratelimit, in 1s, the limits of this call could not be asked", wait, "1", plain,
		},
		{down, connectlimit.Config{FailOpen: true, Requests: ada}, "ok", wait, "", plain},
		{memory, costly, "invalid_argument, COST_EXCEEDS_CAPACITY of pgratelimit", wait, "", plain},
		{memory, noKey, "unauthenticated, INVALID_KEY of pgratelimit", wait, "", plain},
		{memory, connectlimit.Config{Requests: own}, "permission_denied", wait, "", plain},
		{memory, ofMessage, "out_of_range", wait, "", plain},
	} {
		b, ran := setup(t, c.pool, c.config), false
		b.say = func(context.Context) (string, error) { ran = true; return "", nil }
		if c.pool == memory {
			require.NoError(t, b.limiter.Reset(t.Context(), perUser.For("hunter2")))
			require.NoError(t, b.limiter.Charge(t.Context(), perUser.For("hunter2").Cost(2)))
		}
		b.clock.Advance(1500 * time.Microsecond)
		_, unary := b.call(t.Context(), []connect.ClientOption{c.protocol})
		require.Equal(t, c.want == "ok", ran)
		_, streamed := exchange(b.open(t, c.protocol))
		for _, err := range []error{unary, streamed} {
			require.Equal(t, c.want, answer(t, err))
			if err != nil {
				require.Equal(t, c.value, asError(t, err).Meta().Get(c.header), c.want)
			}
		}
		require.Equal(t, c.pool == down, strings.Contains(b.logged.String(), "route="+say), c.want)
		require.NotContains(t, b.logged.String(), "hunter2")
	}
}

// TestSlotsAreHeldWhileTheHandlerRuns promises a slot for a call and for a stream until its handler has ended.
func TestSlotsAreHeldWhileTheHandlerRuns(t *testing.T) {
	t.Parallel()
	atOnce := ratelimit.Define("atOnce", ratelimit.Concurrency{Slots: 1})
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
	said, err := exchange(b.open(t, connect.WithInterceptors(limits)))
	require.NoError(t, err)
	require.Equal(t, "hello", said)
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
	b.say = func(ctx context.Context) (string, error) {
		d, decided := connectlimit.FromContext(ctx)
		return fmt.Sprint(decided, d.Remaining), nil
	}
	_, err := b.call(t.Context(), nil, "X-Api-Key", "a", "X-Api-Key", "b")
	require.Equal(t, connect.CodeInvalidArgument, connect.CodeOf(err))
	require.ErrorContains(t, err, "X-Api-Key")
	require.NotEmpty(t, asError(t, err).Details(), "ErrorInfo")
	said, err := b.call(t.Context(), nil, "X-Api-Key", "a")
	require.NoError(t, err)
	require.Equal(t, "true 1", said)
	require.Equal(t, 1.0, b.left(t, perUser.For("a")))
	require.Equal(t, 1.5, b.left(t, perUser.For("127.0.0.1")))
	told := func() int { return strings.Count(b.logged.String(), "has the key of its peer") }
	require.Zero(t, told())
	for _, name := range []string{"X-Forwarded-For", "Forwarded"} {
		_, err = b.call(t.Context(), nil, "X-Api-Key", name, name, "203.0.113.7")
		require.NoError(t, err)
		require.Equal(t, 1, told(), "a proxy is in front")
	}
	_, err = b.call(t.Context(), nil, "X-Health", "1")
	require.NoError(t, err, "skipped")

	_, err = connectlimit.Call{}.PeerAddress()
	require.Equal(t, connect.CodeInternal, connect.CodeOf(err), "no call")
	_, err = connectlimit.New(b.limiter, connectlimit.Config{})
	require.ErrorIs(t, err, connectlimit.ErrInvalidConfig)
}
