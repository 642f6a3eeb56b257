package connectlimit_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/pgratelimit/pgratelimit/connectlimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// unavailable checks the answer to a client when there is no decision.
func unavailable(t *testing.T, err error, wait time.Duration, retryAfter string) {
	t.Helper()
	require.Equal(t, connect.CodeUnavailable, connect.CodeOf(err), err)
	require.Equal(t, "the limits of this call could not be asked", asError(t, err).Message())
	require.Equal(t, "RATE_LIMIT_UNAVAILABLE", reason(t, err))
	require.Equal(t, wait, detail[*errdetails.RetryInfo](t, err).GetRetryDelay().AsDuration())
	require.Equal(t, retryAfter, asError(t, err).Meta().Get("Retry-After"))
}

func TestStoreDownFailsClosed(t *testing.T) {
	t.Parallel()
	b := setup(t, connectlimit.Config{Requests: asking(perUser.For("hunter2"))})
	b.pool.Close()
	_, err := b.call(t.Context(), "hello")
	unavailable(t, err, time.Second, "1")
	_, err = exchange(b.open(t), "hello")
	unavailable(t, err, time.Second, "1")
	require.Zero(t, b.handled.Load())
	require.Contains(t, b.logged.String(), "ratelimit: call refused undecided")
	require.Contains(t, b.logged.String(), "method="+say)
	require.NotContains(t, b.logged.String(), "hunter2")
}

func TestStoreDownFailsOpenWhenAsked(t *testing.T) {
	t.Parallel()
	b := setup(t, connectlimit.Config{FailOpen: true, Requests: asking(perUser.For("hunter2"))})
	b.pool.Close()
	b.say = func(ctx context.Context, said string) (string, error) {
		if _, decided := connectlimit.FromContext(ctx); decided {
			return "", errors.New("who decided?")
		}
		return said, nil
	}
	answer, err := b.call(t.Context(), "hello")
	require.NoError(t, err)
	require.Equal(t, "hello", answer)
	answer, err = exchange(b.open(t), "hello")
	require.NoError(t, err)
	require.Equal(t, "hello", answer)
	require.Contains(t, b.logged.String(), "ratelimit: call let through undecided")
	require.NotContains(t, b.logged.String(), "hunter2")
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
	b := setup(t, connectlimit.Config{Timeout: 100 * time.Millisecond, RetryAfter: 2500 * time.Millisecond, Requests: asking(perUser.For("17"))})
	b.hold(t, perUser.For("17"))
	_, err := b.call(t.Context(), "hello")
	unavailable(t, err, 2500*time.Millisecond, "3")
	require.Contains(t, b.logged.String(), "error_type=timeout")

	patient := setup(t, connectlimit.Config{Requests: asking(perUser.For("17"))})
	patient.hold(t, perUser.For("17"))
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	_, err = patient.call(ctx, "hello")
	require.Equal(t, connect.CodeDeadlineExceeded, connect.CodeOf(err), "the client's own deadline is no failure of the store")
	require.Empty(t, patient.logged.String())
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
	_, err = exchange(b.open(t, connect.WithInterceptors(limits)), "hello")
	require.NoError(t, err)
	require.Equal(t, 2.0, b.left(t, perUser.For("17")))
	require.Equal(t, 97.0, b.left(t, everybody.Global()))
}
