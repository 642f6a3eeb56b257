package httplimit_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/middleware/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// spent returns a handler whose limit has nothing left for ada.
func (b *bundle) spent(t *testing.T, config httplimit.Config) http.Handler {
	t.Helper()
	config.Limits = append(config.Limits, userLimit)
	handler := b.limited(t, config, mustNotRun(t))
	b.take(t, perUser.For("ada").Cost(3))
	return handler
}

func TestRefusalsFollowTheAcceptField(t *testing.T) {
	t.Parallel()
	const (
		problem = "application/problem+json"
		text    = "text/plain; charset=utf-8"
	)
	b := setup(t)
	handler := b.spent(t, httplimit.Config{})
	for accept, want := range map[string]string{
		"":                              problem,
		"*/*":                           problem,
		"APPLICATION/JSON; q=1.0":       problem,
		"application/problem+json":      problem,
		"application/json, text/plain":  problem,
		"image/png":                     problem,
		strings.Repeat("x/y,", 100_000): problem,
		"text/plain":                    text,
		"text/*":                        text,
		"TEXT/HTML":                     text,
		"text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8": text, // a browser
	} {
		w := do(handler, request(t, "Accept", accept))
		require.Equal(t, http.StatusTooManyRequests, w.Code)
		require.Equal(t, want, w.Header().Get("Content-Type"), "%.60q", accept)
		require.Contains(t, w.Body.String(), "perUser: 3 per minute; retry in 20 s")
		require.Equal(t, "20", w.Header().Get("Retry-After"))
	}
	head := request(t)
	head.Method = http.MethodHead
	w := do(handler, head)
	require.Equal(t, http.StatusTooManyRequests, w.Code)
	require.Empty(t, w.Body.String())
	require.Equal(t, "20", w.Header().Get("Retry-After"))
}

// TestRefuseReplacesTheResponse promises that the fields are set for an answer that is replaced, and that it may
// change the default one.
func TestRefuseReplacesTheResponse(t *testing.T) {
	t.Parallel()
	b := setup(t)
	handler := b.spent(t, httplimit.Config{Refuse: func(w http.ResponseWriter, r *http.Request, refusal httplimit.Refusal) {
		if refusal.Result == "bad_key" {
			w.Header().Set("WWW-Authenticate", "Bearer")
			refusal.Status, refusal.Title, refusal.Detail = http.StatusUnauthorized, "Unauthorized", "send a token"
			refusal.ServeHTTP(w, r)
			return
		}
		require.Equal(t, []string{"perUser"}, refusal.Violated)
		require.Equal(t, int64(20), refusal.RetryAfter)
		w.WriteHeader(http.StatusTeapot)
	}})
	w := do(handler, request(t))
	require.Equal(t, http.StatusTeapot, w.Code)
	require.Equal(t, "20", w.Header().Get("Retry-After"))
	require.Equal(t, "no-store", w.Header().Get("Cache-Control"))
	require.Equal(t, `"perUser";r=0;t=20`, w.Header().Get("RateLimit"))

	r := request(t)
	r.Header.Del("X-User")
	w = do(handler, r)
	require.Equal(t, http.StatusUnauthorized, w.Code)
	require.Equal(t, "Bearer", w.Header().Get("WWW-Authenticate"))
	require.Contains(t, w.Body.String(), "send a token")
}

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

// TestRespondDistinguishesFailuresFromErrorsOfTheHandler promises which errors Respond answers, and which errors it
// leaves to the handler. The log holds mistakes in the program and failures of the store, which the client does not
// see, but neither refusals nor bad requests.
func TestRespondDistinguishesFailuresFromErrorsOfTheHandler(t *testing.T) {
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
		"Store":      {responding(cut, works, perUser.For("a")), 503, "rate limits cannot be checked; retry in 1 s", "1"},
		"Contended":  {responding(b.limiter, fails(ratelimit.ErrContended), perUser.For("b")), 503, "not-decided", "1"},
		"Mistake":    {responding(b.limiter, works), 503, "rate limits cannot be checked", "1"},
		"NoKey":      {responding(b.limiter, works, perUser.For("")), 400, "the request does not say who it is from", ""},
		"OfAKey":     {responding(b.limiter, fails(httplimit.ErrNoKey), perUser.For("c")), 400, "the request does not say who it is from", ""},
		"BadCost":    {responding(b.limiter, works, perUser.For("d").Cost(-1)), 400, "a cost that is not valid", ""},
		"TooCostly":  {responding(b.limiter, works, perUser.For("e").Cost(4)), 413, "costs more than perUser allows at once; use up to 3", ""},
		"Own":        {responding(b.limiter, fails(errOwn), perUser.For("f")), 500, "own: the recipient", ""},
		"OwnTime":    {responding(b.limiter, fails(context.DeadlineExceeded), perUser.For("g")), 500, "own: context deadline", ""},
		"Unanswered": {responding(b.limiter, fails(errors.Join(ratelimit.ErrContended, ratelimit.ErrCommitUnknown)), perUser.For("i")), 500, "own: ratelimit", ""},
		"KeyFirst":   {responding(b.limiter, fails(errors.Join(ratelimit.ErrCommitUnknown, ratelimit.ErrInvalidKey)), perUser.For("j")), 400, "who it is from", ""},
		"Unknown":    {responding(b.limiter, fails(ratelimit.ErrCommitUnknown), perUser.For("h")), 500, "own: ratelimit: the outcome", ""},
	} {
		for _, around := range []bool{false, true} {
			handler, logged := c.handler, len(b.log.String())
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
			if around {
				require.Equal(t, c.status == 503, len(b.log.String()) > logged, name)
			}
			require.NotContains(t, w.Body.String(), "0 limits", name)
		}
	}
	require.Contains(t, b.log.String(), "the call asks for 0 limits")
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

