package simulate

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strings"

	"github.com/pgratelimit/pgratelimit/internal/address"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// asks makes the requests of lines.
type asks struct {
	config *Config
	site   *rules.Site
	routes *routes
	wanted []string
	plans  map[string]bool                     // the plans of the rules of the tiers' limits
	line   *record                             // the current line
	stated func(source string) (said []string) // of line
}

// newAsks returns the asks of the rules, and the Set that decides.
func newAsks(config *Config) (*asks, *rules.Set, error) {
	file := config.Rules
	if config.By != "" {
		tier, err := config.tier()
		if err != nil {
			return nil, nil, err
		}
		file.Tiers = rules.TierSet{Match: rules.MatchAll, Tiers: []rules.Tier{tier}}
	}
	if len(file.Tiers.Tiers) == 0 {
		return nil, nil, fmt.Errorf("%w: the rules have no tiers, which say who is asked; add some, or say by what "+
			"attribute, such as address",
			ErrInvalidConfig)
	}
	set, err := rules.SetOf(file)
	if err != nil {
		return nil, nil, fmt.Errorf("%w: %w", ErrInvalidConfig, err)
	}
	attributes := file.Attributes()
	for _, t := range file.Tiers.Tiers {
		policies := policiesOf(&file, t.Limit)
		if len(policies) == 0 {
			return nil, nil, fmt.Errorf("%w: a tier names the limit %q, and there is no rule for it; add one, as the "+
				"definitions in a program are not known here",
				ErrInvalidConfig, t.Limit)
		}
		for _, p := range policies {
			if _, isSlots := p.(ratelimit.Concurrency); isSlots {
				return nil, nil, fmt.Errorf("%w: a tier names the limit %q, which is of slots; a log does not say how long they "+
					"are held: leave the tier out",
					ErrInvalidConfig, t.Limit)
			}
		}
	}
	site, err := rules.NewSite(set, rules.SiteConfig{Attributes: attributes})
	if err != nil {
		return nil, nil, fmt.Errorf("%w: %w", ErrInvalidConfig, err)
	}
	patterns, optional := config.Routes, false
	wanted := slices.Clone(attributes)
	for _, t := range file.Tiers.Tiers {
		if len(config.Routes) == 0 && t.Route != "" && !slices.Contains(patterns, t.Route) {
			patterns, optional = append(patterns, t.Route), true
		}
		if source := t.CostSource; strings.HasPrefix(source, "header:") && !slices.Contains(wanted, source) {
			wanted = append(wanted, source)
		}
	}
	routes, err := newRoutes(patterns, optional)
	if err != nil {
		return nil, nil, err
	}
	a := &asks{config: config, site: site, routes: routes, wanted: wanted, plans: plansOf(&file)}
	if config.Plan != "" && !a.plans[config.Plan] {
		return nil, nil, fmt.Errorf("%w: no rule of these limits is for the plan %.80q; there are rules for %s",
			ErrInvalidConfig, config.Plan,
			cmp.Or(strings.Join(slices.Sorted(maps.Keys(a.plans)), ", "), "no plan, so leave it out"))
	}
	a.stated = a.statedBy
	return a, set, nil
}

// tier returns the tier of By.
func (c *Config) tier() (rules.Tier, error) {
	limit := c.Limit
	if limit == "" {
		limits := make(map[string]bool)
		for _, r := range c.Rules.Rules {
			limits[r.Limit] = true
		}
		names := slices.Sorted(maps.Keys(limits))
		if len(names) != 1 {
			return rules.Tier{}, fmt.Errorf("%w: to ask by %.80q a limit has to be named, as the rules have %d: %s",
				ErrInvalidConfig, c.By, len(names), strings.Join(names[:min(len(names), 10)], ", "))
		}
		limit = names[0]
	}
	key := c.By
	if !strings.Contains(key, "{") {
		key = "{" + key + "}"
	}
	return rules.Tier{Limit: limit, Key: key}, nil
}

// policiesOf returns the policies of a limit's rules and overrides.
func policiesOf(file *rules.Document, limit string) (policies []ratelimit.Policy) {
	for _, r := range file.Rules {
		if r.Limit == limit {
			policies = append(policies, r.Policy)
		}
	}
	for _, o := range file.Overrides {
		if o.Limit == limit && len(policies) > 0 {
			policies = append(policies, o.Policy)
		}
	}
	return policies
}

// plansOf returns the plans of the rules of the tiers' limits.
func plansOf(file *rules.Document) map[string]bool {
	plans := make(map[string]bool)
	for _, r := range file.Rules {
		asked := slices.ContainsFunc(file.Tiers.Tiers, func(t rules.Tier) bool { return t.Limit == r.Limit })
		if asked && r.Plan != "" {
			plans[r.Plan] = true
		}
	}
	return plans
}

// of returns the requests of a line.
func (a *asks) of(r *record) ([]ratelimit.Request, error) {
	a.line = r
	for name := range r.fields {
		if address.IsAttribute(name) {
			r.fields[name] = a.network(r.fields[name])
		}
	}
	route := r.route
	if route == "" {
		route = a.routes.of(r.method, r.target)
	}
	requests, err := a.site.Requests(rules.Attributes{
		User: r.user, Tenant: r.tenant, Plan: a.plan(r), Address: a.network(r.address), Route: route, More: r.fields,
	}, a.stated)
	if err != nil && strings.Contains(r.address, ",") {
		return nil, errAddresses
	}
	return requests, err
}

// plan returns the plan of a line.
func (a *asks) plan(r *record) string { return cmp.Or(r.plan, a.config.Plan) }

var errAddresses = errors.New("it has a list of addresses, of which the client's is not known here; log the one that " +
	"the program takes")

// network returns the key of the client at an address, and other text unchanged, which the Site refuses where a key
// needs it.
func (a *asks) network(text string) string {
	if key, err := address.Key(text, a.config.IPv4Bits, a.config.IPv6Bits); err == nil {
		return key
	}
	return text
}

// statedBy returns the values of a line for a source of costs.
func (a *asks) statedBy(source string) []string {
	name, ofQuery := strings.CutPrefix(source, "query:")
	if !ofQuery {
		if value := a.line.fields[source]; value != "" {
			return []string{value}
		}
		return nil
	}
	_, query, _ := strings.Cut(a.line.target, "?")
	values, _ := url.ParseQuery(query) // the valid part, if a part is invalid
	return values[name]
}
