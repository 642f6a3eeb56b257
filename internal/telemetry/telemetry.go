// Package telemetry holds the common terms of logs, metrics and traces for the events of a Limiter: the names of
// results and of errors, and the text of an error without secrets.
package telemetry

import (
	"slices"
	"strings"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
)

// Results of a request to one limit. Refused, contended (the call gave up) and failed requests are counted separately.
const (
	allowed   = "allowed"
	Reserved  = "reserved"  // allowed, by Reserve
	refused   = "refused"   // this limit refused
	vetoed    = "vetoed"    // this limit had enough, another limit of the call refused
	Contended = "contended" // every attempt conflicted; neither allowed nor refused
	failed    = "failed"    // the store did not answer; neither allowed nor refused

	paused = "paused" // this limit is paused, and refused for that
	off    = "off"    // the rule of this limit is off, so that it was not asked

	shadowRefused = "shadow_refused" // this limit would have refused, if it were enforced
	shadowPaused  = "shadow_paused"  // so it would, because it is paused
)

// resultOf returns the result of the request to one limit of a call.
func resultOf(d ratelimit.Decided, s *ratelimit.State) string {
	switch {
	case s.Mode == ratelimit.Off:
		return off
	case WouldRefuse(s):
		return refusal(s, true)
	case Refuses(s):
		return refusal(s, false)
	case !d.Decision.Allowed:
		return vetoed
	}
	return Result(d)
}

// refusal returns the result of a request that a limit refuses, or would. It may be nil if none is known.
func refusal(s *ratelimit.State, shadow bool) string {
	isPaused := s != nil && !s.PausedUntil.IsZero()
	switch {
	case isPaused && shadow:
		return shadowPaused
	case isPaused:
		return paused
	case shadow:
		return shadowRefused
	}
	return refused
}

// Refuses reports whether the limit of s refuses its call. A limit in shadow mode never does, nor does a limit that was
// not checked.
func Refuses(s *ratelimit.State) bool { return !s.Allowed && s.Mode != ratelimit.Shadow }

// WouldRefuse reports whether a limit in shadow mode would refuse the call that s is part of, if it were enforced.
func WouldRefuse(s *ratelimit.State) bool { return !s.Allowed && s.Mode == ratelimit.Shadow }

// Refusing returns the names of the limits that refuse a call, and of those in shadow mode that would.
func Refusing(d ratelimit.Decision) (refuse, wouldRefuse []string) {
	for i := range d.States {
		switch s := &d.States[i]; {
		case Refuses(s):
			refuse = append(refuse, s.Limit.Name())
		case WouldRefuse(s):
			wouldRefuse = append(wouldRefuse, s.Limit.Name())
		}
	}
	return refuse, wouldRefuse
}

// Names returns the names of the limits of a call, and of the rules of ratelimit.Config.Policies that decided.
func Names(d ratelimit.Decision) (limits, rules []string) {
	for i := range d.States {
		s := &d.States[i]
		limits = append(limits, s.Limit.Name())
		if s.Rule != "" {
			rules = append(rules, s.Rule)
		}
	}
	return limits, rules
}

// IsPaused reports whether a call is refused because a limit is paused. The other limits are not asked then.
func IsPaused(d ratelimit.Decision) bool {
	s := decisive(d)
	return s != nil && Refuses(s) && !s.PausedUntil.IsZero()
}

// Failure returns the result of a failed call: Contended, Cancelled, or failed.
func Failure(f event.Failed) string {
	switch kind := ErrorType(f.Err); kind {
	case Contended, Cancelled:
		return kind
	}
	return failed
}

// isRequest reports whether a call of the verb is a request to limits, as Settle and InTx are not.
func isRequest(verb string) bool {
	return slices.Contains([]string{"take", "check", reserve, "acquire"}, verb)
}

// IsDecisive reports whether a call of the verb ends in a Decided or a Transacted if it does not fail.
func IsDecisive(verb string) bool { return isRequest(verb) || verb == "transaction" }

// IsStored reports whether the database answered a call. It did not if the answer came from memory, or if all of its
// limits are off or paused.
func IsStored(d ratelimit.Decided) bool {
	return !d.Cached && slices.ContainsFunc(d.Decision.States, func(s ratelimit.State) bool { return !s.NotAsked })
}

// Result returns the result of the whole call.
func Result(d ratelimit.Decided) string {
	switch {
	case !d.Decision.Allowed:
		return refusal(decisive(d.Decision), false)
	case d.Verb == reserve:
		return Reserved
	}
	return allowed
}

// reserve is the verb whose work may have to wait.
const reserve = "reserve"

// Limit returns the limit under which a call over several limits is reported: the first that refused, or else the
// first.
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
	return strings.ReplaceAll(string(limit.Spec().Kind), " ", "_")
}

// Transaction returns the result of a transaction that did not fail: "committed", or "rolled_back" by its own error.
func Transaction(e event.Transacted) string {
	if e.Committed {
		return "committed"
	}
	return "rolled_back"
}

// Lease returns the result of a lease: "renewed", "released", or "lost" if it was not held any more.
func Lease(e event.LeaseChanged) string {
	switch {
	case e.Lost:
		return "lost"
	case e.Verb == "release":
		return "released"
	}
	return "renewed"
}

// Answer returns the result of a request to a guard, preceded by "shadow_" when it is not enforced.
func Answer(a event.Answered) string {
	if a.Shadow {
		return "shadow_" + a.Result
	}
	return a.Result
}

// Load returns the result of a load of rules: "loaded", "kept" if some could not be read and did not change, or
// "failed" if none was read.
func Load(e event.RulesLoaded) string {
	switch {
	case e.Kept > 0:
		return "kept"
	case e.Err != nil:
		return "failed"
	}
	return "loaded"
}

// direction returns which way a settlement moved tokens, and how many.
func direction(s event.Settlement) (name string, tokens float64) {
	if s.Delta < 0 {
		return "returned", -s.Delta
	}
	return "charged", s.Delta
}
