package httplimit

import (
	"context"
	"net/http"

	"github.com/pgratelimit/pgratelimit/internal/guard"
)

// decide asks the limits, all or nothing.
func (m *middleware) decide(r *http.Request, asks []ask) (*Admission, *Refusal) {
	admission := &Admission{middleware: m}
	if len(asks) == 0 {
		return admission, nil
	}
	requests := requests(asks)
	outcome := m.gate.Decide(r.Context(), m.config.Route, requests, guard.Take)
	switch {
	case outcome.Result == guard.Allowed:
		admission.charges, admission.lease, admission.taken = charged(asks, outcome.Decision), outcome.Lease, requests
	case outcome.Passes:
	case outcome.Result == guard.Refused:
		return nil, new(newRefusal(outcome.Decision, m.jitter(asks, outcome.RetryAfter)))
	default:
		return nil, new((&fault{result: outcome.Result, err: outcome.Err}).refusal())
	}
	return admission, nil
}

// hold keeps the slots of a request until release. It returns the context for the handler.
func (m *middleware) hold(ctx context.Context, admission *Admission) (held context.Context, release func()) {
	return m.gate.Hold(ctx, m.config.Route, admission.lease)
}
