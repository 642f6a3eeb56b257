package grpclimit_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/pgratelimit/pgratelimit/grpclimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

var atOnce = ratelimit.Define("atOnce", ratelimit.Concurrency{Most: 1})

// TestSlotsAreHeldWhileTheHandlerRuns promises that the running calls and streams together never exceed the slots.
func TestSlotsAreHeldWhileTheHandlerRuns(t *testing.T) {
	t.Parallel()
	b := setup(t, grpclimit.Config{Requests: asking(atOnce.For("17"))})
	held := func(ctx context.Context) bool {
		_, found := ratelimit.LeaseFromContext(ctx)
		return found && b.left(t, atOnce.For("17")) == 0
	}
	b.say = func(ctx context.Context, text string) (string, error) {
		if !held(ctx) {
			return "", status.Error(codes.Internal, "nothing is held")
		}
		if text == "outer" {
			_, err := b.call(ctx, "inner")
			return status.Code(err).String(), nil
		}
		return text, nil
	}
	b.chat = func(stream grpc.ServerStream) error {
		if !held(stream.Context()) {
			return status.Error(codes.Internal, "nothing is held")
		}
		_, err := b.call(stream.Context(), "inner")
		return err
	}
	for range 2 {
		text, err := b.call(t.Context(), "outer")
		require.NoError(t, err)
		require.Equal(t, codes.ResourceExhausted.String(), text)
		require.Equal(t, 1.0, b.left(t, atOnce.For("17")))
		_, err = exchange(b.open(t), "hello")
		require.Equal(t, codes.ResourceExhausted, status.Code(err))
		require.Eventually(t, func() bool { return b.left(t, atOnce.For("17")) == 1 }, deadline, time.Millisecond)
	}
}
