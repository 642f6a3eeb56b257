package admin

import (
	"github.com/pgratelimit/pgratelimit/observe/refusals"
	"github.com/pgratelimit/pgratelimit/rules"
)

// Routes returns the last elements of the paths of the pages that are read, and of the forms that are sent.
func (h *Handler) Routes() (read, sent, changes []string) {
	for name, route := range h.routes {
		if route.get != nil {
			read = append(read, name)
		}
		if route.post != nil {
			sent = append(sent, name)
		}
		if route.changes {
			changes = append(changes, name)
		}
	}
	return read, sent, changes
}

// AtMost returns the upper bound that the preview of a rule states: how many refused requests it could have allowed.
func AtMost(before, after rules.Rule, cost float64, sums []refusals.Sum) float64 {
	return effectOf(before, after, refusalBars{Cost: cost}, sums, false).AtMost
}

// The words of the pages.
var (
	Number = number
	Span   = span
	Spell  = func(key string) (text string, codes []string) {
		for _, g := range spell(key) {
			if g.Code {
				codes = append(codes, g.Text)
			} else {
				text += g.Text
			}
		}
		return text, codes
	}
)
