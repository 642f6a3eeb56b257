package httplimit_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

var errOwn = errors.New("the recipient does not exist")

// responding is a handler that requires in a transaction, works, and answers by what came of it.
func responding(limiter *ratelimit.Limiter, work func() error, requests ...ratelimit.Request) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		err := limiter.InTx(r.Context(), func(tx pgx.Tx) error {
			if err := limiter.WithTx(tx).Require(r.Context(), requests...); err != nil {
				return fmt.Errorf("send: %w", err)
			}
			return work()
		})
		switch {
		case httplimit.Respond(w, r, err):
		case err != nil:
			http.Error(w, "own: "+err.Error(), http.StatusInternalServerError)
		default:
			_, _ = io.WriteString(w, "sent\n")
		}
	})
}

func works() error { return nil }

// TestRespondRefusesAsTheMiddlewareDoes promises the same status, fields and body.
func TestRespondRefusesAsTheMiddlewareDoes(t *testing.T) {
	t.Parallel()
	b := setup(t)
	bob := httplimit.Limit{Limit: perUser, Key: func(*http.Request) (string, error) { return "bob", nil }}
	limited, own := b.limited(t, limits(bob), respond()), responding(b.limiter, works, perUser.For("ada"))
	b.take(t, perUser.For("ada").Cost(2.96))
	b.take(t, perUser.For("bob").Cost(2.96))
	want, got := do(limited, request(t)), do(own, request(t))
	require.Equal(t, http.StatusTooManyRequests, want.Code)
	require.Equal(t, want.Code, got.Code)
	require.Equal(t, want.Header(), got.Header())
	require.JSONEq(t, want.Body.String(), got.Body.String())
	require.Contains(t, got.Body.String(), `"retry_after_ms":19200`)

	require.Equal(t, "sent\n", do(responding(b.limiter, works, perUser.For("grace")), request(t)).Body.String())
}

// TestRespondBehindAMiddleware promises its fields beside the handler's, its own Refuse, and the longest Retry-After.
func TestRespondBehindAMiddleware(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.take(t, sendMessage.For("ada").Cost(3))
	config := limits(userLimit)
	w := do(b.limited(t, config, responding(b.limiter, works, sendMessage.For("ada"))), request(t))
	require.Equal(t, http.StatusTooManyRequests, w.Code)
	require.Equal(t, `"perUser";q=3;w=60, "sendMessage";q=10;w=60`, w.Header().Get("RateLimit-Policy"))
	require.Equal(t, `"sendMessage";r=0;t=6`, w.Header().Get("RateLimit"))
	require.Equal(t, "6", w.Header().Get("Retry-After"))

	own := responding(b.limiter, works, sendMessage.For("ada"))
	w = do(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Retry-After", "30")
		own.ServeHTTP(w, r)
	}), request(t))
	require.Equal(t, "30", w.Header().Get("Retry-After"))
	require.Contains(t, w.Body.String(), "retry in 30 s")
	require.Contains(t, w.Body.String(), `"retry_after_ms":30000`)

	config.Refuse = func(w http.ResponseWriter, _ *http.Request, refusal httplimit.Refusal) {
		w.WriteHeader(http.StatusTeapot)
		_, _ = io.WriteString(w, refusal.Violated[0])
	}
	w = do(b.limited(t, config, responding(b.limiter, works, sendMessage.For("ada"))), request(t))
	require.Equal(t, http.StatusTeapot, w.Code)
	require.Equal(t, "sendMessage", w.Body.String())
	require.Equal(t, "6", w.Header().Get("Retry-After"))
}

