package httplimit

import (
	"context"

	"github.com/pgratelimit/pgratelimit/internal/guard"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// heldLease is what a request holds while its handler runs.
type heldLease struct {
	ratelimit.Lease

	shadow bool // its rule is watched, and must change nothing for the request
}

// hold notes a lease, if it is one.
func (a *Admission) hold(lease ratelimit.Lease, shadow bool) {
	if lease.ID != "" {
		a.leases = append(a.leases, heldLease{lease, shadow})
	}
}

// hold keeps what the request holds until release, and returns the context for its handler, which ends when a lease of an
// enforced rule is lost.
func (m *middleware) hold(ctx context.Context, admission *Admission) (held context.Context, release func()) {
	held = ctx
	var releases []func()
	for _, lease := range admission.leases {
		kept, end := guard.Hold(ctx, m.limiter, lease.Lease, m.config.DecisionTimeout)
		if !lease.shadow { // there is one at most: the enforced rules are asked in one call
			held = kept
		}
		releases = append(releases, func() {
			if lost := end(); lost != nil {
				m.tell(ctx, Outcome{Result: LeaseLost, Shadow: lease.shadow, Limits: lease.limits(), Err: lost})
			}
		})
	}
	return held, func() {
		for _, release := range releases {
			release()
		}
	}
}

// limits returns the names of the limits whose slots are held.
func (l *heldLease) limits() (names []string) {
	for i := range l.States {
		if guard.IsHeld(l.States[i].Limit) {
			names = append(names, l.States[i].Limit.Name())
		}
	}
	return names
}
