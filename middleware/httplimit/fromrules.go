package httplimit

import (
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// FromRules returns Config.Requests for a site whose limits are in tables. attributes returns a request's verified
// attributes, and its errors are answered like a Key's.
//
//	site, err := rules.NewSite(set, rules.SiteConfig{})
//	limited, err := httplimit.New(limiter, httplimit.Config{
//		Requests: httplimit.FromRules(site, func(r *http.Request) (rules.Attributes, error) {
//			session := sessionOf(r.Context())
//			return rules.Attributes{User: session.User, Plan: session.Plan, Route: r.Pattern}, nil
//		}),
//	})
//
// A request that lacks a key's attribute is answered 400, and one that fits no tier 503, because [rules.ErrNoTier] is
// an error. To allow the latter, wrap the returned function and return nil for that error.
//
// The route is the pattern that the router has matched, so put the middleware around the handlers and not around the
// mux. FromRules panics if an argument is nil.
func FromRules(site *rules.Site,
	attributes func(r *http.Request) (rules.Attributes, error),
) func(r *http.Request) ([]ratelimit.Request, error) {
	if site == nil || attributes == nil {
		panic("httplimit: FromRules: the Site or the function is nil")
	}
	return func(r *http.Request) ([]ratelimit.Request, error) {
		a, err := attributes(r)
		if err != nil {
			return nil, err
		}
		return site.Requests(a, func(source string) []string { return statedBy(r, source) })
	}
}

// statedBy returns what a request states for a source of costs.
func statedBy(r *http.Request, source string) []string {
	switch kind, name, _ := strings.Cut(source, ":"); kind {
	case "header":
		return r.Header.Values(name)
	case "query":
		return r.URL.Query()[name]
	}
	return nil
}

// askGiven adds what Config.Requests asks to what the Limits ask, or returns the reason why it cannot be asked.
func (m *middleware) askGiven(r *http.Request, enforced []ask) ([]ask, *fault) {
	if m.config.Requests == nil {
		return enforced, nil
	}
	given, err := m.config.Requests(r)
	if err != nil {
		return nil, unasked(ask{}, err)
	}
	all := enforced
	for i := range given {
		a := ask{spec: &Limit{}, given: &given[i], limit: given[i].Limit()}
		if a.limit.Policy() == nil {
			return nil, unasked(a, fmt.Errorf("%w: Config.Requests returned a request for the zero Limit; make limits with "+
				"ratelimit.Define",
				ratelimit.ErrInvalidLimit))
		}
		if slices.ContainsFunc(all, func(other ask) bool { return other.limit.Name() == a.limit.Name() }) {
			return nil, unasked(a, fmt.Errorf("%w: Config.Requests asks the limit %q, and so does another request or one of "+
				"Limits; ask each limit once",
				ratelimit.ErrInvalidRequest, a.limit.Name()))
		}
		if m.config.RetryJitter > 0 { // it is decided by the key
			if a.key, err = m.limiter.StoredKey(given[i]); err != nil {
				return nil, unasked(a, err)
			}
		}
		all = append(all, a)
	}
	return all, nil
}
