package grpclimit_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/middleware/grpclimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

// Package rpclimit decides, and its tests cover that. These tests cover the translation for gRPC.

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

// bundle is a server that echoes, with limits on a clock that stands still, and a client.
type bundle struct {
	limiter *ratelimit.Limiter
	client  *grpc.ClientConn
	clock   *ratelimittest.Clock
	logged  *testkit.Journal
	// say and chat take the place of the handlers when they are set.
	say  func(ctx context.Context) (string, error)
	chat func(stream grpc.ServerStream) error
}

func (b *bundle) description() *grpc.ServiceDesc {
	return &grpc.ServiceDesc{
		ServiceName: "test.Echo",
		HandlerType: (*any)(nil),
		Methods: []grpc.MethodDesc{{MethodName: "Say", Handler: func(_ any, ctx context.Context, decode func(any) error, intercept grpc.UnaryServerInterceptor) (any, error) {
			in := new(wrapperspb.StringValue)
			if err := decode(in); err != nil {
				return nil, err
			}
			return intercept(ctx, in, &grpc.UnaryServerInfo{Server: b, FullMethod: say}, func(ctx context.Context, in any) (any, error) {
				if b.say == nil {
					return in, nil
				}
				said, err := b.say(ctx)
				return wrapperspb.String(said), err
			})
		}}},
		Streams: []grpc.StreamDesc{{StreamName: "Chat", ServerStreams: true, ClientStreams: true, Handler: func(_ any, stream grpc.ServerStream) error {
			if b.chat != nil {
				return b.chat(stream)
			}
			for {
				in := new(wrapperspb.StringValue)
				if err := stream.RecvMsg(in); err != nil {
					return err
				}
				if err := stream.SendMsg(in); err != nil {
					return err
				}
			}
		}}},
	}
}

func setup(t *testing.T, pool ratelimit.Pool, config grpclimit.Config) *bundle {
	t.Helper()
	b := &bundle{clock: ratelimittest.NewClock(), logged: &testkit.Journal{}}
	limiter, err := ratelimit.New(pool, ratelimit.Config{AsOf: b.clock.Now})
	require.NoError(t, err)
	b.limiter = limiter
	config.Timeout, config.Logger = deadline, slog.New(slog.NewTextHandler(b.logged, nil))
	limits, err := grpclimit.New(limiter, config)
	require.NoError(t, err)

	server := grpc.NewServer(grpc.ChainUnaryInterceptor(limits.Unary), grpc.ChainStreamInterceptor(limits.Stream))
	server.RegisterService(b.description(), b)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	b.client, err = grpc.NewClient(listener.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, b.client.Close())
		server.Stop()
		require.NoError(t, <-served)
	})
	return b
}

// call says hello to the server and returns its answer.
func (b *bundle) call(ctx context.Context, options ...grpc.CallOption) (string, error) {
	out := new(wrapperspb.StringValue)
	err := b.client.Invoke(ctx, say, wrapperspb.String("hello"), out, options...)
	return out.GetValue(), err
}

// open begins a chat.
func (b *bundle) open(t *testing.T) grpc.ClientStream {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), deadline)
	t.Cleanup(cancel)
	stream, err := b.client.NewStream(ctx, &grpc.StreamDesc{StreamName: "Chat", ServerStreams: true, ClientStreams: true}, chat)
	require.NoError(t, err)
	return stream
}

// exchange sends "hello" and returns the answer.
func exchange(stream grpc.ClientStream) (string, error) {
	if err := stream.SendMsg(wrapperspb.String("hello")); err != nil && !errors.Is(err, io.EOF) {
		return "", err
	}
	out := new(wrapperspb.StringValue)
	err := stream.RecvMsg(out)
	return out.GetValue(), err
}

// left returns how many tokens the bucket of request holds.
func (b *bundle) left(t *testing.T, request ratelimit.Request) float64 {
	t.Helper()
	value, err := b.limiter.Value(t.Context(), request)
	require.NoError(t, err)
	return value.Tokens
}

// asking returns a function that always returns the same requests.
func asking(requests ...ratelimit.Request) func(context.Context, string) ([]ratelimit.Request, error) {
	return func(context.Context, string) ([]ratelimit.Request, error) { return requests, nil }
}

