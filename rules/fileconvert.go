package rules

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Convert returns the content of a file in one of two other forms, up to 2 MiB of YAML or JSON: a single record, a list
// of records, or a map with a list called rules.
//
//	{"name": "free", "limit_keys": ["header:x-api-key"], "match": {"jwt:plan": "free"},
//	 "algorithm": "token_bucket", "algorithm_config": {"rps": 10, "burst": 20, "cost_source": "fixed"}}
//	{"key_pattern": "user:{user_id}", "scope": "user", "plan": "free", "rate_per_second": 10, "burst_capacity": 50}
//
// Each record is a rule and a tier. In the first form the key joins the attributes of limit_keys; ip:address is the
// attribute address. A single record needs no name: its limit is called default. In the second form user_id, tenant_id
// and ip_address are the attributes user, tenant and address, and endpoint is route. endpoint:<route> is one bucket for
// all requests of that route, and global is one bucket for all requests. The name of the limit is the pattern without
// its placeholders. Rows with a plan apply to that plan only, unless the pattern has a row without a plan.
//
// All tiers of the second form apply. In the first form the first tier that fits applies, if all except the last have a
// match, and all have the same limit_keys. Convert returns an error for other files: write the tiers in the form that
// Read reads.
func Convert(r io.Reader) (*Document, error) {
	root, err := readNode(r)
	if err != nil {
		return nil, err
	}
	d, err := converted(root)
	if err != nil {
		return nil, invalid("%w", err)
	}
	if err := d.validate(); err != nil {
		return nil, err
	}
	return d, nil
}

// record is a record of either form.
type record struct {
	Name            string        `json:"name"`
	LimitKeys       []string      `json:"limit_keys"`
	Match           conditions    `json:"match"`
	Algorithm       string        `json:"algorithm"`
	AlgorithmConfig *recordConfig `json:"algorithm_config"`

	RuleID        json.RawMessage `json:"rule_id"`
	CreatedAt     json.RawMessage `json:"created_at"`
	KeyPattern    string          `json:"key_pattern"`
	Scope         string          `json:"scope"`
	Rate          float64         `json:"rate"`
	RatePerSecond float64         `json:"rate_per_second"`
	Burst         float64         `json:"burst"`
	BurstCapacity float64         `json:"burst_capacity"`
	Plan          string          `json:"plan"`
	IsActive      *bool           `json:"is_active"`
	Description   string          `json:"description"`

	rule Rule
	tier Tier
}

// recordConfig is what the first form says of a bucket.
type recordConfig struct {
	RPS             float64 `json:"rps"`
	TokensPerSecond float64 `json:"tokens_per_second"`
	Burst           float64 `json:"burst"`
	CostSource      string  `json:"cost_source"`
	FixedCost       float64 `json:"fixed_cost"`
	DefaultCost     float64 `json:"default_cost"`
}

// UnmarshalJSON returns an error for a field that does not exist.
func (c *recordConfig) UnmarshalJSON(data []byte) error {
	type plain recordConfig
	return decode(data, (*plain)(c), "algorithm_config")
}

// UnmarshalJSON returns an error for a field that does not exist.
func (r *record) UnmarshalJSON(data []byte) error {
	type plain record
	return decode(data, (*plain)(r), "a record")
}

// converted returns the document of a file.
func converted(root *yaml.Node) (*Document, error) {
	list := &yaml.Node{Kind: yaml.SequenceNode, Content: []*yaml.Node{root}}
	isAlone := true
	switch {
	case root.Kind == yaml.SequenceNode:
		list, isAlone = root, false
	case len(root.Content) == 2 && root.Content[0].Value == "rules":
		list, isAlone = root.Content[1], false
	}
	records, err := listOf(list, "rules", func(r *record) (any, error) {
		err := r.convert(isAlone)
		return RuleID{r.rule.Limit, r.rule.Plan}, err
	})
	if err != nil {
		return nil, err
	}
	d := &Document{}
	isRow := func(r record) bool { return r.KeyPattern != "" }
	rows := len(slices.DeleteFunc(slices.Clone(records), func(r record) bool { return !isRow(r) }))
	switch {
	case rows == len(records):
		d.Tiers.Match = MatchAll
		err = askByPlan(records)
	case rows > 0:
		err = errors.New("some records have a key_pattern and others do not; convert each form by itself")
	default:
		d.Tiers.Match, err = matchOf(records)
	}
	for _, r := range records {
		d.Rules = append(d.Rules, r.rule)
		if !slices.ContainsFunc(d.Tiers.Tiers, func(t Tier) bool { return reflect.DeepEqual(t, r.tier) }) {
			d.Tiers.Tiers = append(d.Tiers.Tiers, r.tier)
		}
	}
	return d, err
}

