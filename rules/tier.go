package rules

import (
	"errors"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strings"

	"github.com/pgratelimit/pgratelimit/internal/address"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Tier is one of the limits that a site asks of its requests: of which requests, for which key, and at what cost.
type Tier struct {
	// Limit is the limit's name.
	Limit string
	// Key is the pattern of the key, such as "{user}" or "{tenant}/{user}": names of attributes in braces, with other text
	// between them. Defaults to "": the bucket that everybody shares, as ratelimit.Limit.Global.
	Key string
	// Route is the registered pattern of the route: "GET /api/search". A path alone
	// matches any method. Defaults to "": every route.
	Route string
	// When has attributes and their values, which must all match: {"plan": "enterprise"}. "*" matches every value that is
	// not empty, and "" matches a missing one. Defaults to nil: no condition.
	When map[string]string
	// CostSource is where the cost comes from: "fixed", "header:<name>" or "query:<name>". A client's statement isn't
	// verified, so let a proxy of yours set the header. Defaults to "fixed".
	CostSource string
	// FixedCost is the cost where CostSource is "fixed". Defaults to 1.
	FixedCost float64
	// DefaultCost is the cost of a request that states none, or no number above 0. A stated cost below 1 counts as 1, or
	// as DefaultCost if that is smaller. Defaults to 1.
	DefaultCost float64
}

// Match selects among the tiers that fit a request.
type Match string

const (
	// MatchAll asks each limit, and of several tiers with the same limit only the first that fits. It's the default.
	MatchAll Match = "all"
	// MatchFirst asks one limit, by the first tier that fits.
	MatchFirst Match = "first"
)

// TierSet is the list of tiers of a site.
type TierSet struct {
	// Match selects among the tiers that fit. Defaults to MatchAll.
	Match Match `json:"match"`
	// Tiers are in the order in which they are looked at.
	Tiers []Tier `json:"tiers"`
}

// Attributes are what tiers know about a request. Take them from data that your own code has verified, because clients
// that can choose their user can choose their bucket.
type Attributes struct {
	// User is the signed-in user. Patterns call it user.
	User string
	// Tenant is the customer that the user belongs to. Patterns call it tenant.
	Tenant string
	// Plan is the plan that the customer is on: its rules decide. Patterns call it plan.
	Plan string
	// Address is the client's IP address, such as 203.0.113.7 or [2001:db8::1]:443. Patterns call it address. Like
	// httplimit.ClientIP, keys and conditions have an IPv6 address's /64, and no port or zone: "2001:db8::/64". To count
	// larger networks, pass a prefix: 2001:db8::/48. An error wraps ratelimit.ErrInvalidKey if a key needs the address
	// and the text has none.
	Address string
	// Route is the pattern of the route that matched, as http.Request.Pattern. It is never the path, which has many
	// spellings. Patterns call it route.
	Route string
	// More has the other attributes that a program declares, by name. The attributes remote_address and
	// masked_remote_address, which Envoy sends, are addresses like Address.
	More map[string]string
}

// ErrNoTier is returned by Requests if no tier fits. Nothing limits such a request, so the caller decides whether it
// passes. A last tier without Route and When fits every request.
var ErrNoTier = errors.New("rules: no tier fits the request")

var (
	errNoTiers  = fmt.Errorf("%w: there are none; store tiers, or set SiteConfig.Tiers", ErrNoTier)
	errNoneFits = fmt.Errorf("%w; a Route is a pattern such as GET /search/{id}, and is compared as it is", ErrNoTier)
)

// readyTiers are the tiers of a site, checked and ready to ask. They do not change.
type readyTiers struct {
	match Match
	tiers []tier
}

// tier is a Tier that has been checked.
type tier struct {
	limit ratelimit.Limit
	key   *pattern // nil: the bucket that everybody shares
	route string
	when  []condition
	cost  cost
}

// condition is what an attribute must be.
type condition struct{ attribute, value string }

// newTiers returns the tiers of a set, ready to ask. limitOf returns the limit of a name, from the code or from a
// stored rule, and false where there is none. attributes are the names that Attributes.More may have, such as "region"
// or "header:x-api-key". An error wraps ErrInvalid and says what to change.
func newTiers(set TierSet,
	limitOf func(name string) (ratelimit.Limit, bool), attributes ...string,
) (*readyTiers, error) {
	if err := set.validate(); err != nil {
		return nil, err
	}
	known := append(ownAttributes(), attributes...)
	for i, name := range known {
		if !validAttribute.MatchString(name) || slices.Contains(known[:i], name) {
			return nil, invalid("the attribute %.40q: use a name of its own, of 1 to 64 letters, digits and _ . : -", name)
		}
	}
	t := &readyTiers{match: set.Match, tiers: make([]tier, len(set.Tiers))}
	for i := range set.Tiers {
		of := &set.Tiers[i]
		limit, ok := limitOf(of.Limit)
		if !ok {
			return nil, invalid("tier %d: nobody knows the limit %.80q; correct the name, store a rule for it, or define it "+
				"in the program (SiteConfig.Limits)", i, of.Limit)
		}
		var err error
		if t.tiers[i], err = newTier(of, limit, known); err != nil {
			return nil, invalid("tier %d, of %q: %w", i, limit.Name(), err)
		}
	}
	if err := t.validateKeys(); err != nil {
		return nil, err
	}
	return t, nil
}

// ownAttributes returns the attributes that every program has.
func ownAttributes() []string { return []string{"user", "tenant", "plan", "address", "route"} }

// newTier makes a tier ready, whose words and numbers are checked.
func newTier(of *Tier, limit ratelimit.Limit, known []string) (t tier, err error) {
	t = tier{limit: limit, route: of.Route}
	if of.Key != "" {
		if t.key, err = newPattern(of.Key, known); err != nil {
			return tier{}, fmt.Errorf("its Key is %.80q: %w", of.Key, err)
		}
	}
	for name, value := range of.When {
		if !slices.Contains(known, name) {
			return tier{}, fmt.Errorf("its When has the attribute %.40q; there are %s", name, strings.Join(known, ", "))
		}
		if value, err = wanted(name, value); err != nil {
			return tier{}, err
		}
		t.when = append(t.when, condition{name, value})
	}
	t.cost = newCost(of)
	return t, nil
}

// requests returns what to ask of the limits for a request; see Site.Requests.
func (t *readyTiers) requests(a Attributes, stated func(source string) []string) ([]ratelimit.Request, error) {
	var requests []ratelimit.Request
	for i := range t.tiers {
		tier := &t.tiers[i]
		if slices.ContainsFunc(requests, func(r ratelimit.Request) bool { return r.Limit().Name() == tier.limit.Name() }) {
			continue
		}
		fits, err := tier.fits(&a)
		if err != nil {
			return nil, err
		}
		if !fits {
			continue
		}
		request, err := tier.request(&a, stated)
		if err != nil {
			return nil, err
		}
		requests = append(requests, request)
		if t.match == MatchFirst {
			break
		}
	}
	switch {
	case len(t.tiers) == 0:
		return nil, errNoTiers
	case len(requests) == 0:
		return nil, errNoneFits
	}
	return requests, nil
}

// fits reports whether the tier applies to a request.
func (t *tier) fits(a *Attributes) (bool, error) {
	for _, c := range t.when {
		if is, _ := a.value(c.attribute); is != c.value && (c.value != "*" || is == "") {
			return false, nil
		}
	}
	switch {
	case t.route == "":
		return true, nil
	case a.Route == "":
		return false, fmt.Errorf("%w: a tier of %q is for a route, and the request has none; put the limit behind the "+
			"router, "+
			"and set Attributes.Route for requests that match no route", ratelimit.ErrInvalidRequest, t.limit.Name())
	}
	_, path, _ := strings.Cut(a.Route, " ")
	return t.route == a.Route || t.route == path, nil
}

// request returns the request to the tier's limit.
func (t *tier) request(a *Attributes, stated func(source string) []string) (ratelimit.Request, error) {
	request := t.limit.Global()
	if t.key != nil {
		key, err := t.key.expand(a)
		if err != nil {
			return ratelimit.Request{}, fmt.Errorf("%w: the key of %q needs %w", ratelimit.ErrInvalidKey, t.limit.Name(), err)
		}
		request = t.limit.For(key)
	}
	return request.Cost(t.cost.of(stated)).Plan(a.Plan), nil
}

// wanted returns the value of a condition as attributes have it: of an address the client's key.
func wanted(attribute, value string) (string, error) {
	if !address.IsAttribute(attribute) || value == "" || value == "*" {
		return value, nil
	}
	key, err := address.Key(value, address.IPv4Bits, address.IPv6Bits)
	if err != nil {
		return "", fmt.Errorf("its When has %.80q for %s, which is %w", value, attribute, err)
	}
	return key, nil
}

// value returns an attribute by its name. For an address it returns the client's key, or the text and an error.
func (a *Attributes) value(name string) (string, error) {
	text := a.text(name)
	if text == "" || !address.IsAttribute(name) {
		return text, nil
	}
	key, err := address.Key(text, address.IPv4Bits, address.IPv6Bits)
	if err != nil {
		return text, err
	}
	return key, nil
}

// text returns an attribute by its name, as the program passed it.
func (a *Attributes) text(name string) string {
	switch name {
	case "user":
		return a.User
	case "tenant":
		return a.Tenant
	case "plan":
		return a.Plan
	case "address":
		return a.Address
	case "route":
		return a.Route
	}
	return a.More[name]
}

const (
	maxTiers   = 1000
	maxPattern = 1024
	maxSource  = 256
	maxCost    = 1e12
)

var validSource = regexp.MustCompile(`^(fixed|(header|query):[!-~]+)$`)

func (s *TierSet) validate() error {
	switch {
	case s.Match != "" && s.Match != MatchAll && s.Match != MatchFirst:
		return invalid("tiers: Match is %.20q; use %q or %q", string(s.Match), MatchAll, MatchFirst)
	case len(s.Tiers) > maxTiers:
		return invalid("%d tiers; use up to %d", len(s.Tiers), maxTiers)
	}
	for i := range s.Tiers {
		if err := s.Tiers[i].check(); err != nil {
			return invalid("tier %d, of %.80q: %w", i, s.Tiers[i].Limit, err)
		}
	}
	return nil
}

// check checks what the table can hold.
func (t *Tier) check() error {
	for attribute, value := range t.When {
		if !isText(attribute, maxPattern) || !isText(value, maxPattern) {
			return fmt.Errorf("its When has %.80q; use up to %d bytes of UTF-8 without NUL", attribute, maxPattern)
		}
		if _, err := wanted(attribute, value); err != nil {
			return err
		}
	}
	if t.Key != "" && isText(t.Key, maxPattern) {
		if _, err := parsePattern(t.Key); err != nil {
			return fmt.Errorf("its Key is %.80q: %w", t.Key, err)
		}
	}
	switch {
	case !validName.MatchString(t.Limit):
		return errors.New("its Limit is not a limit's name; use 1 to 64 letters, digits and _ . : / -")
	case !isText(t.Key, maxPattern):
		return fmt.Errorf("its Key has %d bytes; use up to %d of UTF-8 without NUL", len(t.Key), maxPattern)
	case !isText(t.Route, maxPattern):
		return fmt.Errorf("its Route has %d bytes; use up to %d of UTF-8 without NUL", len(t.Route), maxPattern)
	case t.CostSource != "" && (len(t.CostSource) > maxSource || !validSource.MatchString(t.CostSource)):
		return fmt.Errorf("its CostSource is %.80q; use fixed, header:<name> or query:<name>", t.CostSource)
	case !isCost(t.FixedCost):
		return fmt.Errorf("its FixedCost is %v; use a number from 0 to %g", t.FixedCost, maxCost)
	case !isCost(t.DefaultCost):
		return fmt.Errorf("its DefaultCost is %v; use a number from 0 to %g", t.DefaultCost, maxCost)
	}
	return nil
}

func isCost(cost float64) bool { return cost >= 0 && cost <= maxCost && !math.IsNaN(cost) }
