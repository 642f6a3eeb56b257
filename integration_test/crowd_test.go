package integration_test

import (
	"context"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// announcing is a context that closes underway at the first call of Done. A call that waits for the end of its context is under way by then.
type announcing struct {
	context.Context //nolint:containedctx // it is one
	once            *sync.Once
	underway        chan struct{}
}

func (c announcing) Done() <-chan struct{} {
	c.once.Do(func() { close(c.underway) })
	return c.Context.Done()
}

// asker is a caller that waits for an answer.
type asker struct {
	cancel          context.CancelFunc
	underway, ended chan struct{}
	allowed         bool
	err             error
}

// ask begins a Take and returns when it is under way, so calls arrive in the order of ask.
func ask(t *testing.T, limiter *ratelimit.Limiter, requests ...ratelimit.Request) *asker {
	t.Helper()
	return askFor(t, func(ctx context.Context) error { return limiter.Require(ctx, requests...) })
}

// askFor begins a call, which is allowed unless it returns an error, and returns when it is under way.
func askFor(t *testing.T, call func(context.Context) error) *asker {
	t.Helper()
	a := startAsking(t, func(ctx context.Context) (bool, error) { err := call(ctx); return err == nil, err })
	a.awaitUnderway()
	return a
}

// startAsking begins a call.
func startAsking(t *testing.T, call func(context.Context) (bool, error)) *asker {
	t.Helper()
	inner, cancel := context.WithCancel(t.Context())
	ctx := announcing{Context: inner, once: &sync.Once{}, underway: make(chan struct{})}
	a := &asker{cancel: cancel, underway: ctx.underway, ended: make(chan struct{})}
	t.Cleanup(func() { cancel(); <-a.ended })
	go func() {
		defer close(a.ended)
		a.allowed, a.err = call(ctx)
	}()
	return a
}

func (a *asker) awaitUnderway() {
	select {
	case <-a.underway:
	case <-a.ended:
	}
}

// hasEnded reports whether there is an answer.
func (a *asker) hasEnded() bool {
	select {
	case <-a.ended:
		return true
	default:
		return false
	}
}

// requireWaiting checks that the calls have no answer yet.
func requireWaiting(t *testing.T, askers ...*asker) {
	t.Helper()
	for _, a := range askers {
		require.False(t, a.hasEnded(), "the call has ended: %v, %v", a.allowed, a.err)
	}
}

// requireAllAllowed waits for the answers of the calls, which must be allowed.
func requireAllAllowed(t *testing.T, askers ...*asker) {
	t.Helper()
	for _, a := range askers {
		<-a.ended
		require.NoError(t, a.err)
		require.True(t, a.allowed)
	}
}

// crowd makes a first caller wait for the row of ada, which another transaction locks until release is called, and n others wait for the
// first.
func (s *stand) crowd(t *testing.T, n int) (askers []*asker, release func()) {
	t.Helper()
	require.NoError(t, s.takeOutside(t.Context(), "ada"))
	release = s.hold(t)
	askers = []*asker{ask(t, s.limiter, calls.For("ada"))}
	s.awaitWaiter(t)
	for range n {
		askers = append(askers, ask(t, s.limiter, calls.For("ada")))
	}
	return askers, release
}
