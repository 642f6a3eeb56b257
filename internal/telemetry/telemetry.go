// Package telemetry holds what logs, metrics and traces say alike of the events of a Limiter: the names of
// results and of errors, and the text of an error without what is nobody's business.
package telemetry

import (
	"errors"
	"iter"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Results of a request to one limit. A request that was refused, one that gave up under contention and one
// that failed are three different things.
const (
	Allowed   = "allowed"
	Reserved  = "reserved"  // allowed, by Reserve
	Denied    = "denied"    // this limit refused
	Vetoed    = "vetoed"    // this limit had enough, another limit of the call refused
	Contended = "contended" // every attempt conflicted; neither allowed nor refused
	Error     = "error"     // the store did not answer; neither allowed nor refused

	ShadowDenied = "shadow_denied" // this limit would have refused, if it were enforced
)

// Request is what became of a call's request to one limit.
type Request struct {
	// Rule is the limit's name.
	Rule string
	// Algorithm is "token_bucket" or "fixed_window", and empty when a call failed.
	Algorithm string
	// Verb and Cached are those of the event.
	Verb   string
	Cached bool
	// Result is one of the constants above.
	Result string
	// Cost is what was asked of the limit.
	Cost float64
}

// Requests yields what became of each request of a call, in the order asked.
func Requests(d ratelimit.Decided) iter.Seq[Request] {
	return func(yield func(Request) bool) {
		for _, s := range d.Decision.States {
			r := Request{Rule: s.Limit.Name(), Algorithm: algorithm(s.Limit), Verb: d.Verb, Cached: d.Cached, Cost: s.Cost, Result: Result(d)}
			if !d.Decision.Allowed && s.Allowed {
				r.Result = Vetoed
			}
			if !yield(r) {
				return
			}
		}
	}
}

// Failure returns what became of the request of a call that failed, and false when the call was not a
// request, as Settle and InTx are not.
func Failure(f ratelimit.Failed) (Request, bool) {
	r := Request{Rule: f.Limit, Verb: f.Verb, Result: Error}
	if errors.Is(f.Err, ratelimit.ErrContended) {
		r.Result = Contended
	}
	switch f.Verb {
	case "take", "check", reserve:
		return r, true
	}
	return r, false
}

// Result returns the result of the whole call.
func Result(d ratelimit.Decided) string {
	switch {
	case !d.Decision.Allowed && d.Shadow:
		return ShadowDenied
	case !d.Decision.Allowed:
		return Denied
	case d.Verb == reserve:
		return Reserved
	}
	return Allowed
}

// reserve is the verb whose work may have to wait.
const reserve = "reserve"

// Rule returns the limit under which a call over several is told of: the first that refused, else the first.
func Rule(d ratelimit.Decision) string {
	for _, s := range d.States {
		if !s.Allowed {
			return s.Limit.Name()
		}
	}
	if len(d.States) == 0 {
		return ""
	}
	return d.States[0].Limit.Name()
}

func algorithm(limit ratelimit.Limit) string {
	switch limit.Policy().(type) {
	case ratelimit.TokenBucket, *ratelimit.TokenBucket:
		return "token_bucket"
	case ratelimit.FixedWindow, *ratelimit.FixedWindow:
		return "fixed_window"
	}
	return ""
}

// Answer returns the result of a request to a guard, preceded by "shadow_" when it is not enforced.
func Answer(a ratelimit.Answered) string {
	if a.Shadow {
		return "shadow_" + a.Result
	}
	return a.Result
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
