package httplimit

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/guard"
	"github.com/pgratelimit/pgratelimit/internal/telemetry"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// decide asks the enforced rules, all or nothing.
func (m *middleware) decide(r *http.Request, asks []ask) (*Admission, *Refusal) {
	admission := &Admission{middleware: m}
	if len(asks) == 0 {
		return admission, nil
	}
	began := time.Now()
	lease, err := m.take(r.Context(), asks, m.config.Shadow)
	d := lease.Decision
	outcome := Outcome{Result: Allowed, Shadow: m.config.Shadow, Limits: names(asks), Decision: d, Err: err, Elapsed: time.Since(began)}
	var refusal *Refusal
	switch {
	case err != nil:
		fault := &fault{result: m.failure(r.Context(), err), err: err}
		if fault.result == TooCostly {
			fault.limit = m.exceeded(r.Context(), asks)
			if limits := fault.limits(); limits != nil {
				outcome.Limits = limits
			}
		}
		outcome.Result, admission.undecided = fault.result, fault.result != TooCostly
		if outcome.Result != FailedOpen {
			answer := fault.refusal()
			refusal = &answer
		}
	case !d.Allowed:
		answer := m.refusal(asks, d)
		refusal, outcome.Result, outcome.Limits = &answer, Refused, answer.Violated
	default:
		admission.charges = charged(asks, d)
		admission.hold(lease, m.config.Shadow)
		if !m.config.Shadow {
			admission.decision = d
		}
	}
	m.tell(r.Context(), outcome)
	if _, tried := telemetry.Refusing(d); len(tried) > 0 {
		m.tell(r.Context(), Outcome{Result: Refused, Shadow: true, Limits: tried, Decision: d, Elapsed: outcome.Elapsed})
	}
	if m.config.Shadow {
		return admission, nil
	}
	return admission, refusal
}

// exceeded returns the first limit that refuses its cost for ever, with the policy that says so, and the zero Limit where
// none is found: the policy may have changed since. One that holds too little and is not enforced is not in the way, which
// Check tells without asking the database.
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

// take asks the core, which answers with a lease where slots are held, within the time a decision may take.
func (m *middleware) take(ctx context.Context, asks []ask, shadow bool) (ratelimit.Lease, error) {
	if shadow {
		ctx = ratelimit.WithShadow(ctx)
	}
	ctx, cancel := context.WithTimeout(ratelimit.WithRoute(ctx, m.config.Route), m.config.DecisionTimeout)
	defer cancel()
	return guard.Take(ctx, m.limiter, requests(asks))
}

// failure says what an error of the core makes of a request. ctx is the request's, without our timeout.
func (m *middleware) failure(ctx context.Context, err error) Result {
	return Result(guard.Result(ctx, err, m.config.FailOpen))
}
