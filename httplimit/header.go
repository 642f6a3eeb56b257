package httplimit

import (
	"fmt"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/telemetry"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Headers is the form in which responses state what is left. It is sent with every decision, allowed or
// refused. Retry-After belongs to refusals and not to it.
//
// The forms that have one field for a number state it for one rule: the one that refused for longest, or the
// one with room for the fewest more of such requests. Their Limit is its capacity. Their reset is when it is full; in the trio and the
// epoch form, on a refusal, when the request would be allowed, so that whoever waits for it does not wait for
// longer than Retry-After says.
//
// Each limit is stated with the policy that decided, which may be that of a rule of ratelimit.Config.Policies. Limits
// that such a rule only tries or has switched off are left out, and a limit that is paused has nothing left until its
// pause ends.
type Headers int

const (
	// DraftHeaders are RateLimit-Policy and RateLimit as in draft-ietf-httpapi-ratelimit-headers-11. A refusal
	// has the rules that refused in RateLimit, and all of them in RateLimit-Policy.
	DraftHeaders Headers = iota
	// TrioHeaders are RateLimit-Limit, RateLimit-Remaining and RateLimit-Reset, as in the drafts up to 06.
	// Reset is seconds from now.
	TrioHeaders
	// EpochHeaders are X-RateLimit-Limit, X-RateLimit-Remaining and X-RateLimit-Reset. Reset is in seconds
	// since 1970, on the database's clock.
	EpochHeaders
	// OpenAIHeaders are x-ratelimit-limit-requests, x-ratelimit-remaining-requests and
	// x-ratelimit-reset-requests, and the same for each other Unit of the rules, as in -tokens. Reset is a
	// duration such as 6m0s.
	OpenAIHeaders
	// NoHeaders are none. The body of a refusal still says which limit it was, and its rate.
	NoHeaders
)

// Set sets the fields of a decision, in place of those that are there: for handlers that call the core
// themselves. The middleware does it for its own decisions.
func (h Headers) Set(header http.Header, d ratelimit.Decision) {
	if h == DraftHeaders && len(d.States) > 0 {
		header.Del(policyField)
		header.Del(limitField)
	}
	h.set(header, d, func(int) string { return "" }, 0)
}

const (
	policyField = "RateLimit-Policy"
	limitField  = "RateLimit"
)

// set sets the fields of a decision, whose state i counts what unit(i) names. The Lists of an outer middleware
// are added to.
func (h Headers) set(header http.Header, d ratelimit.Decision, unit func(int) string, ratioCap float64) {
	states := tellable(d, unit)
	if len(states) == 0 {
		return
	}
	switch h {
	case DraftHeaders:
		setDraft(header, d, states, ratioCap)
	case TrioHeaders:
		set(header, "RateLimit-%s", states, seconds)
	case EpochHeaders:
		set(header, "X-RateLimit-%s", states, func(wait time.Duration) int64 { return epoch(d.At, wait) })
	case OpenAIHeaders:
		setOpenAI(header, states)
	case NoHeaders:
	}
}

// stated is a state that the fields tell of, and what it counts.
type stated struct {
	ratelimit.State

	unit string
}

// tellable returns the states that clients are told of. Of a limit that is off, or was left alone because another is
// paused, nothing is known, and one in shadow mode is not enforced. One that is paused has nothing until then.
func tellable(d ratelimit.Decision, unit func(int) string) []stated {
	states := make([]stated, 0, len(d.States))
	for i, s := range d.States {
		isPaused := telemetry.Refuses(&s) && !s.PausedUntil.IsZero()
		switch {
		case s.Mode == ratelimit.Shadow, s.Mode == ratelimit.Off, s.NotAsked && !isPaused:
			continue
		case isPaused:
			s.Remaining, s.ResetAfter = 0, s.RetryAfter
		}
		in := unit(i)
		if in == "" && validUnit.MatchString(s.Unit) { // what a stored rule says
			in = s.Unit
		}
		states = append(states, stated{s, in})
	}
	return states
}

// set sets the three fields for the state that matters most.
func set(header http.Header, format string, states []stated, in func(time.Duration) int64) {
	s := states[tightest(states)]
	wait := s.ResetAfter
	if !s.Allowed {
		wait = max(s.RetryAfter, time.Second)
	}
	header.Set(fmt.Sprintf(format, "Limit"), strconv.FormatInt(integer(s.Limit.Capacity()), 10))
	header.Set(fmt.Sprintf(format, "Remaining"), strconv.FormatInt(integer(s.Remaining), 10))
	header.Set(fmt.Sprintf(format, "Reset"), strconv.FormatInt(in(wait), 10))
}

// epoch returns the instant wait after at in whole seconds since 1970, rounded up.
func epoch(at time.Time, wait time.Duration) int64 {
	whole, rest := wait/time.Second, wait%time.Second // the sum of at and a long wait need not fit
	return at.Unix() + int64(whole) + seconds(time.Duration(at.Nanosecond())+rest)
}

// tightest returns the index of the state that refused for longest, or has room for the fewest more requests.
func tightest(states []stated) int {
	room := func(s stated) float64 {
		if s.Cost > 0 {
			return s.Remaining / s.Cost
		}
		return s.Remaining
	}
	best := 0
	for i, s := range states {
		if b := states[best]; s.RetryAfter > b.RetryAfter || s.RetryAfter == b.RetryAfter && room(s) < room(b) {
			best = i
		}
	}
	return best
}

func setOpenAI(header http.Header, states []stated) {
	byUnit := make(map[string][]stated, 2)
	for _, s := range states {
		name := s.unit
		if name == "" {
			name = "requests"
		}
		byUnit[name] = append(byUnit[name], s)
	}
	for name, states := range byUnit {
		s := states[tightest(states)]
		header.Set("X-RateLimit-Limit-"+name, strconv.FormatInt(integer(s.Limit.Capacity()), 10))
		header.Set("X-RateLimit-Remaining-"+name, strconv.FormatInt(integer(s.Remaining), 10))
		header.Set("X-RateLimit-Reset-"+name, roundUp(s.ResetAfter, time.Millisecond).String())
	}
}

// roundUp returns d as a multiple of unit, up to where a Duration ends.
func roundUp(d, unit time.Duration) time.Duration {
	if rest := d % unit; rest > 0 && d <= math.MaxInt64-unit {
		return d - rest + unit
	}
	return d
}

// setDraft sets the two Lists of the draft. A policy that is asked twice in a call, for two keys, is stated once, as
// the tighter of them. An outer middleware's items stay before those of an inner one that allows.
func setDraft(header http.Header, d ratelimit.Decision, states []stated, ratioCap float64) {
	tighter := make(map[string]stated, len(states))
	var order []string
	for _, s := range states {
		name := s.Limit.Name()
		first, twice := tighter[name]
		if !twice {
			order = append(order, name)
		}
		if !twice || tightest([]stated{first, s}) == 1 {
			tighter[name] = s
		}
	}
	var policies, limits []string
	for _, name := range order {
		s := tighter[name]
		policies = append(policies, policyItem(s.Limit, s.unit))
		if d.Allowed || !s.Allowed {
			limits = append(limits, limitItem(s.State, d.At, ratioCap))
		}
	}
	if d.Allowed {
		limits = slices.Concat(header.Values(limitField), limits)
	}
	header.Set(policyField, strings.Join(slices.Concat(header.Values(policyField), policies), ", "))
	header.Set(limitField, strings.Join(limits, ", "))
}

// policyItem returns what does not change: the quota of a limit. Its name needs no escapes: the core allows
// letters, digits and _ . : / - only.
func policyItem(limit ratelimit.Limit, unit string) string {
	tokens, seconds := scheduleOf(limit).quota()
	item := fmt.Sprintf(`"%s";q=%d;w=%d`, limit.Name(), tokens, seconds)
	if unit != "" {
		item += fmt.Sprintf(`;qu="%s"`, unit)
	}
	return item
}

// limitItem returns what is left, and for how long.
func limitItem(s ratelimit.State, at time.Time, ratioCap float64) string {
	left, window := integer(s.Remaining), effectiveWindow(s, at)
	if ratioCap > 0 {
		tokens, period := scheduleOf(s.Limit).quota()
		left = min(left, integer(math.Ceil(ratioCap*float64(tokens)*float64(window)/float64(period))))
	}
	return fmt.Sprintf(`"%s";r=%d;t=%d`, s.Limit.Name(), left, window)
}
