package grpclimit_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/pgratelimit/pgratelimit/grpclimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// unavailable checks the answer to a client when there is no decision.
func unavailable(t *testing.T, err error, trailer metadata.MD, wait time.Duration, pushback string) {
	t.Helper()
	require.Equal(t, codes.Unavailable, status.Code(err), err)
	require.Equal(t, "the limits of this call could not be asked", status.Convert(err).Message())
	require.Equal(t, "RATE_LIMIT_UNAVAILABLE", reason(err))
	require.Equal(t, wait, detail[*errdetails.RetryInfo](err).GetRetryDelay().AsDuration())
	require.Equal(t, []string{pushback}, trailer.Get("grpc-retry-pushback-ms"))
}

func TestStoreDownFailsClosed(t *testing.T) {
	t.Parallel()
	b := setup(t, grpclimit.Config{Requests: asking(perUser.For("hunter2"))})
	b.pool.Close()
	var trailer metadata.MD
	_, err := b.call(t.Context(), "hello", grpc.Trailer(&trailer))
	unavailable(t, err, trailer, time.Second, "1000")
	require.Zero(t, b.handled.Load())
	require.Contains(t, b.logged.String(), "ratelimit: call refused undecided")
	require.Contains(t, b.logged.String(), "method="+say)
	require.NotContains(t, b.logged.String(), "hunter2")

	_, err = exchange(b.open(t), "hello")
	require.Equal(t, codes.Unavailable, status.Code(err))
}

func TestStoreDownFailsOpenWhenAsked(t *testing.T) {
	t.Parallel()
	b := setup(t, grpclimit.Config{FailOpen: true, Requests: asking(perUser.For("hunter2"))})
	b.pool.Close()
	b.say = func(ctx context.Context, text string) (string, error) {
		_, decided := grpclimit.FromContext(ctx)
		require.False(t, decided)
		return text, nil
	}
	text, err := b.call(t.Context(), "hello")
	require.NoError(t, err)
	require.Equal(t, "hello", text)
	require.Contains(t, b.logged.String(), "ratelimit: call let through undecided")
	require.NotContains(t, b.logged.String(), "hunter2")

	text, err = exchange(b.open(t), "hello")
	require.NoError(t, err)
	require.Equal(t, "hello", text)
}

// hold keeps the bucket of request locked until the test ends.
func (b *bundle) hold(t *testing.T, request ratelimit.Request) {
	t.Helper()
	tx, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) })
	_, err = b.limiter.WithTx(tx).Take(t.Context(), request)
	require.NoError(t, err)
}

func TestSlowStore(t *testing.T) {
	t.Parallel()
	b := setup(t, grpclimit.Config{Timeout: 100 * time.Millisecond, RetryAfter: 2500 * time.Microsecond, Requests: asking(perUser.For("17"))})
	b.hold(t, perUser.For("17"))
	var trailer metadata.MD
	_, err := b.call(t.Context(), "hello", grpc.Trailer(&trailer))
	unavailable(t, err, trailer, 2500*time.Microsecond, "3")
	require.Contains(t, b.logged.String(), "error_type=timeout")

	patient := setup(t, grpclimit.Config{Requests: asking(perUser.For("17"))})
	patient.hold(t, perUser.For("17"))
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	_, err = patient.call(ctx, "hello")
	require.Equal(t, codes.DeadlineExceeded, status.Code(err), "the client's own deadline is no failure of the store")
	require.Empty(t, patient.logged.String())
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
			b.now.Add(int64(wait))
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
