package admin

import (
	"cmp"
	"errors"
	"strings"

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

// sentenceOf returns the fault of a form as a sentence for the operator.
func sentenceOf(err error) string {
	if sentence, isForm := strings.CutPrefix(err.Error(), errForm.Error()+": "); isForm && errors.Is(err, errForm) {
		return sentence
	}
	return faultOf(err)
}