// answer returns the code of an error, its details, and the message of one with a wait.
func answer(err error) string {
	all := []string{status.Code(err).String()}
	for _, d := range status.Convert(err).Details() {
		switch d := d.(type) {
		case *errdetails.ErrorInfo:
			all = append(all, d.GetReason()+" of "+d.GetDomain())
		case *errdetails.RetryInfo:
			all = append(all, "in "+d.GetRetryDelay().AsDuration().String(), status.Convert(err).Message())
		case *errdetails.QuotaFailure:
			for _, v := range d.GetViolations() {
				all = append(all, v.GetSubject(), v.GetQuotaId(), v.GetDescription())
			}
		}
	}
	return strings.Join(all, ", ")
}

// TestAnswers promises the code and the details of the answer to a call and to a stream, and that an error of the
// program keeps its code. Only an allowed call arrives at the handler.
func TestAnswers(t *testing.T) {
	t.Parallel()
	down, err := pgxpool.New(t.Context(), "postgres://nobody@127.0.0.1:1/none")
	require.NoError(t, err)
	down.Close()
	memory, ada := ratelimit.Pool(ratelimittest.NewDB()), asking(perUser.For("hunter2"))
	const refused = "ResourceExhausted, RATE_LIMITED of echo.example, in 29.9985s, limited by perUser: retry after 29.999s, " +
		"limit:perUser, perUser, perUser: 2 per minute"
	refuses := grpclimit.Config{Domain: "echo.example", Requests: asking(perUser.For("hunter2"), everybody.Global())}
	noKey := grpclimit.Config{InvalidKey: codes.Unauthenticated, Requests: asking(perUser.For(""))}
	own := func(context.Context, string) ([]ratelimit.Request, error) {
		return nil, status.Error(codes.PermissionDenied, "sign in")
	}
	ofMessage := func(_ context.Context, _ string, message any) ([]ratelimit.Request, error) {
		return nil, status.Error(codes.OutOfRange, message.(*wrapperspb.StringValue).GetValue())
	}
	for _, c := range []struct {
		pool     ratelimit.Pool
		config   grpclimit.Config
		want     string
		pushback []string // never too early
	}{
		{memory, refuses, refused, []string{"29999"}},
		{
			down,
			grpclimit.Config{Requests: ada},
			"Unavailable, RATE_LIMIT_UNAVAILABLE of pgratelimit, in 1s, the limits of this call could not be asked",
			[]string{"1000"},
		},
		{down, grpclimit.Config{FailOpen: true, Requests: ada}, "OK", nil},
		{memory, grpclimit.Config{Requests: asking(perUser.For("17").Cost(3))}, "InvalidArgument, COST_EXCEEDS_CAPACITY of pgratelimit", nil},
		{memory, noKey, "Unauthenticated, INVALID_KEY of pgratelimit", nil},
		{memory, grpclimit.Config{Requests: own}, "PermissionDenied", nil},
		{memory, grpclimit.Config{Requests: asking(everybody.Global()), Message: ofMessage}, "OutOfRange", nil},
	} {
		b, ran := setup(t, c.pool, c.config), false
		b.say = func(context.Context) (string, error) { ran = true; return "", nil }
		if c.pool == memory {
			require.NoError(t, b.limiter.Reset(t.Context(), perUser.For("hunter2")))
			require.NoError(t, b.limiter.Charge(t.Context(), perUser.For("hunter2").Cost(2)))
		}
		b.clock.Advance(1500 * time.Microsecond)
		var trailer metadata.MD
		_, err := b.call(t.Context(), grpc.Trailer(&trailer))
		require.Equal(t, c.want, answer(err))
		require.Equal(t, c.pushback, trailer.Get("grpc-retry-pushback-ms"), c.want)
		require.Equal(t, c.want == "OK", ran)
		stream := b.open(t)
		_, err = exchange(stream)
		require.Equal(t, c.want, answer(err))
		require.Equal(t, c.pushback, stream.Trailer().Get("grpc-retry-pushback-ms"), c.want)
		require.Equal(t, c.pool == down, strings.Contains(b.logged.String(), "route="+say), c.want)
		require.NotContains(t, b.logged.String(), "hunter2")
	}
}