// convert sets the rule and the tier of a record.
func (r *record) convert(isAlone bool) error {
	if name := strings.ReplaceAll(r.Algorithm, "_", " "); name != "" && name != string(ratelimit.KindTokenBucket) {
		return fmt.Errorf("its algorithm is %.40q; only token_bucket is converted", r.Algorithm)
	}
	config := recordConfig{}
	if r.AlgorithmConfig != nil {
		config = *r.AlgorithmConfig
	}
	rates := []float64{config.RPS, config.TokensPerSecond, r.Rate, r.RatePerSecond}
	if count(rates[0] != 0, rates[1] != 0, rates[2] != 0, rates[3] != 0) != 1 {
		return errors.New("it has no rate per second, or more than one; keep one")
	}
	r.rule = Rule{Plan: r.Plan, Description: r.Description, Policy: ratelimit.TokenBucket{
		Rate: cmp.Or(rates...), Period: time.Second, Capacity: cmp.Or(config.Burst, r.Burst, r.BurstCapacity),
	}}
	if r.IsActive != nil && !*r.IsActive {
		r.rule.Mode = ratelimit.Off
	}
	r.tier = Tier{CostSource: config.CostSource, FixedCost: config.FixedCost, DefaultCost: config.DefaultCost}
	err := r.ask(isAlone)
	if err == nil {
		r.tier.Limit = r.rule.Limit
		err = r.rule.validate()
	}
	if err == nil {
		err = r.tier.check()
	}
	return err
}

// ask sets the requests that a record applies to, and the name of its limit.
func (r *record) ask(isAlone bool) error {
	if r.KeyPattern != "" {
		return r.askByPattern()
	}
	switch {
	case r.Scope != "" || r.Plan != "":
		return errors.New("it has a scope or a plan, and no key_pattern")
	case !isAlone && (r.Name == "" || r.LimitKeys == nil):
		return errors.New("it has no name or no limit_keys; write [] for a bucket that everybody shares")
	}
	r.rule.Limit = cmp.Or(r.Name, "default")
	for i, key := range r.LimitKeys {
		if !strings.Contains(key, ":") || !validAttribute.MatchString(key) {
			return fmt.Errorf("limit_keys has %.80q; use ip:address, header:<name>, query:<name> or jwt:<claim>", key)
		}
		if i > 0 {
			r.tier.Key += "|"
		}
		r.tier.Key += "{" + attributeOf(key) + "}"
	}
	for name, value := range r.Match {
		if r.tier.When == nil {
			r.tier.When = make(map[string]string)
		}
		r.tier.When[attributeOf(name)] = value
	}
	return nil
}

// attributeOf returns the attribute that the other forms call name.
func attributeOf(name string) string {
	attributes := map[string]string{
		"ip:address": "address", "ip": "address", "ip_address": "address", "user_id": "user",
		"tenant_id": "tenant", "endpoint": "route",
	}
	return cmp.Or(attributes[name], name)
}

// joiner matches placeholders of a pattern with the signs before them.
var joiner = regexp.MustCompile(`[^A-Za-z0-9]*\{[^{}]*\}`)

// askByPattern sets the requests that a record of the second form applies to.
func (r *record) askByPattern() error {
	if r.Name != "" || r.LimitKeys != nil || r.Match != nil || r.AlgorithmConfig != nil {
		return errors.New("it has a key_pattern and fields of the other form; keep one form")
	}
	route, isRoute := strings.CutPrefix(r.KeyPattern, "endpoint:")
	switch {
	case placeholder.MatchString(r.KeyPattern):
		r.tier.Key = placeholder.ReplaceAllStringFunc(r.KeyPattern,
			func(name string) string { return "{" + attributeOf(name[1:len(name)-1]) + "}" })
	case isRoute && route != "":
		r.tier.Route = route
	case r.KeyPattern != "global":
		return fmt.Errorf("its key_pattern is %.80q; use one such as user:{user_id}, endpoint:/search or global",
			r.KeyPattern)
	}
	r.rule.Limit = cmp.Or(strings.TrimLeft(joiner.ReplaceAllString(r.KeyPattern, ""), ":/.-_|, "), r.Scope)
	return r.checkScope()
}

// checkScope returns an error if the scope does not match the pattern.
func (r *record) checkScope() error {
	scopes := map[string]bool{
		"user": strings.Contains(r.tier.Key, "{user}"), "ip": strings.Contains(r.tier.Key, "{address}"),
		"endpoint": r.tier.Route != "" || strings.Contains(r.tier.Key, "{route}"), "global": r.tier.Key == "" &&
			r.tier.Route == "",
	}
	if r.Scope != "" && !scopes[r.Scope] {
		return fmt.Errorf("its scope is %.40q, and its key_pattern %.80q is of another", r.Scope, r.KeyPattern)
	}
	return nil
}

// askByPlan restricts the rows of a pattern to their plans, if each of them has one.
func askByPlan(records []record) error {
	patterns, forAll := map[string]string{}, map[string]bool{}
	for _, r := range records {
		if other, ok := patterns[r.rule.Limit]; ok && other != r.KeyPattern {
			return fmt.Errorf("the limit of the key_pattern %q is %q, as that of %q; write the rules in the form that rules "+
				"apply reads", r.KeyPattern, r.rule.Limit, other)
		}
		patterns[r.rule.Limit] = r.KeyPattern
		forAll[r.rule.Limit] = forAll[r.rule.Limit] || r.Plan == ""
	}
	for i := range records {
		if r := &records[i]; !forAll[r.rule.Limit] {
			r.tier.When = map[string]string{"plan": r.Plan}
		}
	}
	return nil
}

// matchOf returns how records of the first form are matched.
func matchOf(records []record) (Match, error) {
	if len(records) == 1 {
		return MatchAll, nil
	}
	for i, r := range records {
		isLast := i == len(records)-1
		if r.tier.Key != records[0].tier.Key || isLast != (len(r.tier.When) == 0) {
			return "", errors.New("it does not follow whether all records are asked or the first that fits: give them the " +
				"same limit_keys, and all but the last a match")
		}
	}
	return MatchFirst, nil
}
