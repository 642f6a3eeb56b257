package connectlimit_test

import (
	"cmp"
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/pgratelimit/pgratelimit/connectlimit"
	"github.com/pgratelimit/pgratelimit/internal/logtest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

// deadline is the longest wait for an expected event. It only ends a test that hangs.
const deadline = 2 * time.Minute

const (
	say    = "/test.Echo/Say"
	chat   = "/test.Echo/Chat"
	upload = "/test.Echo/Upload"
)

var (
	perUser   = ratelimit.Define("perUser", ratelimit.TokenBucket{Rate: 2, Period: time.Minute})
	everybody = ratelimit.Define("everybody", ratelimit.PerHour(100))
)

// text is the message of the tests.
type text = wrapperspb.StringValue

// bundle is a server that echoes, with limits in memory.
type bundle struct {
	limiter *ratelimit.Limiter
	server  *httptest.Server
	clock   *ratelimittest.Clock
	handled atomic.Int64
	logged  *logtest.Journal
	// say takes the place of the answer when it is set.
	say func(ctx context.Context, said string) (string, error)
}

func setup(t *testing.T, config connectlimit.Config) *bundle {
	t.Helper()
	return setupOn(t, ratelimittest.NewDB(), config)
}

// setupOn is setup on another pool.
func setupOn(t *testing.T, pool ratelimit.Pool, config connectlimit.Config) *bundle {
	t.Helper()
	b := &bundle{clock: ratelimittest.NewClock(), logged: &logtest.Journal{}}
	limiter, err := ratelimit.New(pool, ratelimit.Config{AsOf: b.clock.Now})
	require.NoError(t, err)
	b.limiter = limiter
	config.Timeout = cmp.Or(config.Timeout, deadline) // the default is short for a machine that runs all tests
	config.Logger = slog.New(slog.NewTextHandler(b.logged, nil))
	limits, err := connectlimit.New(limiter, config)
	require.NoError(t, err)

	mux, with := http.NewServeMux(), connect.WithInterceptors(limits)
	mux.Handle(say, connect.NewUnaryHandler(say, b.handleSay, with, connect.WithIdempotency(connect.IdempotencyNoSideEffects)))
	mux.Handle(chat, connect.NewBidiStreamHandler(chat, b.handleChat, with))
	mux.Handle(upload, connect.NewClientStreamHandler(upload, b.handleUpload, with))
	b.server = httptest.NewUnstartedServer(mux)
	b.server.EnableHTTP2 = true
	b.server.StartTLS()
	t.Cleanup(b.server.Close)
	return b
}

func (b *bundle) handleSay(ctx context.Context, request *connect.Request[text]) (*connect.Response[text], error) {
	b.handled.Add(1)
	said := request.Msg.GetValue()
	if b.say != nil {
		var err error
		if said, err = b.say(ctx, said); err != nil {
			return nil, err
		}
	}
	return connect.NewResponse(wrapperspb.String(said)), nil
}

func (b *bundle) handleChat(_ context.Context, stream *connect.BidiStream[text, text]) error {
	b.handled.Add(1)
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
}

// handleUpload wrongly continues to receive after an error, and answers with the messages it received.
func (b *bundle) handleUpload(_ context.Context, stream *connect.ClientStream[text]) (*connect.Response[text], error) {
	b.handled.Add(1)
	var got string
	var message text
	var err error
	for range 10 {
		if err = stream.Conn().Receive(&message); err == nil {
			got += message.GetValue()
		}
	}
	if !errors.Is(err, io.EOF) {
		return nil, err
	}
	return connect.NewResponse(wrapperspb.String(got)), nil
}

// client returns a client of one procedure. Its options choose the protocol.
func (b *bundle) client(procedure string, options ...connect.ClientOption) *connect.Client[text, text] {
	return connect.NewClient[text, text](b.server.Client(), b.server.URL+procedure, options...)
}

// call says something to the server and returns its answer. Headers come in pairs.
func (b *bundle) call(ctx context.Context, said string, headers ...string) (string, error) {
	request := connect.NewRequest(wrapperspb.String(said))
	for i := 0; i < len(headers); i += 2 {
		request.Header().Add(headers[i], headers[i+1])
	}
	response, err := b.client(say).CallUnary(ctx, request)
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
	stream := b.client(chat, options...).CallBidiStream(ctx)
	t.Cleanup(func() { _ = stream.CloseResponse() })
	return stream
}

// exchange sends "hello" and returns what comes back.
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

// asking returns a function that always asks for requests.
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

// detail returns the detail of type T in err, or nothing.
func detail[T any](t *testing.T, err error) T {
	t.Helper()
	for _, d := range asError(t, err).Details() {
		value, err := d.Value()
		require.NoError(t, err)
		if found, ok := value.(T); ok {
			return found
		}
	}
	var none T
	return none
}