// TestMessagesAreCharged promises that a message of a stream is charged when it arrives, that a refused one ends the
// stream, and that a handler which wraps the refusal does not hide it.
func TestMessagesAreCharged(t *testing.T) {
	t.Parallel()
	b := setup(t, ratelimittest.NewDB(), grpclimit.Config{
		Requests: asking(everybody.Global()),
		Message: func(_ context.Context, _ string, message any) ([]ratelimit.Request, error) {
			return []ratelimit.Request{perUser.For(message.(*wrapperspb.StringValue).GetValue())}, nil
		},
	})
	received := make(chan float64, 1) // the remaining tokens of the decision on the stream
	b.chat = func(stream grpc.ServerStream) error {
		d, _ := grpclimit.FromContext(stream.Context())
		received <- d.Remaining
		for {
			if err := stream.RecvMsg(new(wrapperspb.StringValue)); err != nil {
				return fmt.Errorf("receive: %w", err)
			}
		}
	}
	stream := b.open(t)
	for range 3 {
		require.NoError(t, stream.SendMsg(wrapperspb.String("17")))
	}
	err := stream.RecvMsg(new(wrapperspb.StringValue))
	require.Equal(t, codes.ResourceExhausted, status.Code(err))
	require.Equal(t, []string{"30000"}, stream.Trailer().Get("grpc-retry-pushback-ms"))
	require.Equal(t, 99.0, <-received)
}

// TestSlotsAreHeldWhileTheHandlerRuns promises a slot for a call and for a stream until its handler has ended.
func TestSlotsAreHeldWhileTheHandlerRuns(t *testing.T) {
	t.Parallel()
	atOnce := ratelimit.Define("atOnce", ratelimit.Concurrency{Slots: 1})
	b := setup(t, ratelimittest.NewDB(), grpclimit.Config{Requests: asking(atOnce.For("17"))})
	inner := func(ctx context.Context) string {
		_, held := ratelimit.LeaseFromContext(ctx)
		_, err := b.call(ctx)
		return fmt.Sprint(held, status.Code(err))
	}
	b.say = func(ctx context.Context) (string, error) { return inner(ctx), nil }
	b.chat = func(stream grpc.ServerStream) error {
		if err := stream.RecvMsg(new(wrapperspb.StringValue)); err != nil {
			return err
		}
		return stream.SendMsg(wrapperspb.String(inner(stream.Context())))
	}
	for range 2 {
		said, err := b.call(t.Context())
		require.NoError(t, err)
		require.Equal(t, "true ResourceExhausted", said)
		said, err = exchange(b.open(t))
		require.NoError(t, err)
		require.Equal(t, "true ResourceExhausted", said)
		require.Eventually(t, func() bool { return b.left(t, atOnce.For("17")) == 1 }, deadline, time.Millisecond)
	}
}

func TestKeys(t *testing.T) {
	t.Parallel()
	b := setup(t, ratelimittest.NewDB(), grpclimit.Config{
		Requests: func(ctx context.Context, _ string) ([]ratelimit.Request, error) {
			token, err := grpclimit.Metadata(ctx, "X-Api-Key")
			if err != nil {
				return nil, err
			}
			address, err := grpclimit.PeerAddress(ctx)
			return []ratelimit.Request{perUser.For(token), perUser.For(address).Cost(0.5)}, err
		},
		Skip: func(_ context.Context, method string) bool { return method == chat },
	})
	b.say = func(ctx context.Context) (string, error) {
		d, decided := grpclimit.FromContext(ctx)
		return fmt.Sprint(decided, d.Remaining), nil
	}
	_, err := b.call(metadata.AppendToOutgoingContext(t.Context(), "x-api-key", "a", "x-api-key", "b"))
	require.Equal(t, codes.InvalidArgument, status.Code(err))
	require.ErrorContains(t, err, "X-Api-Key")
	require.NotEmpty(t, status.Convert(err).Details(), "ErrorInfo")
	said, err := b.call(metadata.AppendToOutgoingContext(t.Context(), "x-api-key", "a"))
	require.NoError(t, err)
	require.Equal(t, "true 1", said)
	require.Equal(t, 1.0, b.left(t, perUser.For("a")))
	require.Equal(t, 1.5, b.left(t, perUser.For("127.0.0.1")))
	told := func() int { return strings.Count(b.logged.String(), "has the key of its peer") }
	require.Zero(t, told())
	for _, name := range []string{"x-forwarded-for", "forwarded"} {
		_, err = b.call(metadata.AppendToOutgoingContext(t.Context(), "x-api-key", name, name, "203.0.113.7"))
		require.NoError(t, err)
		require.Equal(t, 1, told(), "a proxy is in front")
	}
	_, err = exchange(b.open(t))
	require.NoError(t, err, "skipped")

	_, err = grpclimit.PeerAddress(t.Context())
	require.Equal(t, codes.Internal, status.Code(err), "no call")
	_, err = grpclimit.New(b.limiter, grpclimit.Config{})
	require.ErrorIs(t, err, grpclimit.ErrInvalidConfig)
}
