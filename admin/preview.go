package admin

import (
	"cmp"
	"errors"
	"math"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/words"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/refusals"
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
	capacity := func(r rules.Rule) string {
		return number(capacityOf(r))
	}
	debt := func(r rules.Rule) string {
		switch {
		case r.Kind == rules.SlidingWindow || r.Kind == rules.Concurrency:
			return "nothing"
		case r.MaxReserved == nil && r.Kind == rules.CalendarWindow:
			return number(r.Rate)
		case r.MaxReserved == nil:
			return "no bound"
		}
		return number(*r.MaxReserved)
	}
	rate := func(r rules.Rule) string {
		switch {
		case r.Kind == rules.Concurrency:
			return "none"
		case r.Rate == 0:
			return "not known"
		case r.Kind == rules.CalendarWindow:
			return number(r.Rate) + " per " + string(r.Resets)
		}
		return number(r.Rate) + " per " + words.Period(r.Period)
	}
	before, after = before.WithDefaults(), after.WithDefaults()
	add("Kind", string(before.Kind), string(after.Kind))
	add("Rate", rate(before), rate(after))
	add("Capacity", capacity(before), capacity(after))
	add("Most that may be owed", debt(before), debt(after))
	add("Rows of a bucket", whole(before.Shards), whole(after.Shards))
	add("Start of a window", clock(before.Start), clock(after.Start))
	add("Slices", orNone(before.Slices), orNone(after.Slices))
	add("Windows", windows(before), windows(after))
	add("Slots", orNone(before.Most), orNone(after.Most))
	add("Lease", leaseText(before.Lease), leaseText(after.Lease))
	add("Price", price(before), price(after))
	add("Mode", string(cmp.Or(before.Mode, ratelimit.On)), string(cmp.Or(after.Mode, ratelimit.On)))
	add("Unit", cmp.Or(before.Unit, "none"), cmp.Or(after.Unit, "none"))
	add("Description", cmp.Or(before.Description, "none"), cmp.Or(after.Description, "none"))
	return changes
}

const (
	mostSums = 1000   // keys that a preview counts one by one
	lookSums = 80_000 // rows of refusals that it looks at
)

// effect is what a rule would have meant for what was refused in the last hour, as far as sums can tell.
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
	// OfAll is whether the refusals are those of all plans, and the rule is for one.
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
	slower, faster := paceOf(after) < paceOf(before), paceOf(after) > paceOf(before)
	smaller, larger := capacityOf(after) < capacityOf(before), capacityOf(after) > capacityOf(before)
	opened := isOn(before) && !isOn(after)
	e.Lowered = (slower || smaller || (!isOn(before) && isOn(after))) && !opened
	e.Raised = (faster || larger || opened) && !e.Lowered
	most := math.Inf(1)
	if !opened {
		most = mostGiven(after, hourly*time.Minute)
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

// mostGiven returns the most that a bucket can give in a span. Slots come back whenever their holders like: there is no bound.
func mostGiven(r rules.Rule, span time.Duration) float64 {
	periods := float64(span) * paceOf(r) / r.Rate
	switch r.Kind {
	case rules.Concurrency:
		return math.Inf(1)
	case rules.FixedWindow:
		periods = math.Floor(periods) + 1
	case rules.SlidingWindow:
		return r.Rate * (math.Floor(periods) + 1)
	case rules.CalendarWindow:
		return r.Rate * (math.Floor(periods) + 2)
	case rules.TokenBucket:
	}
	return capacityOf(r) + r.Rate*periods
}

// paceOf returns how many tokens arrive in a nanosecond, and of slots how many come back when none is given back.
func paceOf(r rules.Rule) float64 {
	r = r.WithDefaults()
	switch r.Kind {
	case rules.Concurrency:
		return float64(r.Most) / float64(r.Lease)
	case rules.CalendarWindow:
		days := map[ratelimit.Calendar]float64{ratelimit.Daily: 1, ratelimit.Weekly: 7, ratelimit.Monthly: 30, ratelimit.Quarterly: 91, ratelimit.Yearly: 365}
		return r.Rate / (days[r.Resets] * float64(ratelimit.Day))
	case rules.TokenBucket, rules.FixedWindow, rules.SlidingWindow:
	}
	return r.Rate / float64(r.Period)
}

func capacityOf(r rules.Rule) float64 {
	switch {
	case r.Kind == rules.Concurrency:
		return float64(r.Most)
	case r.Capacity == nil:
		return r.Rate
	}
	return *r.Capacity
}

// isOn reports whether a rule refuses anybody.
func isOn(r rules.Rule) bool { return r.Mode == "" || r.Mode == ratelimit.On }

// sentenceOf returns what is wrong with a form, for people.
func sentenceOf(err error) string {
	if sentence, isForm := strings.CutPrefix(err.Error(), errForm.Error()+": "); isForm && errors.Is(err, errForm) {
		return sentence
	}
	return faultOf(err)
}
