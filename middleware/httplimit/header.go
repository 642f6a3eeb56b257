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

// Headers is the form of the fields in a response. They are sent with every decision, allowed or refused. Retry-After
// is independent of the form, and is sent with refusals.
//
// A form with one field for a number describes one limit: the one with the longest wait, or the one with room for the
// fewest further requests. Its Limit is the capacity. Its reset is the time at which the bucket is full; in
// Draft06Headers and EpochHeaders of a refusal, it is the time at which the request would be allowed, so that it agrees
// with Retry-After, and Remaining is 0, also if tokens are left for cheaper requests.
//
// The fields describe the policy that decided, for example of a rule of ratelimit.Config.Policies. They leave out
// limits that are in shadow mode or off. A paused limit has nothing left until its pause ends.
type Headers int

// DraftHeaders is the newest draft that this package knows, and the default. A later version may know a newer one, so
// to keep the same fields, name their draft.
const DraftHeaders = Draft11Headers

const (
	// Draft11Headers are RateLimit-Policy and RateLimit as in draft-ietf-httpapi-ratelimit-headers-11. After a refusal,
	// RateLimit has the limits that refused, and RateLimit-Policy has all. A limit on concurrency counts
	// concurrent-requests and has neither w nor t, because slots return when they are released. A calendar window has no
	// w, because months differ.
	//
	// In RateLimit, r is the number of whole tokens left, and t a number of seconds: a client that spreads r requests over
	// the next t seconds isn't refused by this limit. t isn't the time until the limit is full. For a request of cost 1, t
	// is
	//
	//	refused by any kind    the seconds until the request would be allowed, as in Retry-After
	//	TokenBucket            the seconds it takes to refill r tokens: 10 a minute and r=2 give t=12
	//	FixedWindow, calendar  the seconds until the window ends
	//	SlidingWindow          the seconds until more than r tokens are left
	//
	// So don't show t as a countdown to a reset, unless the limit is a window.
	//
	// r is never above q, the quota. If a bucket holds more, because its capacity is above its rate or its window carries
	// over unused tokens, r is q, and t belongs to q, so a client that paces by it is never refused. Draft06Headers and
	// EpochHeaders, whose Limit is the capacity, and State.Remaining have the whole amount.
	Draft11Headers Headers = iota
	// Draft06Headers are RateLimit-Limit, RateLimit-Remaining and RateLimit-Reset, as in the drafts up to 06. Reset is
	// seconds from now.
	Draft06Headers
	// EpochHeaders are X-RateLimit-Limit, X-RateLimit-Remaining and X-RateLimit-Reset. Reset is seconds since 1970, on the
	// database's clock.
	EpochHeaders
	// NoHeaders are none. The body of a refusal still says which limit it was, and its rate.
	NoHeaders
)

// Set sets a decision's fields, and replaces existing ones, for handlers without a middleware around them. Behind a
// middleware use [Merge], which keeps its fields.
func (h Headers) Set(header http.Header, d ratelimit.Decision) {
	h.set(header, tellable(d, func(int) string { return "" }), !d.Allowed)
}

// single returns the fields of a form that have one number each. RateLimit and RateLimit-Policy are lists, of which a
// response may have several lines.
func (h Headers) single() []string {
	switch h {
	case Draft06Headers:
		return []string{"Ratelimit-Limit", "Ratelimit-Remaining", "Ratelimit-Reset"}
	case EpochHeaders:
		return []string{"X-Ratelimit-Limit", "X-Ratelimit-Remaining", "X-Ratelimit-Reset"}
	case Draft11Headers, NoHeaders:
	}
	return nil
}

const (
	policyField = "RateLimit-Policy"
	limitField  = "RateLimit"
)

// set replaces the fields in header by the fields of states. refused reports whether the response is a refusal.
func (h Headers) set(header http.Header, states []stated, refused bool) {
	if len(states) == 0 {
		return
	}
	states = withUnits(states)
	switch h {
	case Draft11Headers:
		setDraft(header, states, refused)
	case Draft06Headers:
		set(header, "RateLimit-%s", states, func(_ time.Time, wait time.Duration) int64 { return seconds(wait) })
	case EpochHeaders:
		set(header, "X-RateLimit-%s", states, epoch)
	case NoHeaders:
	}
}

