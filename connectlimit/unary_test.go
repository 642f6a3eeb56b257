package connectlimit_test

import (
	"context"
	"errors"
	"math"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/pgratelimit/pgratelimit/connectlimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

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
			client := b.client(say, append(c.options, connect.WithIdempotency(connect.IdempotencyNoSideEffects))...)
			for range 2 {
				_, err := client.CallUnary(t.Context(), connect.NewRequest(wrapperspb.String("hello")))
				require.NoError(t, err)
			}
			b.now.Add(int64(1500 * time.Microsecond))
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

			require.EqualValues(t, 2, b.handled.Load(), "a refused call does not reach the handler")
			require.InDelta(t, 98, b.left(t, everybody.Global()), 0.001, "nor does it take from the limit that had enough")
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

func TestExactlyAsManyAsTheLimitAllows(t *testing.T) {
	t.Parallel()
	b := setup(t, connectlimit.Config{Requests: asking(perUser.For("17"), everybody.Global())})
	var calls sync.WaitGroup
	for range 40 {
		calls.Go(func() {
			if _, err := b.call(t.Context(), "hello"); err != nil && connect.CodeOf(err) != connect.CodeResourceExhausted {
				t.Error(err)
			}
		})
	}
	calls.Wait()
	require.EqualValues(t, 2, b.handled.Load())
	require.Equal(t, 98.0, b.left(t, everybody.Global()))
}

func TestDecisionIsInTheContext(t *testing.T) {
	t.Parallel()
	b := setup(t, connectlimit.Config{Requests: asking(perUser.For("17"))})
	b.say = func(ctx context.Context, _ string) (string, error) {
		d, ok := connectlimit.FromContext(ctx)
		return strconv.FormatFloat(d.Remaining, 'g', -1, 64) + " " + strconv.FormatBool(ok), b.limiter.Credit(ctx, perUser.For("17"))
	}
	for range 5 { // the handler returns its tokens
		answer, err := b.call(t.Context(), "hello")
		require.NoError(t, err)
		require.Equal(t, "1 true", answer)
	}
}

func TestSkip(t *testing.T) {
	t.Parallel()
	b := setup(t, connectlimit.Config{
		Requests: asking(perUser.For("17").Cost(2)),
		Skip:     func(_ context.Context, call connectlimit.Call) bool { return call.Header.Get("X-Health") != "" },
	})
	for range 3 {
		_, err := b.call(t.Context(), "hello", "X-Health", "1")
		require.NoError(t, err)
	}
	require.Equal(t, 2.0, b.left(t, perUser.For("17")))
}

func TestMessageAddsToTheSameDecision(t *testing.T) {
	t.Parallel()
	b := setup(t, connectlimit.Config{
		Requests: asking(perUser.For("17")),
		Message: func(_ context.Context, _ connectlimit.Call, message any) ([]ratelimit.Request, error) {
			return []ratelimit.Request{everybody.Global().Cost(float64(len(message.(*text).GetValue())))}, nil
		},
	})
	_, err := b.call(t.Context(), "0123456789")
	require.NoError(t, err)
	require.Equal(t, 90.0, b.left(t, everybody.Global()))
	_, err = b.call(t.Context(), strings.Repeat("x", 91))
	require.Equal(t, connect.CodeResourceExhausted, connect.CodeOf(err))
	require.Equal(t, 1.0, b.left(t, perUser.For("17")), "all or nothing")
}

// What no wait helps against is not answered with a wait, and what the application did wrong is not told.
func TestCallsThatCannotBeDecided(t *testing.T) {
	t.Parallel()
	const secret = "hunter2"
	for name, c := range map[string]struct {
		config connectlimit.Config
		code   connect.Code
		reason string
		logged string
	}{
		"cost above capacity": {
			connectlimit.Config{Requests: asking(perUser.For(secret).Cost(3))},
			connect.CodeInvalidArgument, "COST_EXCEEDS_CAPACITY", "",
		},
		"cost is no number": {
			connectlimit.Config{Requests: asking(perUser.For(secret).Cost(math.NaN()))},
			connect.CodeInvalidArgument, "INVALID_COST", "",
		},
		"empty key": {connectlimit.Config{Requests: asking(everybody.Global(), perUser.For(""))}, connect.CodeInvalidArgument, "INVALID_KEY", ""},
		"key of another code": {
			connectlimit.Config{InvalidKey: connect.CodeUnauthenticated, Requests: asking(perUser.For(""))},
			connect.CodeUnauthenticated, "INVALID_KEY", "",
		},
		"no limits": {connectlimit.Config{FailOpen: true, Requests: asking()}, connect.CodeInternal, "", "Config.Skip"},
		"failing": {
			connectlimit.Config{Requests: func(context.Context, connectlimit.Call) ([]ratelimit.Request, error) {
				return nil, errors.New("no sessions")
			}},
			connect.CodeInternal, "", "no sessions",
		},
		"with a code of its own": {
			connectlimit.Config{Requests: func(context.Context, connectlimit.Call) ([]ratelimit.Request, error) {
				return nil, connect.NewError(connect.CodeUnauthenticated, errors.New("sign in"))
			}},
			connect.CodeUnauthenticated, "", "",
		},
		"failing on the message": {
			connectlimit.Config{Requests: asking(perUser.For(secret)), Message: func(context.Context, connectlimit.Call, any) ([]ratelimit.Request, error) {
				return nil, connect.NewError(connect.CodeOutOfRange, errors.New("too long"))
			}},
			connect.CodeOutOfRange, "", "",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t, c.config)
			_, err := b.call(t.Context(), "hello")
			require.Equal(t, c.code, connect.CodeOf(err), err)
			require.Equal(t, c.reason, reason(t, err))
			require.Nil(t, detail[*errdetails.RetryInfo](t, err))
			require.Empty(t, asError(t, err).Meta().Get("Retry-After"))
			require.Zero(t, b.handled.Load())
			require.NotContains(t, err.Error()+b.logged.String(), secret)
			require.Contains(t, b.logged.String(), c.logged)
			require.Equal(t, c.logged == "", b.logged.String() == "", b.logged.String())
			require.Equal(t, 100.0, b.left(t, everybody.Global()))
		})
	}
}

