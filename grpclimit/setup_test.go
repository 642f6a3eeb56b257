package grpclimit_test

import (
	"cmp"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/pgratelimit/pgratelimit/grpclimit"
	"github.com/pgratelimit/pgratelimit/internal/logtest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

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

// echo is a service that answers with the text of the request.
type echo struct {
	handled atomic.Int64
	// say and chat take the place of the answers when they are set.
	say  func(ctx context.Context, text string) (string, error)
	chat func(stream grpc.ServerStream) error
}

func (e *echo) description() *grpc.ServiceDesc {
	return &grpc.ServiceDesc{
		ServiceName: "test.Echo",
		HandlerType: (*any)(nil),
		Methods: []grpc.MethodDesc{{MethodName: "Say", Handler: func(_ any, ctx context.Context, decode func(any) error, intercept grpc.UnaryServerInterceptor) (any, error) {
			in := new(wrapperspb.StringValue)
			if err := decode(in); err != nil {
				return nil, err
			}
			return intercept(ctx, in, &grpc.UnaryServerInfo{Server: e, FullMethod: say}, func(ctx context.Context, in any) (any, error) {
				e.handled.Add(1)
				text := in.(*wrapperspb.StringValue).GetValue()
				if e.say == nil {
					return wrapperspb.String(text), nil
				}
				text, err := e.say(ctx, text)
				return wrapperspb.String(text), err
			})
		}}},
		Streams: []grpc.StreamDesc{{StreamName: "Chat", ServerStreams: true, ClientStreams: true, Handler: func(_ any, stream grpc.ServerStream) error {
			e.handled.Add(1)
			if e.chat != nil {
				return e.chat(stream)
			}
			for {
				in := new(wrapperspb.StringValue)
				if err := stream.RecvMsg(in); errors.Is(err, io.EOF) {
					return nil
				} else if err != nil {
					return err
				}
				if err := stream.SendMsg(in); err != nil {
					return err
				}
			}
		}}},
	}
}

// bundle is a server with limits in memory, and a client.
type bundle struct {
	*echo

	limiter *ratelimit.Limiter
	client  *grpc.ClientConn
	clock   *ratelimittest.Clock
	logged  *logtest.Journal
}

func setup(t *testing.T, config grpclimit.Config, options ...grpc.DialOption) *bundle {
	t.Helper()
	return setupOn(t, ratelimittest.NewDB(), config, options...)
}

// setupOn is setup on another pool.
func setupOn(t *testing.T, pool ratelimit.Pool, config grpclimit.Config, options ...grpc.DialOption) *bundle {
	t.Helper()
	b := &bundle{echo: &echo{}, clock: ratelimittest.NewClock(), logged: &logtest.Journal{}}
	limiter, err := ratelimit.New(pool, ratelimit.Config{AsOf: b.clock.Now})
	require.NoError(t, err)
	b.limiter = limiter
	config.Timeout = cmp.Or(config.Timeout, deadline) // the default is short for a machine that runs all tests
	config.Logger = slog.New(slog.NewTextHandler(b.logged, nil))
	limits, err := grpclimit.New(limiter, config)
	require.NoError(t, err)

	server := grpc.NewServer(grpc.ChainUnaryInterceptor(limits.Unary), grpc.ChainStreamInterceptor(limits.Stream))
	server.RegisterService(b.description(), b.echo)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	b.client, err = grpc.NewClient(listener.Addr().String(), append(options, grpc.WithTransportCredentials(insecure.NewCredentials()))...)
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, b.client.Close())
		server.Stop()
		require.NoError(t, <-served)
	})
	return b
}

// call says text to the server and returns its answer.
func (b *bundle) call(ctx context.Context, text string, options ...grpc.CallOption) (string, error) {
	out := new(wrapperspb.StringValue)
	err := b.client.Invoke(ctx, say, wrapperspb.String(text), out, options...)
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

// exchange sends "hello" and returns what comes back.
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

// asking returns a function that always asks for requests.
func asking(requests ...ratelimit.Request) func(context.Context, string) ([]ratelimit.Request, error) {
	return func(context.Context, string) ([]ratelimit.Request, error) { return requests, nil }
}

// detail returns the detail of type T in err, or nothing.
func detail[T any](err error) T {
	for _, d := range status.Convert(err).Details() {
		if found, ok := d.(T); ok {
			return found
		}
	}
	var none T
	return none
}
