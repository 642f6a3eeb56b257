package admin

import (
	"cmp"
	"errors"
	"math"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/observe/refusals"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// change is what a rule says otherwise than the one before.
type change struct{ What, Before, After string }

// changesOf returns what differs, in words.
func changesOf(before, after rules.Rule) (changes []change) {
	add := func(what, before, after string) {
		if before != after {
			changes = append(changes, change{what, before, after})
		}
	}
	add("Policy", policyText(before.Policy), policyText(after.Policy))
	add("Mode", string(cmp.Or(before.Mode, ratelimit.On)), string(cmp.Or(after.Mode, ratelimit.On)))
	add("Unit", cmp.Or(before.Unit, "none"), cmp.Or(after.Unit, "none"))
	add("Description", cmp.Or(before.Description, "none"), cmp.Or(after.Description, "none"))
	return changes
}

// policyText returns a policy for people.
func policyText(policy ratelimit.Policy) string {
	if policy == nil {
		return "not known"
	}
	return inWords(policy)
}

// numbersOf returns the numbers of a rule's policy, and 0 for each of a policy that cannot be.
func numbersOf(r rules.Rule) ratelimit.Spec {
	limit, err := ratelimit.NewLimit("policy", r.Policy)
	if err != nil {
		return ratelimit.Spec{}
	}
	return limit.Spec()
}

const (
	mostSums = 1000   // keys that a preview counts one by one
	lookSums = 80_000 // rows of refusals that it looks at
)

// effect estimates from sums how many refusals of the last hour a rule would have changed.
type effect struct {
	// Refused is how often, and Cost how many tokens.
	Refused int64
	Cost    float64
	// Raised is whether the rule gives more and nothing less. AtMost is how many of the tokens it could have given then:
	// no key can be given more than its capacity and what arrives in the time.
	Raised bool
	AtMost float64
	// Keys is how many keys were counted one by one. Apart is how many tokens of the others there are, all of which count.
	Keys  int
	Apart float64
	// Lowered is whether the rule gives less of something, of which refusals cannot tell.
	Lowered bool
	// OfAll reports whether the refusals are of all plans while the rule is for one.
	OfAll bool
	// Late is from when on refusals were counted where that is not an hour ago. Zero: it is.
	Late time.Time
}

// effectOf bounds what a rule would have meant. The tokens that a bucket gives in a span are at most
//
//	capacity + rate * span / period                 token bucket
//	capacity + rate * windows begun in the span     fixed window
//	rate * (1 + whole periods in the span)          sliding window
//	rate * (2 + whole windows in the span)          calendar window
//
// so of what a key was refused no more could have been given. It does not count what the key was given.
func effectOf(before, after rules.Rule, all refusalBars, sums []refusals.Sum, ofAll bool) effect {
	e := effect{Refused: all.Refused, Cost: all.Cost, OfAll: ofAll}
	if all.Late {
		e.Late = all.Since
	}
	old, next := numbersOf(before), numbersOf(after)
	slower, faster := paceOf(next) < paceOf(old), paceOf(next) > paceOf(old)
	smaller, larger := next.Capacity < old.Capacity, next.Capacity > old.Capacity
	opened := isOn(before) && !isOn(after)
	e.Lowered = (slower || smaller || (!isOn(before) && isOn(after))) && !opened
	e.Raised = (faster || larger || opened) && !e.Lowered
	most := math.Inf(1)
	if !opened {
		most = mostGiven(next, spanOf("1h").length())
	}
	e.Apart = all.Cost
	for _, sum := range sums {
		if sum.Key == "" { // of keys that were not told apart, and of everybody's bucket
			continue
		}
		e.Keys++
		e.Apart -= sum.Cost
		e.AtMost += math.Min(sum.Cost, most)
	}
	e.Apart = math.Max(e.Apart, 0)
	e.AtMost = math.Min(e.AtMost+e.Apart, all.Cost)
	return e
}

// mostGiven returns the most that a bucket can give in a span. Slots come back whenever their holders like: there is no
// bound.
func mostGiven(n ratelimit.Spec, span time.Duration) float64 {
	periods := float64(span) / float64(n.Period)
	switch n.Kind {
	case ratelimit.KindConcurrency:
		return math.Inf(1)
	case ratelimit.KindFixedWindow:
		periods = math.Floor(periods) + 1
	case ratelimit.KindSlidingWindow:
		return n.Rate * (math.Floor(periods) + 1)
	case ratelimit.KindCalendarWindow:
		return n.Rate * (math.Floor(periods) + 2)
	case ratelimit.KindTokenBucket:
	}
	return n.Capacity + n.Rate*periods
}

// paceOf returns how many tokens arrive in a nanosecond, and of slots how many come back when none is given back.
func paceOf(n ratelimit.Spec) float64 { return n.Rate / float64(max(n.Period, 1)) }

// isOn reports whether a rule is enforced.
func isOn(r rules.Rule) bool { return r.Mode == "" || r.Mode == ratelimit.On }

// sentenceOf returns the fault of a form as a sentence for the operator.
func sentenceOf(err error) string {
	if sentence, isForm := strings.CutPrefix(err.Error(), errForm.Error()+": "); isForm && errors.Is(err, errForm) {
		return sentence
	}
	return faultOf(err)
}