// stated is a state that the fields tell of, and how.
type stated struct {
	ratelimit.State

	unit string    // that it counts
	at   time.Time // the instant of the decision
}

// withUnits returns the states with the unit of each limit, if any of its states has one. So a handler need not repeat
// the unit of a limit of the middleware.
func withUnits(states []stated) []stated {
	all := states
	for i := range states {
		if states[i].unit != "" {
			continue
		}
		for j := range states {
			if states[j].unit != "" && states[j].Limit.Name() == states[i].Limit.Name() {
				if &all[0] == &states[0] {
					all = slices.Clone(states)
				}
				all[i].unit = states[j].unit
				break
			}
		}
	}
	return all
}

// tellable returns the states to send to clients. It leaves out limits that are off or were not asked because another
// is paused (their state is unknown), and limits in shadow, which are not enforced. A paused limit has no tokens until
// the pause ends.
func tellable(d ratelimit.Decision, unit func(int) string) []stated {
	states := make([]stated, 0, len(d.States))
	for i, s := range d.States {
		isPaused := telemetry.Refuses(&s) && !s.PausedUntil.IsZero()
		switch {
		case s.Mode == ratelimit.Shadow, s.NotAsked && !isPaused:
			continue
		case isPaused:
			s.Remaining, s.ResetAfter = 0, s.RetryAfter
		}
		in := unit(i)
		if in == "" && validUnit.MatchString(s.Unit) { // what a stored rule says
			in = s.Unit
		}
		states = append(states, stated{s, in, d.At})
	}
	return states
}

// set sets the three fields for the state that matters most.
func set(header http.Header, format string, states []stated, in func(at time.Time, wait time.Duration) int64) {
	s := states[tightest(states)]
	wait := s.ResetAfter
	if !s.Allowed {
		s.Remaining, wait = 0, max(s.RetryAfter, time.Second)
	}
	header.Set(fmt.Sprintf(format, "Limit"), strconv.FormatInt(integer(s.Limit.Capacity()), 10))
	header.Set(fmt.Sprintf(format, "Remaining"), strconv.FormatInt(integer(min(s.Remaining, s.Limit.Capacity())), 10))
	header.Set(fmt.Sprintf(format, "Reset"), strconv.FormatInt(in(s.at, wait), 10))
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

// roundUp returns d as a multiple of unit, up to where a Duration ends.
func roundUp(d, unit time.Duration) time.Duration {
	if rest := d % unit; rest > 0 && d <= math.MaxInt64-unit {
		return d - rest + unit
	}
	return d
}

// setDraft sets the two Lists of the draft. If a policy has two states, for two keys or from a middleware and a
// handler, only the tighter one is sent. On a refusal RateLimit has only the policies that refused.
func setDraft(header http.Header, states []stated, refused bool) {
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
		if !refused || !s.Allowed {
			limits = append(limits, limitItem(&s))
		}
	}
	header.Set(policyField, strings.Join(policies, ", "))
	header.Set(limitField, strings.Join(limits, ", "))
}

// policyItem returns what does not change: the quota of a limit, and where all of its windows are as long, for how many
// seconds. Its name needs no escapes: the core allows letters, digits and _ . : / - only.
func policyItem(limit ratelimit.Limit, unit string) string {
	s := scheduleOf(limit)
	tokens, seconds := s.quota()
	item := fmt.Sprintf(`"%s";q=%d`, limit.Name(), tokens)
	if s.period() > 0 {
		item += fmt.Sprintf(";w=%d", seconds)
	}
	if unit == "" && s.Kind == ratelimit.KindConcurrency {
		unit = "concurrent-requests"
	}
	if unit != "" {
		item += fmt.Sprintf(`;qu="%s"`, unit)
	}
	return item
}

// limitItem returns the tokens left and the time until more come. A bucket may hold more than the quota of policyItem;
// then it returns the quota.
func limitItem(s *stated) string {
	tokens, _ := scheduleOf(s.Limit).quota()
	left := min(integer(s.Remaining), tokens)
	window, known := effectiveWindow(s.State, s.at)
	if !known {
		return fmt.Sprintf(`"%s";r=%d`, s.Limit.Name(), left)
	}
	return fmt.Sprintf(`"%s";r=%d;t=%d`, s.Limit.Name(), left, window)
}
