package admin

import (
	"net/http"

	"github.com/pgratelimit/pgratelimit/internal/inspect"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// nextPolicy is what an override would change of a key on a plan: its policy before and after, in words, and what the
// key will have.
type nextPolicy struct{ Plan, Before, After, Outlook string }

// previewOverride shows what an override would do, and changes nothing.
func (v *visit) previewOverride() {
	query := v.r.URL.Query()
	if v.store == nil {
		v.problem(http.StatusNotFound, wrong("%s", noRules), query.Get("limit"))
		return
	}
	v.keyPage(query)
}

// foresee compares the filled-in override with what decides on the key now.
func (v *visit) foresee(body *keyBody, limit ratelimit.Limit) {
	o, span, err := form(body.Form).override()
	if err == nil {
		if span > 0 {
			o.Until = body.Now.Add(span)
		}
		err = o.Validate()
	}
	if err == nil {
		err = (&rules.Changes{Override: []rules.Override{o}}).CheckKinds(body.Rules.Shows.Rules, body.Now)
	}
	if err != nil {
		body.Problem = sentenceOf(err)
		return
	}
	body.Says = o.String()
	levels := body.State.Shows.OnPlans
	if level := body.State.Shows.Level; level != nil || len(levels) == 0 {
		levels = []inspect.PlanLevel{{Plan: body.Plan, Level: level}}
	}
	for _, l := range levels {
		var before ratelimit.Policy
		var left []float64
		if l.Level != nil {
			before = l.Policy.Policy
			if l.Tokens >= 0 { // otherwise it owes
				left = []float64{l.Tokens}
			}
		}
		after := o.PolicyOn(l.Plan, func(plan string) ratelimit.Policy {
			if policy := rules.PolicyIn(body.Rules.Shows.Rules, body.Limit, plan, body.Now); policy != nil {
				return policy
			}
			return limit.Policy()
		})
		body.Next = append(body.Next, nextPolicy{
			l.Plan, policyText(before), policyText(after),
			rules.Outlook(before, after, o.OnChange, body.Now, left...),
		})
	}
}
