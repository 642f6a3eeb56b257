package httplimit

import (
	"fmt"
	"net/http"
	"strings"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Asker says what a request is asked of the limits by its attributes, as a Site of package rules does. stated returns
// what the request states for a source, "header:<name>" or "query:<name>".
type Asker[Attributes any] interface {
	Requests(attributes Attributes, stated func(source string) []string) ([]ratelimit.Request, error)
}

// FromRules returns Config.Requests for a site whose limits are in tables. attributes says what is known of a request,
// as your own code has verified it: its errors are answered as those of a Key.
//
//	site, err := rules.NewSite(set, rules.SiteConfig{})
//	limited, err := httplimit.New(limiter, httplimit.Config{
//		Requests: httplimit.FromRules(site, func(r *http.Request) (rules.Attributes, error) {
//			session := sessionOf(r.Context())
//			return rules.Attributes{User: session.User, Plan: session.Plan, Endpoint: r.Pattern}, nil
//		}),
//	})
//
// A request that lacks the attribute of a key is answered 400. One that no tier fits is answered 503, as rules.ErrNoTier
// is an error; to let such requests pass, return nil for that error from a function around this one.
//
// An endpoint is the pattern that the router has matched, so the middleware has to be inside the router: around the
// handlers, and not around the mux.
func FromRules[Attributes any](asker Asker[Attributes], attributes func(r *http.Request) (Attributes, error)) func(r *http.Request) ([]ratelimit.Request, error) {
	if asker == nil || attributes == nil {
		panic("httplimit: FromRules: the Asker or the function is nil")
	}
	return func(r *http.Request) ([]ratelimit.Request, error) {
		a, err := attributes(r)
		if err != nil {
			return nil, err
		}
		return asker.Requests(a, func(source string) []string { return statedBy(r, source) })
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

// askGiven adds what Config.Requests asks to what the rules ask, or returns the reason why it cannot be asked.
func (m *middleware) askGiven(r *http.Request, enforced []ask) ([]ask, *fault) {
	if m.config.Requests == nil {
		return enforced, nil
	}
	given, err := m.config.Requests(r)
	if err != nil {
		return nil, unasked(ratelimit.Limit{}, err)
	}
	all := enforced
	for i := range given {
		a := ask{rule: &Rule{}, given: &given[i], limit: given[i].Limit()}
		if a.limit.Policy() == nil {
			return nil, unasked(a.limit, fmt.Errorf("%w: Config.Requests returned a request for the zero Limit; make limits with ratelimit.Define",
				ratelimit.ErrInvalidLimit))
		}
		if a.apart(all) != nil {
			return nil, unasked(a.limit, fmt.Errorf("%w: Config.Requests asks the limit %q, and so does another request or a rule; ask each limit once",
				ratelimit.ErrInvalidRequest, a.limit.Name()))
		}
		if m.config.RetryJitter > 0 { // it is decided by the key
			if a.key, err = m.limiter.StoredKey(given[i]); err != nil {
				return nil, unasked(a.limit, err)
			}
		}
		all = append(all, a)
	}
	return all, nil
}
