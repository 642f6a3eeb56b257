package serve

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// plans holds the names of the plans that stored rules have. It is an observer of a Set, and reads them after each load.
type plans struct {
	store *rules.Store
	names atomic.Pointer[[]string]
}

// Observe implements ratelimit.Observer. If the names cannot be read, every plan passes until the next load.
func (p *plans) Observe(ctx context.Context, event ratelimit.Event) {
	if loaded, is := event.(ratelimit.RulesLoaded); !is || loaded.Err != nil {
		return
	}
	var names []string
	if list, err := p.store.List(ctx, rules.ListQuery{Key: new("")}); err == nil { // no override has the empty key
		for _, s := range list.Rules {
			if s.Rule.Plan != "" {
				names = append(names, s.Rule.Plan)
			}
		}
	}
	slices.Sort(names)
	names = slices.Compact(names)
	p.names.Store(&names)
}

// check returns an error for a plan that no stored rule has, if there are rules for other plans: its name may be misspelled.
// A plan with a rule for another limit passes, because a limit may have one rule for several plans.
func (p *plans) check(plan string) error {
	names := p.names.Load()
	if plan == "" || names == nil || len(*names) == 0 || slices.Contains(*names, plan) {
		return nil
	}
	some := (*names)[:min(len(*names), 20)]
	return fmt.Errorf("no stored rule has the plan %.80q; the rules have %s; leave plan out for the rule without a plan", plan, strings.Join(some, ", "))
}
