package grpclimit_test

import (
	"context"
	"errors"
	"math"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

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

func TestRefusalSaysWhichLimitAndHowLong(t *testing.T) {
	t.Parallel()
	b := setup(t, grpclimit.Config{Domain: "echo.example", Requests: asking(perUser.For("17"), everybody.Global())})
	for _, want := range []float64{1, 0} {
		text, err := b.call(t.Context(), "hello")
		require.NoError(t, err)
		require.Equal(t, "hello", text)
		require.InDelta(t, want, b.left(t, perUser.For("17")), 0)
	}
	b.now.Add(int64(1500 * time.Microsecond))
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
	require.Equal(t, "perUser: 2 per minute", violations[0].GetDescription())

	require.EqualValues(t, 2, b.handled.Load(), "a refused call does not reach the handler")
	require.InDelta(t, 98, b.left(t, everybody.Global()), 0.001, "nor does it take from the limit that had enough")
	b.now.Add(int64(29998500 * time.Microsecond))
	_, err = b.call(t.Context(), "hello")
	require.NoError(t, err, "and after the wait it is let through")
}

func TestExactlyAsManyAsTheLimitAllows(t *testing.T) {
	t.Parallel()
	b := setup(t, grpclimit.Config{Requests: asking(perUser.For("17"), everybody.Global())})
	var calls sync.WaitGroup
	for range 40 {
		calls.Go(func() {
			if _, err := b.call(t.Context(), "hello"); err != nil && status.Code(err) != codes.ResourceExhausted {
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
	b := setup(t, grpclimit.Config{
		Requests: asking(perUser.For("17")),
		Skip:     func(_ context.Context, method string) bool { return method == chat },
	})
	b.say = func(ctx context.Context, _ string) (string, error) {
		d, ok := grpclimit.FromContext(ctx)
		return strconv.FormatFloat(d.Remaining, 'g', -1, 64) + " " + strconv.FormatBool(ok), b.limiter.Credit(ctx, perUser.For("17"))
	}
	for range 5 { // the handler returns its tokens
		text, err := b.call(t.Context(), "hello")
		require.NoError(t, err)
		require.Equal(t, "1 true", text)
	}
	_, ok := grpclimit.FromContext(t.Context())
	require.False(t, ok)
}

func TestMessageAddsToTheSameDecision(t *testing.T) {
	t.Parallel()
	b := setup(t, grpclimit.Config{
		Requests: asking(perUser.For("17")),
		Message: func(_ context.Context, _ string, message any) ([]ratelimit.Request, error) {
			return []ratelimit.Request{everybody.Global().Cost(float64(len(message.(*wrapperspb.StringValue).GetValue())))}, nil
		},
	})
	_, err := b.call(t.Context(), "0123456789")
	require.NoError(t, err)
	require.Equal(t, 90.0, b.left(t, everybody.Global()))
	_, err = b.call(t.Context(), strings.Repeat("x", 91))
	require.Equal(t, codes.ResourceExhausted, status.Code(err))
	require.Equal(t, 1.0, b.left(t, perUser.For("17")), "all or nothing")
}

// What no wait helps against is not answered with a wait, and what the application did wrong is not told.
func TestCallsThatCannotBeDecided(t *testing.T) {
	t.Parallel()
	const secret = "hunter2"
	for name, c := range map[string]struct {
		config grpclimit.Config
		code   codes.Code
		reason string
		logged string
	}{
		"cost above capacity": {
			grpclimit.Config{Requests: asking(perUser.For(secret).Cost(3))},
			codes.InvalidArgument, "COST_EXCEEDS_CAPACITY", "",
		},
		"cost is no number": {
			grpclimit.Config{Requests: asking(perUser.For(secret).Cost(math.NaN()))},
			codes.InvalidArgument, "INVALID_COST", "",
		},
		"empty key":             {grpclimit.Config{Requests: asking(perUser.For(""))}, codes.InvalidArgument, "INVALID_KEY", ""},
		"empty key among them":  {grpclimit.Config{Requests: asking(everybody.Global(), perUser.For(""))}, codes.InvalidArgument, "INVALID_KEY", ""},
		"key of another code":   {grpclimit.Config{InvalidKey: codes.Unauthenticated, Requests: asking(perUser.For(""))}, codes.Unauthenticated, "INVALID_KEY", ""},
		"open with a wrong key": {grpclimit.Config{FailOpen: true, Requests: asking(perUser.For("\xff" + secret))}, codes.InvalidArgument, "INVALID_KEY", ""},
		"no limits":             {grpclimit.Config{FailOpen: true, Requests: asking()}, codes.Internal, "", "Config.Skip"},
		"undefined limit":       {grpclimit.Config{FailOpen: true, Requests: asking(ratelimit.Limit{}.For(secret))}, codes.Internal, "", "invalid limit"},
		"failing": {
			grpclimit.Config{Requests: func(context.Context, string) ([]ratelimit.Request, error) { return nil, errors.New("no session store") }},
			codes.Internal, "", "no session store",
		},
		"with a code of its own": {
			grpclimit.Config{Requests: func(context.Context, string) ([]ratelimit.Request, error) {
				return nil, status.Error(codes.Unauthenticated, "sign in")
			}},
			codes.Unauthenticated, "", "",
		},
		"failing on the message": {
			grpclimit.Config{Requests: asking(perUser.For(secret)), Message: func(context.Context, string, any) ([]ratelimit.Request, error) {
				return nil, status.Error(codes.OutOfRange, "too long")
			}},
			codes.OutOfRange, "", "",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t, c.config)
			var trailer metadata.MD
			_, err := b.call(t.Context(), "hello", grpc.Trailer(&trailer))
			require.Equal(t, c.code, status.Code(err), err)
			require.Equal(t, c.reason, reason(err))
			require.Nil(t, detail[*errdetails.RetryInfo](err))
			require.Empty(t, trailer.Get("grpc-retry-pushback-ms"))
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
	byPeerAndToken := func(ctx context.Context, _ string) ([]ratelimit.Request, error) {
		token, err := grpclimit.Metadata(ctx, "X-Api-Key")
		if err != nil {
			return nil, err
		}
		address, err := grpclimit.PeerAddress(ctx)
		return []ratelimit.Request{perUser.For(token), perUser.For(address).Cost(0.5)}, err
	}
	b := setup(t, grpclimit.Config{Requests: byPeerAndToken})
	for _, wrong := range [][]string{nil, {"x-api-key", ""}, {"x-api-key", "a", "x-api-key", "b"}} {
		_, err := b.call(metadata.AppendToOutgoingContext(t.Context(), wrong...), "hello")
		require.Equal(t, codes.InvalidArgument, status.Code(err))
		require.ErrorContains(t, err, "X-Api-Key")
	}
	_, err := b.call(metadata.AppendToOutgoingContext(t.Context(), "x-api-key", "a"), "hello")
	require.NoError(t, err)
	require.Equal(t, 1.0, b.left(t, perUser.For("a")))
	require.Equal(t, 1.5, b.left(t, perUser.For("127.0.0.1")))

	_, err = grpclimit.PeerAddress(t.Context())
	require.Equal(t, codes.Internal, status.Code(err), "no call")
}

func TestNewRefuses(t *testing.T) {
	t.Parallel()
	limiter := setup(t, grpclimit.Config{Requests: asking(perUser.Global())}).limiter
	for want, config := range map[string]grpclimit.Config{
		"Requests is nil":    {},
		"Timeout is -1s":     {Requests: asking(), Timeout: -time.Second},
		"RetryAfter is -1s":  {Requests: asking(), RetryAfter: -time.Second},
		"InvalidKey is 4711": {Requests: asking(), InvalidKey: 4711},
	} {
		_, err := grpclimit.New(limiter, config)
		require.ErrorIs(t, err, grpclimit.ErrInvalidConfig)
		require.ErrorContains(t, err, want)
	}
	for _, unusable := range []*ratelimit.Limiter{nil, limiter.WithTx(nil)} {
		_, err := grpclimit.New(unusable, grpclimit.Config{Requests: asking()})
		require.ErrorIs(t, err, grpclimit.ErrInvalidConfig)
		require.ErrorContains(t, err, "pass what ratelimit.New returned")
	}
}
