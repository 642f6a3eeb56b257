package httplimit

import (
	"context"

	"github.com/pgratelimit/pgratelimit/internal/guard"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// hold keeps the slots of a request until release. It returns the context for the handler, which ends when a lease of
// an enforced limit is lost.
func (m *middleware) hold(ctx context.Context, admission *Admission) (held context.Context, release func()) {
	lease := admission.lease
	held, end := guard.Hold(ctx, m.limiter, lease, m.config.DecisionTimeout)
	return held, func() {
		if lost := end(); lost != nil {
			limit, enforced := guard.Held(lease.Decision)
			m.tell(ctx, ratelimit.Answered{Result: guard.LeaseLost, Shadow: !enforced, Limit: limit, Err: lost})
		}
	}
}
