package httplimit

import (
	"net/http"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/upstream"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Transport is an http.RoundTripper for programs that call an upstream. It reports the responses of the upstream to a
// limit with a [ratelimit.Adaptive] policy, so that all processes together slow down when the upstream throttles, and
// pause for as long as its Retry-After asks.
//
//	client := &http.Client{Transport: &httplimit.Transport{
//		Limiter: limiter, Take: true,
//		Request: func(*http.Request) (ratelimit.Request, bool) { return Upstream.For(account), true },
//	}}
//
// A response with status 429 counts as throttled, and so does a 503 with a Retry-After, in seconds or as a date. All
// other responses do not. A request without a response is not reported. It reports nothing for a limit with another
// policy. It does not read bodies, change responses, or send a request again.
type Transport struct {
	// Limiter receives the reports. A nil Limiter only passes requests on.
	Limiter *ratelimit.Limiter
	// Request returns the limit and the cost of a request, and false if it has none: then the request is neither
	// charged nor reported. It may be called on many goroutines at once, and must not change the request. A nil Request
	// means none.
	Request func(*http.Request) (ratelimit.Request, bool)
	// Take takes from the limit before it sends a request. If the limit refuses, the request is not sent, and the error
	// is a *ratelimit.LimitedError with the wait. If the call fails, the request is not sent either. By default the
	// program takes by itself, for example in a transaction or by a reservation.
	Take bool
	// Base sends the requests. Defaults to nil: http.DefaultTransport.
	Base http.RoundTripper
}

var _ http.RoundTripper = (*Transport)(nil)

// RoundTrip sends a request and reports its response.
func (t *Transport) RoundTrip(r *http.Request) (*http.Response, error) {
	base := t.Base
	if base == nil {
		base = http.DefaultTransport
	}
	if t.Limiter == nil || t.Request == nil {
		return base.RoundTrip(r)
	}
	request, asks := t.Request(r)
	if !asks {
		return base.RoundTrip(r)
	}
	if t.Take {
		if err := t.take(r, request); err != nil {
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
	base := t.Base
	if base == nil {
		base = http.DefaultTransport
	}
	if closes, ok := base.(interface{ CloseIdleConnections() }); ok {
		closes.CloseIdleConnections()
	}
}

// take returns nil when the request may be sent.
func (t *Transport) take(r *http.Request, request ratelimit.Request) error {
	d, err := t.Limiter.Take(r.Context(), request)
	if err != nil {
		return err
	}
	return d.Err()
}

// report reports the response if the limit adapts. An error goes to the Observer, because the response itself is good.
func (t *Transport) report(r *http.Request, request ratelimit.Request, response *http.Response) {
	if _, adapts := t.Limiter.Resolve(request).Policy().(ratelimit.Adaptive); !adapts || response == nil {
		return
	}
	if err := t.Limiter.Report(r.Context(), request, outcomeOf(response)); err != nil {
		t.Limiter.Observe(r.Context(), ratelimit.Failed{Verb: "report", Limit: request.Limit().Name(), Err: err, Began: time.Now()})
	}
}

// outcomeOf returns what the response says.
func outcomeOf(response *http.Response) ratelimit.Outcome {
	wait, states := upstream.Wait(response.Header, time.Now())
	switch {
	case response.StatusCode == http.StatusTooManyRequests,
		response.StatusCode == http.StatusServiceUnavailable && states:
		return ratelimit.Outcome{Throttled: true, RetryAfter: max(wait, 0)}
	}
	return ratelimit.Outcome{}
}
