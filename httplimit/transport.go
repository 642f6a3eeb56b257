package httplimit

import (
	"net/http"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/upstream"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Transport is the other side of this package: an http.RoundTripper for programs that call an upstream. It reports to a
// limit with a [ratelimit.Adaptive] policy what the upstream answers, so that all processes together slow down when it
// throttles, and leave it alone as long as it asks them to.
//
//	client := &http.Client{Transport: &httplimit.Transport{
//		Limiter: limiter, Take: true,
//		Request: func(*http.Request) (ratelimit.Request, bool) { return Upstream.For(account), true },
//	}}
//
// A response with status 429 is throttled, and so is one with 503 and a Retry-After, in seconds or as a date. Every other
// response is not, whatever its status. A request that got no response is not reported, and of a limit with another policy
// nothing is. Bodies are not read, responses come back as they are, and nothing is sent again.
type Transport struct {
	// Limiter is who is told. Defaults to nil: requests just go through.
	Limiter *ratelimit.Limiter
	// Request returns what a request takes of which limit, and false when none: it is neither reported nor taken then. It
	// may be called on many goroutines at once, and must not change the request. Defaults to nil: none is.
	Request func(*http.Request) (ratelimit.Request, bool)
	// Take takes from the limit before a request is sent: where it refuses, the request is not sent, and the error of the
	// round trip is a *ratelimit.LimitedError, which says how long to wait; where it fails, that error. Defaults to false:
	// the program has taken by itself, as in a transaction or by a reservation.
	Take bool
	// Base sends the requests. Defaults to nil: http.DefaultTransport.
	Base http.RoundTripper
}

var _ http.RoundTripper = (*Transport)(nil)

// RoundTrip sends a request and reports what came of it.
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
			if r.Body != nil { // which a RoundTripper closes, whatever it returns
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

// CloseIdleConnections closes those of the Base, when it has any, as http.Client does by this name.
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

// report reports the response, where the limit adapts. What cannot be reported is told the Observer: the response is good.
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
