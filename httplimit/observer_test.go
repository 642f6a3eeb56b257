package httplimit_test

import (
	"context"
	"net/http"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/internal/telemetry"
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

// TestTheLimitersObserverIsTold promises that the limiter's Observer receives the answers of the middleware by route and limit, and
// the refusals of limits in shadow mode.
func TestTheLimitersObserverIsTold(t *testing.T) {
	t.Parallel()
	b := setup(t)
	r := &recorder{}
	small := ratelimit.Define("small", ratelimit.PerDay(1))
	limiter, err := ratelimit.New(b.pool, ratelimit.Config{AsOf: b.clock, Observer: r, Policies: ratelimit.ShadowLimits(small)})
	require.NoError(t, err)
	handler := b.limitedOn(t, limiter, httplimit.Config{Route: "GET /", FailOpen: true, Limits: []httplimit.Limit{
		userLimit, {Limit: small, Global: true},
	}}, respond())
	for range 2 {
		do(handler, request(t))
	}
	anonymous := request(t)
	anonymous.Header.Del("X-User")
	do(handler, anonymous)

	require.Len(t, r.decided, 2)
	for i := range r.answered {
		require.Equal(t, "GET /", r.answered[i].Route)
		r.answered[i].Route = ""
	}
	require.ErrorIs(t, r.answered[3].Err, httplimit.ErrNoKey)
	r.answered[3].Err = nil
	require.Equal(t, []ratelimit.Answered{
		{Limit: "perUser", Result: "allowed"},
		{Limit: "perUser", Result: "allowed"},
		{Limit: "small", Result: "refused", Shadow: true},
		{Limit: "perUser", Result: "bad_key"},
	}, r.answered)
}

func TestTheLimitersObserverIsToldOfFailures(t *testing.T) {
	t.Parallel()
	for want, c := range map[string]struct {
		open     bool
		policies ratelimit.Policies
	}{
		"failed_closed": {}, "failed_open": {open: true}, "shadow_failed_closed": {policies: ratelimit.ShadowLimits(perUser)},
	} {
		s := newStand(t)
		r := &recorder{}
		limiter, err := ratelimit.New(s.pool, ratelimit.Config{Observer: r, Policies: c.policies})
		require.NoError(t, err)
		s.pool.Close()
		w := do(s.limitedOn(t, limiter, httplimit.Config{Limits: []httplimit.Limit{userLimit}, FailOpen: c.open}, respond()), request(t))
		require.Equal(t, want == "failed_closed", w.Code == http.StatusServiceUnavailable)
		require.Len(t, r.answered, 1)
		require.Error(t, r.answered[0].Err)
		require.Equal(t, want, telemetry.Answer(r.answered[0]))
		require.Len(t, r.failed, 1)
	}
}
