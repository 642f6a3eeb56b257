// Package telemetry holds the common terms of logs, metrics and traces for the events of a Limiter: the names of results and of
// errors, and the text of an error without secrets.
package telemetry

import (
	"errors"
	"iter"
	"strings"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Results of a request to one limit. Refused, contended (the call gave up) and failed requests are counted separately.
const (
	Allowed   = "allowed"
	Reserved  = "reserved"  // allowed, by Reserve
	Refused   = "refused"   // this limit refused
	Vetoed    = "vetoed"    // this limit had enough, another limit of the call refused
	Contended = "contended" // every attempt conflicted; neither allowed nor refused
	Failed    = "failed"    // the store did not answer; neither allowed nor refused

	Paused = "paused" // this limit is paused, and refused for that
	Off    = "off"    // the rule of this limit is off, so that it was not asked

	ShadowRefused = "shadow_refused" // this limit would have refused, if it were enforced
	ShadowPaused  = "shadow_paused"  // so it would, because it is paused
)

// Request is what became of a call's request to one limit.
type Request struct {
	// Limit is the limit's name.
	Limit string
	// Rule is the name of the rule of ratelimit.Config.Policies that decided, and empty when the code's definition did.
	Rule string
	// Kind is "token_bucket", "fixed_window", "sliding_window", "calendar_window" or "concurrency", and empty if the call failed. An
	// adaptive limit has the kind of its contract.
	Kind string
	// Verb and Cached are copied from the event.
	Verb   string
	Cached bool
	// Result is one of the constants above.
	Result string
	// Cost is the cost of the request.
	Cost float64
}

// Requests yields what became of each request of a call, in the order asked.
func Requests(d ratelimit.Decided) iter.Seq[Request] {
	return func(yield func(Request) bool) {
		for i := range d.Decision.States {
			s := &d.Decision.States[i]
			r := Request{
				Limit: s.Limit.Name(), Rule: s.Rule, Kind: kindOf(s.Limit),
				Verb: d.Verb, Cached: d.Cached, Cost: s.Cost, Result: resultOf(d, s),
			}
			if !yield(r) {
				return
			}
		}
	}
}

// resultOf returns the result of the request to one limit of a call.
func resultOf(d ratelimit.Decided, s *ratelimit.State) string {
	switch {
	case s.Mode == ratelimit.Off:
		return Off
	case WouldRefuse(s):
		return refusal(s, true)
	case Refuses(s):
		return refusal(s, false)
	case !d.Decision.Allowed:
		return Vetoed
	}
	return Result(d)
}

// refusal returns the result of a request that a limit refuses, or would. It may be nil if none is known.
func refusal(s *ratelimit.State, shadow bool) string {
	paused := s != nil && !s.PausedUntil.IsZero()
	switch {
	case paused && shadow:
		return ShadowPaused
	case paused:
		return Paused
	case shadow:
		return ShadowRefused
	}
	return Refused
}

// Refuses reports whether the limit of s refuses its call. A limit in shadow mode never does, nor does a limit that was not
// checked.
func Refuses(s *ratelimit.State) bool { return !s.Allowed && s.Mode != ratelimit.Shadow }

// WouldRefuse reports whether a limit in shadow mode would refuse the call that s is part of, if it were enforced.
func WouldRefuse(s *ratelimit.State) bool { return !s.Allowed && s.Mode == ratelimit.Shadow }

// Refusing returns the names of the limits that refuse a call, and of those in shadow mode that would.
func Refusing(d ratelimit.Decision) (refused, wouldRefuse []string) {
	for i := range d.States {
		switch s := &d.States[i]; {
		case Refuses(s):
			refused = append(refused, s.Limit.Name())
		case WouldRefuse(s):
			wouldRefuse = append(wouldRefuse, s.Limit.Name())
		}
	}
	return refused, wouldRefuse
}

// IsPaused reports whether a call is refused because a limit is paused. The other limits are not asked then.
func IsPaused(d ratelimit.Decision) bool {
	s := decisive(d)
	return s != nil && Refuses(s) && !s.PausedUntil.IsZero()
}

// IsPriced reports whether the limit of s charges more than the cost, because its upstream has throttled.
func IsPriced(s *ratelimit.State) bool {
	policy, adapts := s.Limit.Policy().(ratelimit.Adaptive)
	return adapts && policy.Apply && s.Price > 1
}

// IsReduced reports whether a call is refused by a limit that IsPriced, and not because one is paused.
func IsReduced(d ratelimit.Decision) bool {
	s := decisive(d)
	return s != nil && Refuses(s) && s.PausedUntil.IsZero() && IsPriced(s)
}

// Failure returns the result of the request of a failed call. It returns false if the call was not a request, for example Settle or
// InTx.
func Failure(f ratelimit.Failed) (Request, bool) {
	r := Request{Limit: f.Limit, Verb: f.Verb, Result: Failed}
	if errors.Is(f.Err, ratelimit.ErrContended) {
		r.Result = Contended
	}
	switch f.Verb {
	case "take", "check", reserve, "acquire":
		return r, true
	}
	return r, false
}

// Result returns the result of the whole call.
func Result(d ratelimit.Decided) string {
	switch {
	case !d.Decision.Allowed:
		return refusal(decisive(d.Decision), false)
	case d.Verb == reserve:
		return Reserved
	}
	return Allowed
}

// reserve is the verb whose work may have to wait.
const reserve = "reserve"

// Limit returns the limit under which a call over several limits is reported: the first that refused, or else the first.
func Limit(d ratelimit.Decision) string {
	if s := decisive(d); s != nil {
		return s.Limit.Name()
	}
	return ""
}

// decisive returns the state of the limit under which a call is reported, and nil if there is none.
func decisive(d ratelimit.Decision) *ratelimit.State {
	for i := range d.States {
		if Refuses(&d.States[i]) {
			return &d.States[i]
		}
	}
	if len(d.States) == 0 {
		return nil
	}
	return &d.States[0]
}

// kindOf returns the kind of a limit in one word; empty for the zero Limit.
func kindOf(limit ratelimit.Limit) string {
	return strings.ReplaceAll(string(limit.Numbers().Kind), " ", "_")
}

// Lease returns the result of a lease: "renewed", "released", or "lost" if it was not held any more.
func Lease(e ratelimit.Leased) string {
	switch {
	case e.Lost:
		return "lost"
	case e.Verb == "release":
		return "released"
	}
	return "renewed"
}

// Answer returns the result of a request to a guard, preceded by "shadow_" when it is not enforced.
func Answer(a ratelimit.Answered) string {
	if a.Shadow {
		return "shadow_" + a.Result
	}
	return a.Result
}

// Load returns the result of a load of rules: "loaded", "kept" if some could not be read and did not change, or "failed" if none
// was read.
func Load(e ratelimit.RulesLoaded) string {
	switch {
	case e.Kept > 0:
		return "kept"
	case e.Err != nil:
		return "failed"
	}
	return "loaded"
}

// Prefetched yields the fate of prefetched tokens: "taken", "returned" or "lost", and how many.
func Prefetched(e ratelimit.Prefetched) iter.Seq2[string, float64] {
	return func(yield func(string, float64) bool) {
		_ = (e.Taken == 0 || yield("taken", e.Taken)) && (e.Returned == 0 || yield("returned", e.Returned)) && (e.Lost == 0 || yield("lost", e.Lost))
	}
}

// Direction returns which way a settlement moved tokens, and how many.
func Direction(s ratelimit.Settlement) (direction string, tokens float64) {
	if s.Delta < 0 {
		return "returned", -s.Delta
	}
	return "charged", s.Delta
}

// Seconds returns the bounds of a histogram of how long a call to the database takes.
func Seconds() []float64 {
	return []float64{.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10}
}

// Waits returns the bounds, in seconds, of a histogram of how long reserved work waits. The first holds
// what need not wait.
func Waits() []float64 { return []float64{0, .1, .5, 1, 5, 15, 30, 60, 300, 900, 3600, 14400, 86400} }

// Sizes returns the bounds of a histogram of how many calls one statement answers.
func Sizes() []float64 { return []float64{1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024} }
