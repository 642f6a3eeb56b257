package httplimit

import (
	"cmp"
	"context"
	"errors"
	"net/http"

	"github.com/pgratelimit/pgratelimit/internal/guard"
	"github.com/pgratelimit/pgratelimit/internal/telemetry"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// decide asks the limits, all or nothing.
func (m *middleware) decide(r *http.Request, asks []ask) (*Admission, *Refusal) {
	admission := &Admission{middleware: m}
	if len(asks) == 0 {
		return admission, nil
	}
	requests := requests(asks)
	lease, err := m.take(r.Context(), requests)
	d := lease.Decision
	answered := ratelimit.Answered{Result: guard.Allowed, Limit: asks[0].limit.Name(), Err: err}
	var refusal *Refusal
	switch {
	case err != nil:
		fault := &fault{result: guard.Result(r.Context(), err, m.config.FailOpen), err: err}
		if fault.result == guard.TooCostly {
			fault.limit = m.exceeded(r.Context(), asks)
			answered.Limit = cmp.Or(fault.limit.Name(), answered.Limit)
		}
		answered.Result, answered.Shadow = fault.result, !guard.IsEnforced(m.limiter, requests)
		if fault.result != guard.FailedOpen && !answered.Shadow {
			refusal = new(fault.refusal())
		}
	case !d.Allowed:
		refusal = new(newRefusal(d, m.jitter(asks, d.RetryAfter)))
		answered.Result, answered.Limit = guard.Refused, refusal.Violated[0]
	default:
		admission.charges, admission.lease, admission.taken = charged(asks, d), lease, requests
	}
	m.tell(r.Context(), answered)
	if _, wouldRefuse := telemetry.Refusing(d); len(wouldRefuse) > 0 {
		m.tell(r.Context(), ratelimit.Answered{Result: guard.Refused, Shadow: true, Limit: wouldRefuse[0]})
	}
	return admission, refusal
}

// exceeded returns the first limit whose capacity is smaller than its cost, with the policy of that moment, or the zero
// Limit if it finds none, because the policy may have changed. It skips limits that are not enforced; Check reports
// these without SQL.
func (m *middleware) exceeded(ctx context.Context, asks []ask) ratelimit.Limit {
	for i := range asks {
		request := asks[i].request()
		limit := m.limiter.Resolve(request)
		if asks[i].cost <= limit.Capacity() {
			continue
		}
		if _, err := m.limiter.Check(ctx, request); errors.Is(err, ratelimit.ErrCostExceedsCapacity) {
			return limit
		}
	}
	return ratelimit.Limit{}
}

// take asks the core within the time that a decision may take. The lease has an ID if slots are held.
func (m *middleware) take(ctx context.Context, requests []ratelimit.Request) (ratelimit.Lease, error) {
	ctx, cancel := guard.Deciding(ratelimit.WithRoute(ctx, m.config.Route), m.config.DecisionTimeout)
	defer cancel()
	return guard.Take(ctx, m.limiter, requests)
}
