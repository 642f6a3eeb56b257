package rpclimit_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/rpclimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

var atOnce = ratelimit.Define("atOnce", ratelimit.Concurrency{Most: 1, Lease: time.Minute})

// TestSlotsAreHeldUntilTheRelease promises that a call has its slot until its handler is done, and tokens and slots together or
// not at all.
func TestSlotsAreHeldUntilTheRelease(t *testing.T) {
	t.Parallel()
	b := setup(t)
	slots := ratelimit.Define("atOnce", ratelimit.Concurrency{Most: 1})
	held, release, err := b.gate.Unary(t.Context(), call{requests: []ratelimit.Request{perUser.For("ada"), slots.For("ada")}}, nil)
	require.NoError(t, err)
	lease, found := ratelimit.LeaseFromContext(held)
	require.True(t, found)
	require.Positive(t, lease.Fence)
	require.Equal(t, rpclimit.ResourceExhausted, b.admit(t.Context(), perUser.For("ada"), slots.For("ada")))
	release()
	require.Equal(t, rpclimit.OK, b.admit(t.Context(), perUser.For("ada"), slots.For("ada")), "the refused call took no token")
	require.Equal(t, rpclimit.ResourceExhausted, b.admit(t.Context(), perUser.For("ada"), slots.For("ada")))
	require.Equal(t, rpclimit.OK, b.admit(t.Context(), slots.For("ada")), "and no slot")
}

// TestACallThatLosesItsSlotIsTold promises that the handler's context ends then, and that the Observer receives it.
func TestACallThatLosesItsSlotIsTold(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) { // renewals have a virtual clock
		b := &bundle{}
		limiter, err := ratelimit.New(ratelimittest.NewDB(), ratelimit.Config{Observer: b, AsOf: time.Now})
		require.NoError(t, err)
		gate, err := rpclimit.New(limiter, config())
		require.NoError(t, err)
		held, release, err := gate.Unary(t.Context(), call{requests: []ratelimit.Request{atOnce.For("ada")}}, nil)
		require.NoError(t, err)
		require.NoError(t, limiter.Reset(t.Context(), atOnce.For("ada")))
		<-held.Done()
		require.ErrorIs(t, context.Cause(held), ratelimit.ErrLeaseLost)
		release()
		require.Equal(t, []string{"allowed /test.Echo/Say? atOnce", "lease_lost /test.Echo/Say? atOnce"}, b.results())
	})
}

// TestMessagesOfAStream promises that each message is decided when it arrives, that it takes no slot, which nothing would release, and
// that after a rejection no message is received.
func TestMessagesOfAStream(t *testing.T) {
	t.Parallel()
	b := setup(t)
	stream, release, err := b.gate.Open(t.Context(), call{requests: []ratelimit.Request{perUser.For("ada")}})
	require.NoError(t, err)
	defer release()
	receive := func(requests ...ratelimit.Request) error {
		return stream.Receive(requests, func(any) error { return nil }, func(err error) error { return err })
	}
	require.NoError(t, receive(perUser.For("ada")))
	require.NoError(t, receive(), "a message may cost nothing")
	require.Equal(t, rpclimit.Internal, codeOf(receive(atOnce.For("ada"))))
	require.Equal(t, rpclimit.Internal, codeOf(receive()), "a stream that was refused stays refused")
	v, err := b.limiter.Value(t.Context(), atOnce.For("ada"))
	require.NoError(t, err)
	require.Equal(t, 1.0, v.Tokens)
}