// TestRespondTellsFailuresFromTheHandlersErrors promises which errors Respond answers, and which errors it leaves to the handler.
func TestRespondTellsFailuresFromTheHandlersErrors(t *testing.T) {
	t.Parallel()
	b := setup(t)
	cut := b.down(t)
	fails := func(err error) func() error { return func() error { return err } }
	for name, c := range map[string]struct {
		handler http.Handler
		status  int
		says    string
		retry   string
	}{
		"Store":     {responding(cut, works, perUser.For("a")), 503, "rate limits cannot be checked; retry in 1 s", "1"},
		"Contended": {responding(b.limiter, fails(ratelimit.ErrContended), perUser.For("b")), 503, "not-decided", "1"},
		"Mistake":   {responding(b.limiter, works), 503, "rate limits cannot be checked", "1"},
		"NoKey":     {responding(b.limiter, works, perUser.For("")), 400, "the request does not say who it is from", ""},
		"OfAKey":    {responding(b.limiter, fails(httplimit.ErrNoKey), perUser.For("c")), 400, "the request does not say who it is from", ""},
		"BadCost":   {responding(b.limiter, works, perUser.For("d").Cost(-1)), 400, "a cost that is not valid", ""},
		"TooCostly": {responding(b.limiter, works, perUser.For("e").Cost(4)), 413, "more than can be had at once", ""},
		"Own":       {responding(b.limiter, fails(errOwn), perUser.For("f")), 500, "own: the recipient", ""},
		"OwnTime":   {responding(b.limiter, fails(context.DeadlineExceeded), perUser.For("g")), 500, "own: context deadline", ""},
		"Unknown":   {responding(b.limiter, fails(ratelimit.ErrCommitUnknown), perUser.For("h")), 500, "own: ratelimit: the outcome", ""},
	} {
		for _, around := range []bool{false, true} {
			handler := c.handler
			if around {
				handler = b.limited(t, limits(httplimit.Limit{Limit: everyone, Global: true}), handler)
			}
			w := do(handler, request(t))
			require.Equal(t, c.status, w.Code, "%s: %s", name, w.Body)
			require.Equal(t, c.retry, w.Header().Get("Retry-After"), name)
			require.Contains(t, w.Body.String()+w.Header().Get("RateLimit-Reason"), c.says, name)
			if around && c.status != 500 {
				require.Equal(t, "no-store", w.Header().Get("Cache-Control"), name)
				require.NotEmpty(t, w.Header().Get("RateLimit"), "%s: what the middleware has stated stays", name)
			}
		}
	}
}

// TestRespondWhenTheRequestHasEnded promises 503 for a request whose deadline has passed.
func TestRespondWhenTheRequestHasEnded(t *testing.T) {
	t.Parallel()
	b := setup(t)
	ended, cancel := context.WithDeadline(t.Context(), time.Now().Add(-time.Second))
	defer cancel()
	w := do(responding(b.limiter, works, perUser.For("ada")), request(t).WithContext(ended))
	require.Equal(t, http.StatusServiceUnavailable, w.Code)
	require.Equal(t, "1", w.Header().Get("Retry-After"))
	require.Zero(t, b.charged(t, perUser.For("ada")))

	require.False(t, httplimit.Respond(nil, request(t), nil), "nothing is written")
	require.False(t, httplimit.Respond(nil, request(t).WithContext(ended), errOwn))
	unknown := fmt.Errorf("%w: %w", ratelimit.ErrCommitUnknown, context.DeadlineExceeded)
	require.False(t, httplimit.Respond(nil, request(t).WithContext(ended), unknown), "the work may be done")
}

// TestRespondLogsFailures promises that the log holds mistakes in the program and failures of the store, which the client does not
// see, but neither refusals nor bad requests.
func TestRespondLogsFailures(t *testing.T) {
	t.Parallel()
	b := setup(t)
	config := limits(httplimit.Limit{Limit: everyone, Global: true})
	for _, handler := range []http.Handler{
		responding(b.limiter, works, perUser.For("a").Cost(3)), responding(b.limiter, works, perUser.For("a")), responding(b.limiter, works, perUser.For("")),
	} {
		do(b.limited(t, config, handler), request(t))
	}
	require.Empty(t, b.log.String())
	w := do(b.limited(t, config, responding(b.limiter, works)), request(t))
	require.Equal(t, http.StatusServiceUnavailable, w.Code)
	require.Contains(t, b.log.String(), "the call asks for 0 limits")
	require.NotContains(t, w.Body.String(), "0 limits")
}