// merging is a handler that takes what the requests cost by itself, one after the other, and merges each decision.
func (b *bundle) merging(t *testing.T, requests ...ratelimit.Request) http.Handler {
	t.Helper()
	return inline(func(e exchange) {
		for _, request := range requests {
			d, err := b.limiter.Take(e.r.Context(), request)
			require.NoError(t, err)
			httplimit.Merge(e.w, e.r, d)
		}
	})
}

// TestTheTighterOfTwoDecisionsIsInTheFields has a middleware and a handler ask one name: for another key, another
// policy, a larger cost.
func TestTheTighterOfTwoDecisionsIsInTheFields(t *testing.T) {
	t.Parallel()
	free := ratelimit.Define("perUser", ratelimit.PerMinute(2))
	for name, c := range map[string]struct {
		own           ratelimit.Request
		policy, limit string
	}{
		"Looser":        {perUser.For("bob").Cost(0), `"perUser";q=3;w=60`, `"perUser";r=2;t=40`},
		"Tighter":       {perUser.For("bob").Cost(1.5), `"perUser";q=3;w=60`, `"perUser";r=1;t=20`},
		"AnotherPolicy": {free.For("bob"), `"perUser";q=2;w=60`, `"perUser";r=1;t=30`},
		"TheSameBucket": {perUser.For("ada"), `"perUser";q=3;w=60`, `"perUser";r=1;t=20`},
		"RefusedThere":  {perUser.For("ada").Cost(3), `"perUser";q=3;w=60`, `"perUser";r=2;t=20`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			unit := userLimit
			unit.Unit = "messages"
			w := do(b.limited(t, limits(unit), b.merging(t, c.own)), request(t))
			require.Equal(t, c.policy+`;qu="messages"`, w.Header().Get("RateLimit-Policy"), "and the unit stays")
			require.Equal(t, c.limit, w.Header().Get("RateLimit"))
		})
	}
}

// TestMergeStatesInTheFormOfTheMiddleware promises the tightest state in a form that reports only one limit, from the
// handler, the middleware or one around it.
func TestMergeStatesInTheFormOfTheMiddleware(t *testing.T) {
	t.Parallel()
	b := setup(t)
	config := httplimit.Config{Headers: httplimit.Draft06Headers, Limits: []httplimit.Limit{userLimit}}
	stated := func(own ratelimit.Request) (all []string) {
		header := do(b.limited(t, config, b.merging(t, own)), request(t)).Header()
		for _, name := range []string{"RateLimit-Limit", "RateLimit-Remaining", "RateLimit-Reset"} {
			require.Len(t, header.Values(name), 1, name)
			all = append(all, header.Get(name))
		}
		require.Empty(t, header.Get("RateLimit"))
		return all
	}
	require.Equal(t, []string{"3", "2", "20"}, stated(rpm.For("ada")), "the middleware's")
	require.Equal(t, []string{"60", "0", "60"}, stated(rpm.For("ada").Cost(59)), "the handler's")

	config = httplimit.Config{Headers: httplimit.NoHeaders, Limits: []httplimit.Limit{{Limit: perPlan, Key: user}}}
	requireNoFields(t, do(b.limited(t, config, b.merging(t, rpd.For("ada"))), request(t)).Header())
	trio := httplimit.Config{Headers: httplimit.Draft06Headers, Limits: one(perPlan)}
	wide := limits(httplimit.Limit{Limit: everyone, Global: true})
	for _, form := range []httplimit.Headers{httplimit.Draft06Headers, httplimit.EpochHeaders} {
		wide.Headers = form
		header := do(b.limited(t, trio, b.limited(t, wide, respond())), request(t)).Header()
		require.Equal(t, "100", header.Get("RateLimit-Limit"))
		require.Equal(t, form == httplimit.EpochHeaders, header.Get("X-RateLimit-Limit") == "1000", "in another form it stands alone")
	}
}

// TestMergeWithoutAMiddleware promises the fields of the last decision, and the longest Retry-After.
func TestMergeWithoutAMiddleware(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.take(t, perUser.For("ada").Cost(3))
	for there, want := range map[string]string{"": "20", "40": "40", "3": "20", "Mon, 09 Mar 2026 10:00:40 GMT": "20"} {
		handler := b.merging(t, everyone.Global(), perUser.For("ada"))
		w := do(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Retry-After", there)
			handler.ServeHTTP(w, r)
		}), request(t))
		require.Equal(t, want, w.Header().Get("Retry-After"))
		require.Equal(t, []string{`"perUser";r=0;t=20`}, w.Header().Values("RateLimit"))
		require.Equal(t, []string{`"perUser";q=3;w=60`}, w.Header().Values("RateLimit-Policy"))
	}
}
