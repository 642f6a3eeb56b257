package httplimit_test

import (
	"context"
	"net/http"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/internal/guard"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// recorder is an observer of a limiter.
type recorder struct {
	mu       sync.Mutex
	answered []ratelimit.Answered
	decided  []ratelimit.Decided
	failed   []ratelimit.Failed
}

func (r *recorder) Observe(_ context.Context, event ratelimit.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch e := event.(type) {
	case ratelimit.Answered:
		r.answered = append(r.answered, e)
	case ratelimit.Decided:
		r.decided = append(r.decided, e)
	case ratelimit.Failed:
		r.failed = append(r.failed, e)
	}
}

// TestTheLimitersObserverIsTold promises that whoever observes the limiter can count what the middleware answered, by
// route and limit, and can tell what was only tried.
func TestTheLimitersObserverIsTold(t *testing.T) {
	t.Parallel()
	b := setup(t)
	r := &recorder{}
	limiter, err := ratelimit.New(b.pool, ratelimit.Config{AsOf: b.clock, Observer: r})
	require.NoError(t, err)
	small := ratelimit.Define("small", ratelimit.PerDay(1))
	handler := b.limitedOn(t, limiter, httplimit.Config{Route: "GET /", FailOpen: true, Rules: []httplimit.Rule{
		userRule, {Limit: small, Global: true, Shadow: true},
	}}, respond())
	for range 2 {
		do(handler, request(t))
	}
	anonymous := request(t)
	anonymous.Header.Del("X-User")
	do(handler, anonymous)

	require.Len(t, r.decided, 4)
	for _, d := range r.decided {
		require.Equal(t, d.Decision.States[0].Limit.Name() == "small", d.Shadow)
	}
	for i := range r.answered {
		require.Equal(t, "GET /", r.answered[i].Route)
		r.answered[i].Route = ""
	}
	require.ErrorIs(t, r.answered[4].Err, httplimit.ErrNoKey)
	r.answered[4].Err = nil
	require.Equal(t, []ratelimit.Answered{
		{Limit: "perUser", Result: "allowed"},
		{Limit: "small", Result: "allowed", Shadow: true},
		{Limit: "perUser", Result: "allowed"},
		{Limit: "small", Result: "refused", Shadow: true},
		{Limit: "perUser", Result: "bad_key"},
	}, r.answered)
}

func TestTheLimitersObserverIsToldOfFailures(t *testing.T) {
	t.Parallel()
	for want, config := range map[string]httplimit.Config{
		"failed_closed": {}, "failed_open": {FailOpen: true}, "shadow_failed_closed": {Shadow: true},
	} {
		s := newStand(t)
		r := &recorder{}
		limiter, err := ratelimit.New(s.pool, ratelimit.Config{Observer: r})
		require.NoError(t, err)
		s.pool.Close()
		config.Rules = []httplimit.Rule{userRule}
		w := do(s.limitedOn(t, limiter, config, respond()), request(t))
		require.Equal(t, want == "failed_closed", w.Code == http.StatusServiceUnavailable)
		require.Len(t, r.answered, 1)
		require.Error(t, r.answered[0].Err)
		require.Len(t, r.failed, 1)
		require.Equal(t, config.Shadow, r.failed[0].Shadow)
		outcome := httplimit.Outcome{Result: httplimit.Result(r.answered[0].Result), Shadow: r.answered[0].Shadow}
		require.Equal(t, want, outcome.String())
	}
}

// TestResultsAreThoseOfTheOtherGuards promises that the counts of HTTP and RPC add up.
func TestResultsAreThoseOfTheOtherGuards(t *testing.T) {
	t.Parallel()
	for want, result := range map[string]httplimit.Result{
		guard.Allowed: httplimit.Allowed, guard.Refused: httplimit.Refused, guard.BadKey: httplimit.BadKey, guard.BadCost: httplimit.BadCost,
		guard.TooCostly: httplimit.TooCostly, guard.FailedClosed: httplimit.FailedClosed, guard.FailedOpen: httplimit.FailedOpen,
		guard.Cancelled: httplimit.Cancelled, guard.Refunded: httplimit.Refunded, guard.RefundFailed: httplimit.RefundFailed,
	} {
		require.EqualValues(t, want, result)
	}
}
