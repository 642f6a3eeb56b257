package httplimit

import (
	"net/http"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/guard"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/adaptive"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
)

// Transport is an http.RoundTripper for programs that call an upstream. It reports the upstream's responses to package
// adaptive, so that all processes together slow down when the upstream throttles, and pause for its Retry-After.
//
//	client := &http.Client{Transport: &httplimit.Transport{
//		Limiter: limiter, Upstreams: upstreams, Take: true,
//		Request: func(*http.Request) (ratelimit.Request, bool) { return Upstream.For(account), true },
//	}}
//
// Outcome decides which responses throttle, by default [OutcomeOf]. It reports neither a request without a response nor
// a limit that isn't one of the Upstreams' limits. The Transport doesn't read bodies, change responses, or send a
// request again.
type Transport struct {
	// Limiter decides about the requests. A nil Limiter only passes requests on.
	Limiter *ratelimit.Limiter
	// Upstreams receives the reports: the Policies of the Limiter. If it is nil, nothing is reported.
	Upstreams *adaptive.Policies
	// Request returns a request's limit and cost, or false if it has none, and is then neither charged nor reported. It
	// may be called on many goroutines at once, and must not change the request. A nil Request means none.
	Request func(*http.Request) (ratelimit.Request, bool)
	// Take takes from the limit before it sends a request. If the limit refuses or the call fails, the request isn't sent;
	// a refusal is a *ratelimit.LimitedError with the wait. Defaults to false: the program takes by itself, for example in
	// a transaction or by a reservation.
	Take bool
	// Outcome returns what a response says, for an upstream with signs of its own. It must not read the body, and may call
	// OutcomeOf for other responses. Defaults to OutcomeOf.
	Outcome func(*http.Response) adaptive.Outcome
	// Base sends the requests. Defaults to nil: http.DefaultTransport.
	Base http.RoundTripper
}

var _ http.RoundTripper = (*Transport)(nil)

// RoundTrip sends a request and reports its response.
func (t *Transport) RoundTrip(r *http.Request) (*http.Response, error) {
	base := t.base()
	if t.Limiter == nil || t.Request == nil {
		return base.RoundTrip(r)
	}
	request, asks := t.Request(r)
	if !asks {
		return base.RoundTrip(r)
	}
	if t.Take {
		if err := t.Limiter.Require(r.Context(), request); err != nil {
			if r.Body != nil { // a RoundTripper always closes the body
				_ = r.Body.Close()
			}
			return nil, err
		}
	}
	response, err := base.RoundTrip(r)
	if err != nil {
		return response, err
	}
	t.report(r, request, response)
	return response, nil
}

// CloseIdleConnections closes the idle connections of Base, if it has such a method.
func (t *Transport) CloseIdleConnections() {
	if closes, ok := t.base().(interface{ CloseIdleConnections() }); ok {
		closes.CloseIdleConnections()
	}
}

func (t *Transport) base() http.RoundTripper {
	if t.Base == nil {
		return http.DefaultTransport
	}
	return t.Base
}

// report reports the response if the limit adapts. An error goes to the Observer, because the response itself is good.
func (t *Transport) report(r *http.Request, request ratelimit.Request, response *http.Response) {
	if !t.Upstreams.Adapts(request.Limit()) || response == nil {
		return
	}
	outcome := t.Outcome
	if outcome == nil {
		outcome = OutcomeOf
	}
	if err := t.Upstreams.Report(t.Limiter, request, outcome(response)); err != nil {
		t.Limiter.Observe(r.Context(), event.Failed{
			Verb: "report", Limit: request.Limit().Name(), Err: err,
			Began: time.Now(),
		})
	}
}

// statusOverloaded is the status of Anthropic's API for an overload.
const statusOverloaded = 529

// OutcomeOf returns the outcome that a response's status and fields show. Throttled are
//
//	429            always
//	503            with a Retry-After
//	529            always, as Anthropic's API answers when it is overloaded
//	403            with a Retry-After, or with X-RateLimit-Remaining: 0, as GitHub's API answers
//
// The wait is Retry-After, in seconds (1.5, too) or as a date. Without it, it's the longest t of the field RateLimit,
// which [DraftHeaders] has, or the time until X-RateLimit-Reset if X-RateLimit-Remaining is 0.
func OutcomeOf(response *http.Response) adaptive.Outcome {
	header, now := response.Header, time.Now()
	wait, states := guard.UpstreamWait(header, now)
	usedUp := strings.TrimSpace(header.Get("X-RateLimit-Remaining")) == "0"
	switch code := response.StatusCode; {
	case code == http.StatusTooManyRequests, code == statusOverloaded,
		code == http.StatusServiceUnavailable && states,
		code == http.StatusForbidden && (states || usedUp):
	default:
		return adaptive.Outcome{}
	}
	if !states {
		wait = guard.UpstreamWindow(header)
	}
	if !states && wait == 0 && usedUp {
		wait = guard.UntilReset(header, now)
	}
	return adaptive.Outcome{Throttled: true, RetryAfter: max(wait, 0)}
}
