package integration_test

import (
	"context"
	"errors"
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

// asker is a caller that waits for a decision.
type asker struct {
	cancel          context.CancelFunc
	underway, ended chan struct{}
	d               ratelimit.Decision
	err             error
}

// ask begins a call and returns when it is under way, so calls arrive in the order of ask.
func ask(t *testing.T, limiter *ratelimit.Limiter, requests ...ratelimit.Request) *asker {
	t.Helper()
	return askFor(t, func(ctx context.Context) (ratelimit.Decision, error) { return limiter.Take(ctx, requests...) })
}

func askFor(t *testing.T, call func(context.Context) (ratelimit.Decision, error)) *asker {
	t.Helper()
	a := startAsking(t, call)
	a.awaitUnderway()
	return a
}

// startAsking is askFor that does not wait until the call is under way.
func startAsking(t *testing.T, call func(context.Context) (ratelimit.Decision, error)) *asker {
	t.Helper()
	inner, cancel := context.WithCancel(t.Context())
	ctx := announcing{Context: inner, once: &sync.Once{}, underway: make(chan struct{})}
	a := &asker{cancel: cancel, underway: ctx.underway, ended: make(chan struct{})}
	t.Cleanup(func() { cancel(); <-a.ended })
	go func() {
		defer close(a.ended)
		a.d, a.err = call(ctx)
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

// requireWaits checks that the call has no answer yet.
func (a *asker) requireWaits(t *testing.T) {
	t.Helper()
	select {
	case <-a.ended:
		require.Fail(t, "the call has ended", "%+v, %v", a.d, a.err)
	default:
	}
}

func (a *asker) requireAllowed(t *testing.T) {
	t.Helper()
	<-a.ended
	require.NoError(t, a.err)
	require.True(t, a.d.Allowed)
}

func (a *asker) requireError(t *testing.T, want func(error) bool) {
	t.Helper()
	<-a.ended
	require.Error(t, a.err)
	require.False(t, a.d.Allowed)
	require.True(t, want(a.err), "%v", a.err)
}

func isError(target error) func(error) bool {
	return func(err error) bool { return errors.Is(err, target) }
}

// crowd makes a first caller wait for the row of ada, which another transaction locks until release is called, and n others wait for the
// first.
func (s *stand) crowd(t *testing.T, n int) (first *asker, others []*asker, release func()) {
	t.Helper()
	require.NoError(t, s.takeOutside(t.Context(), "ada"))
	release = s.hold(t)
	first = ask(t, s.limiter, calls.For("ada"))
	s.awaitWaiter(t)
	for range n {
		others = append(others, ask(t, s.limiter, calls.For("ada")))
	}
	return first, others, release
}
