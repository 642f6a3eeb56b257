package rules

import (
	"context"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/words"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Outlook says, for people, what a change of policy at an instant leaves in a bucket, and until when: in one with so
// many tokens left, or by default in one that is used up and in one that is half full. If a policy is nil, because no
// rule is known that decides, it says what the answer depends on. A change of the kind fills the bucket. The answer is
// empty if the policies have the same quota, if one is invalid, and for concurrency, whose slots stay held.
func Outlook(before, after ratelimit.Policy, change ratelimit.OnChange, at time.Time, left ...float64) string {
	if before == nil || after == nil {
		return "what a key will have depends on its plan or on the code, which the tables do not have"
	}
	was, known := numbersOf(before)
	is, valid := numbersOf(after)
	slots := was.Kind == ratelimit.KindConcurrency || is.Kind == ratelimit.KindConcurrency
	if !known || !valid || slots || was.Capacity == is.Capacity && was.Kind == is.Kind && change != ratelimit.ResetTokens {
		return ""
	}
	if len(left) == 0 {
		left = []float64{0, was.Capacity / 2}
	}
	var text strings.Builder
	end := ""
	for i, tokens := range left {
		state, ok := leftAfter(before, after, change, at, was.Capacity-tokens)
		switch {
		case !ok:
			return ""
		case i == 0:
			fmt.Fprintf(&text, "a key with %s of %s left will have %s of %s",
				thousandths(tokens), thousandths(was.Capacity), thousandths(state.Remaining), thousandths(is.Capacity))
			end = until(&is, state, at)
		default:
			fmt.Fprintf(&text, ", and one with %s left will have %s", thousandths(tokens), thousandths(state.Remaining))
		}
	}
	return text.String() + end
}

// thousandths returns tokens for people, rounded down.
func thousandths(tokens float64) string { return words.Number(math.Floor(tokens*1000) / 1000) }

// until says until when tokens that were left are all that there is.
func until(n *ratelimit.Spec, left ratelimit.State, at time.Time) string {
	if left.ResetAfter == 0 { // it is full
		return ""
	}
	switch n.Kind {
	case ratelimit.KindCalendarWindow:
		return ", until " + second(at.Add(left.ResetAfter))
	case ratelimit.KindFixedWindow:
		return ", until the window ends, within " + words.Span(n.Period)
	case ratelimit.KindSlidingWindow:
		return ", and what was used counts for " + words.Span(n.Period)
	case ratelimit.KindTokenBucket, ratelimit.KindConcurrency:
	}
	return "; from then on tokens arrive at " + words.Rate(n.Rate, n.Period)
}

// leftAfter returns the state after the change of a bucket of which so much was used just before it.
func leftAfter(before, after ratelimit.Policy, change ratelimit.OnChange, at time.Time,
	used float64,
) (left ratelimit.State, ok bool) {
	limit, err := ratelimit.NewLimit("outlook", before)
	revisions := []ratelimit.Revision{{Policy: before}, {EffectiveAt: at, Policy: after, OnChange: change}}
	changeByRow(revisions, before)
	var s *ratelimit.Simulation
	if err == nil {
		var ruling *ratelimit.Ruling
		ruling, err = ratelimit.NewRuling(limit, ratelimit.RulingConfig{Name: "outlook", Revisions: revisions})
		if err == nil {
			s, err = ratelimit.NewSimulation(ratelimit.Config{Policies: always{ruling}})
		}
	}
	for _, step := range []struct {
		at   time.Time
		cost float64
	}{{at.Add(-time.Microsecond), used}, {at, 0}} {
		var d ratelimit.Decision
		if err == nil {
			if d, err = s.At(step.at).Take(context.Background(), limit.For("key").Cost(step.cost)); err == nil {
				left = d.States[0]
			}
		}
	}
	return left, err == nil
}

// always are the policies of a limit with one ruling.
type always struct{ ruling *ratelimit.Ruling }

func (a always) RulingFor(ratelimit.Limit, string, string) *ratelimit.Ruling { return a.ruling }
func (a always) RulingsOf(string) []*ratelimit.Ruling                        { return []*ratelimit.Ruling{a.ruling} }
