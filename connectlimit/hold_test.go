package connectlimit_test

import (
	"context"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/connectlimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

var atOnce = ratelimit.Define("atOnce", ratelimit.Concurrency{Most: 1})

// TestSlotsAreHeldWhileTheHandlerRuns promises that the running calls and streams together never exceed the slots.
func TestSlotsAreHeldWhileTheHandlerRuns(t *testing.T) {
	t.Parallel()
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
		require.Equal(t, 1.0, b.left(t, atOnce.For("17")))
		stream := b.open(t)
		_, err = exchange(stream, "hello")
		require.NoError(t, err)
		_, err = b.call(t.Context(), "beside")
		require.Equal(t, connect.CodeResourceExhausted, connect.CodeOf(err))
		require.NoError(t, stream.CloseRequest())
		require.Eventually(t, func() bool { return b.left(t, atOnce.For("17")) == 1 }, deadline, time.Millisecond)
	}
}
