package rules

import (
	"context"
	"slices"
	"sync/atomic"

	"github.com/pgratelimit/pgratelimit/internal/arg"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// unmatched holds the plans of one limit that were reported as a [ratelimit.PlanWithoutRule], up to maxCompiled.
type unmatched struct{ plans atomic.Pointer[[]string] }

// add adds plan, and reports whether it is new and there was room for it.
func (u *unmatched) add(plan string) bool {
	for {
		known := u.plans.Load()
		var plans []string
		if known != nil {
			plans = *known
		}
		if slices.Contains(plans, plan) || len(plans) == maxCompiled {
			return false
		}
		more := append(slices.Clone(plans), plan)
		if u.plans.CompareAndSwap(known, &more) {
			return true
		}
	}
}

// checkPlan tells the Observer if plan has no rule, although other plans of the limit have one. A request without a plan
// may have a rule of its own, which is then the default.
func (s *Set) checkPlan(of *limitRules, plan string) {
	if arg.IsNil(s.config.Observer) || len(of.bases) == 0 || of.bases[plan] != nil || plan == "" && !of.other.empty {
		return
	}
	if of.noted.unmatched.add(plan) {
		s.config.Observer.Observe(context.Background(), ratelimit.PlanWithoutRule{Limit: of.name, Plan: plan})
	}
}
