package httplimit

import (
	"net/http"
	"slices"
	"strconv"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Merge adds the fields of the handler's own decision to the response, in the forms of the middlewares around it, or as
// DraftHeaders without one. If two limits have one name it keeps the tighter one, and in forms for one limit only the
// tightest of all. For a refusal it sets Retry-After, unless a longer one is set. Call it before the header is written.
//
// r is the handler's request, whose context knows the middlewares. Without a middleware, a later decision replaces the
// earlier one.
func Merge(w http.ResponseWriter, r *http.Request, d ratelimit.Decision) {
	admission, around := FromContext(r.Context())
	if !around {
		DraftHeaders.Set(w.Header(), d)
	} else {
		admission.merge(w.Header(), d)
	}
	if !d.Allowed {
		waitFor(w.Header(), max(seconds(d.RetryAfter), 1))
	}
}

// waitFor sets Retry-After to wait seconds unless a longer one is set, and returns the longer of the two.
func waitFor(header http.Header, wait int64) int64 {
	if there, err := strconv.ParseInt(header.Get("Retry-After"), 10, 64); err == nil {
		wait = max(wait, there)
	}
	header.Set("Retry-After", strconv.FormatInt(wait, 10))
	return wait
}

// merge adds the states of d to the states of the outer middlewares.
func (a *Admission) merge(header http.Header, d ratelimit.Decision) {
	a.mu.Lock()
	a.merged = append(a.merged, tellable(d, func(int) string { return "" })...)
	a.mu.Unlock()
	var set []Headers
	for around := a; around != nil; around = around.outer {
		if form := around.middleware.config.Headers; !slices.Contains(set, form) {
			form.set(header, a.told(form), !d.Allowed)
			set = append(set, form)
		}
	}
}

// told returns the states that are sent in one form of headers: from the middlewares that use it, outermost first, and
// from handlers.
func (a *Admission) told(form Headers) []stated {
	if a == nil {
		return nil
	}
	all := a.outer.told(form)
	if a.middleware.config.Headers == form {
		all = append(all, a.stated...)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return append(all, a.merged...)
}

// stated returns what the fields tell of a decision on asks.
func (m *middleware) stated(asks []ask, d ratelimit.Decision) []stated {
	return tellable(d, func(i int) string { return asks[i].spec.Unit })
}

// setHeaders adds the states of this middleware to the states of the outer ones. refused reports whether it refuses the
// request.
func (m *middleware) setHeaders(header http.Header, outer *Admission, states []stated, refused bool) {
	if len(states) == 0 {
		return
	}
	form := m.config.Headers
	form.set(header, append(outer.told(form), states...), refused)
}