func TestKeys(t *testing.T) {
	t.Parallel()
	b := setup(t, connectlimit.Config{Requests: func(_ context.Context, call connectlimit.Call) ([]ratelimit.Request, error) {
		token, err := call.HeaderValue("X-Api-Key")
		if err != nil {
			return nil, err
		}
		address, err := call.PeerAddress()
		return []ratelimit.Request{perUser.For(token), perUser.For(address).Cost(0.5)}, err
	}})
	for _, wrong := range [][]string{nil, {"X-Api-Key", ""}, {"X-Api-Key", "a", "X-Api-Key", "b"}} {
		_, err := b.call(t.Context(), "hello", wrong...)
		require.Equal(t, connect.CodeInvalidArgument, connect.CodeOf(err))
		require.ErrorContains(t, err, "X-Api-Key")
	}
	_, err := b.call(t.Context(), "hello", "X-Api-Key", "a")
	require.NoError(t, err)
	require.Equal(t, 1.0, b.left(t, perUser.For("a")))
	require.Equal(t, 1.5, b.left(t, perUser.For("127.0.0.1")))

	_, err = connectlimit.Call{}.PeerAddress()
	require.Equal(t, connect.CodeInternal, connect.CodeOf(err), "no call")
}

func TestNewRefuses(t *testing.T) {
	t.Parallel()
	limiter := setup(t, connectlimit.Config{Requests: asking(perUser.Global())}).limiter
	for want, config := range map[string]connectlimit.Config{
		"Requests is nil":    {},
		"Timeout is -1s":     {Requests: asking(), Timeout: -time.Second},
		"RetryAfter is -1s":  {Requests: asking(), RetryAfter: -time.Second},
		"InvalidKey is 4711": {Requests: asking(), InvalidKey: 4711},
	} {
		_, err := connectlimit.New(limiter, config)
		require.ErrorIs(t, err, connectlimit.ErrInvalidConfig)
		require.ErrorContains(t, err, want)
	}
	for _, unusable := range []*ratelimit.Limiter{nil, limiter.WithTx(nil)} {
		_, err := connectlimit.New(unusable, connectlimit.Config{Requests: asking()})
		require.ErrorIs(t, err, connectlimit.ErrInvalidConfig)
		require.ErrorContains(t, err, "pass what ratelimit.New returned")
	}
}
