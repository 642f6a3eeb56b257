package rules

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"unicode/utf8"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Document is what a rules file says: the rules of limits, the tiers of a site, and what single keys have instead.
//
// A file is YAML or JSON with the fields match, rules, tiers and overrides:
//
//	match: all                  # or first; needed where there are tiers
//	rules:
//	  - limit: search           # also: name
//	    plan: free
//	    rate: 10                # also, each second: rps, tokens_per_second, rate_per_second
//	    period: 1m              # also second, minute, hour, day, week
//	    capacity: 50            # also: burst, burst_capacity; as much as the rate without one
//	    max_reserved: 0         # no bound without one
//	    kind: token bucket      # or fixed window, sliding window, calendar window, concurrency; also: algorithm: token_bucket
//	    shards: 4
//	    start: 2026-01-01T00:00:00Z
//	    mode: on                # or shadow, off; also: is_active: true, false
//	    on_change: keep         # or scale, add, reset
//	    unit: requests
//	    description: what a visitor may search
//	    adaptive:               # of a token bucket, a fixed window and a calendar window
//	      floor: 0.1
//	      growth: 0.04          # each second
//	      epoch: 2s
//	      apply: true           # or false: the price is only told
//	  - limit: exports
//	    kind: sliding window
//	    rate: 100
//	    period: 1m
//	    slices: 60
//	  - limit: quota
//	    kind: calendar window
//	    rate: 1000
//	    resets: week            # or day, month, quarter, year
//	    zone: Europe/Berlin     # UTC without one
//	    first_weekday: monday   # of a week; sunday without one
//	    first_day: 1            # of a month, a quarter or a year
//	    first_month: april      # of a quarter or a year; january without one
//	    max_reserved: 0         # as much as the rate without one
//	  - limit: jobs
//	    kind: concurrency
//	    most: 5
//	    lease: 1m
//	tiers:
//	  - limit: search
//	    key: "{user}"
//	    endpoint: GET /search
//	    when: {plan: free}
//	    cost_source: header:x-cost
//	    fixed_cost: 1
//	    default_cost: 1
//	overrides:
//	  - limit: search
//	    key: ada                # as it is stored
//	    multiplier: 10          # or on_plan: pro, or policy: with the fields of a rule
//	    on_change: keep
//	    until: 2026-12-31T00:00:00Z
//
// A record of rules may say whom it is asked of, too, in either of two other forms, and then is a tier as well:
//
//	{"name": "free", "limit_keys": ["header:x-api-key"], "match": {"jwt:plan": "free"},
//	 "algorithm": "token_bucket", "algorithm_config": {"rps": 10, "burst": 20, "cost_source": "fixed"}}
//	{"key_pattern": "user:{user_id}", "scope": "user", "plan": "free", "rate_per_second": 10, "burst_capacity": 50}
//
// In the first form the key joins what limit_keys lists: ip:address is the attribute address, and every other one is an
// attribute of that name. In the second, a rate without a period is per second, user_id, tenant_id and ip_address are
// user, tenant and address; endpoint:<route> is the bucket that everybody shares at that route, and global that of all
// requests. The limit is named by the pattern without its placeholders, unless the record has a limit. Rows with a plan
// are asked of that plan only, unless the pattern has a row without one. A file may also be a list of records, or a
// single one, which needs no name: its limit is then called default.
//
// Where match is left out, rows of the second form are all asked. Records of the first form are tried one after the other
// where all but the last have a match and all have the same limit_keys, so that the last is what is left for others.
// Anything else has to say match.
type Document struct {
	// Rules are the policies, each limit and plan once.
	Rules []Rule
	// Tiers are the tiers of the site. Its Match is empty only where there are none.
	Tiers TierSet
	// Overrides are the policies of single keys.
	Overrides []Override
}

// maxFileBytes is how long a file may be.
const maxFileBytes = 2 << 20

// ReadFile returns what the file at path says, as Read does.
func ReadFile(path string) (*Document, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("rules: %w", err)
	}
	defer file.Close()
	d, err := Read(file)
	if err != nil {
		return nil, fmt.Errorf("rules: %s: %w", path, err)
	}
	return d, nil
}

// Read returns what a rules file says, in YAML or JSON, up to 2 MiB. It is strict: a field that is not known, one that is
// given twice, also under two of its names, and a value of another type are errors. In YAML, so are more than 100 blank lines
// in a row and more than 1000 entries and fields without a value, which would take long to read. An error wraps ErrInvalid and
// names the line. What Read returns is valid, by itself: whether its tiers name attributes that the program declares is for NewTiers.
func Read(r io.Reader) (*Document, error) {
	text, err := io.ReadAll(io.LimitReader(r, maxFileBytes+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("rules: read: %w", err)
	case len(text) > maxFileBytes:
		return nil, invalid("the file has more than %d bytes; store so many rules by a program", maxFileBytes)
	case !utf8.Valid(text):
		return nil, invalid("the file is not UTF-8")
	}
	root, err := parse(bytes.TrimPrefix(text, []byte("\ufeff"))) // the mark that editors on Windows begin a file with
	if err != nil {
		return nil, invalid("%w", err)
	}
	d, err := documentOf(root)
	if err == nil {
		err = d.validate()
	}
	switch {
	case err == nil:
		return d, nil
	case errors.Is(err, ErrInvalid):
		return nil, err
	}
	return nil, invalid("%w", err)
}

// validate returns an error where the parts of a document, each of which is checked, do not go together.
func (d *Document) validate() error {
	for i := range d.Rules {
		if err := d.validateCosts(&d.Rules[i]); err != nil {
			return err
		}
	}
	_, err := NewTiers(d.Tiers, anyLimit, d.Attributes()...)
	return err
}

// validateCosts returns an error where a rule has less capacity than a tier is known to ask: nobody would pass.
func (d *Document) validateCosts(r *Rule) error {
	policy, err := r.policy()
	if err != nil {
		return err
	}
	limit, err := ratelimit.NewLimit(r.Limit, policy)
	if err != nil {
		return err
	}
	for i := range d.Tiers.Tiers {
		c := newCost(&d.Tiers.Tiers[i])
		if asks := c.known(); d.Tiers.Tiers[i].Limit == r.Limit && asks > limit.Capacity() {
			return invalid("rule %q, plan %q: its capacity is %v, and a tier asks %v of it, so that nobody would pass; raise the capacity or lower the cost",
				r.Limit, r.Plan, limit.Capacity(), asks)
		}
	}
	return nil
}

// Attributes returns the attributes that the tiers name besides those that every program has, sorted: what SiteConfig has to
// declare.
func (d *Document) Attributes() []string {
	var named []string
	for _, t := range d.Tiers.Tiers {
		for _, at := range placeholder.FindAllStringSubmatch(t.Key, -1) {
			named = append(named, at[1])
		}
		for name := range t.When {
			named = append(named, name)
		}
	}
	slices.Sort(named)
	return slices.DeleteFunc(slices.Compact(named), func(name string) bool { return slices.Contains(ownAttributes(), name) })
}

// anyLimit stands for a limit that a document names and a program defines.
func anyLimit(name string) (ratelimit.Limit, bool) {
	limit, err := ratelimit.NewLimit(name, ratelimit.PerSecond(1))
	return limit, err == nil
}

// parts returns the names of the lists in a file.
func parts() []string { return []string{"rules", "tiers", "overrides"} }

// hasParts reports whether a map is a whole file, and not a single record, whose match is a map.
func hasParts(root *node) bool {
	return slices.ContainsFunc(root.fields, func(f field) bool {
		return slices.Contains(parts(), f.name) || f.name == "match" && f.value.kind == scalar
	})
}

// documentOf reads a whole file.
func documentOf(root *node) (*Document, error) {
	d, b := &Document{}, newBuilder()
	switch {
	case root.kind == list:
		if err := b.records(root.items); err != nil {
			return nil, err
		}
	case root.kind != object:
		return nil, fmt.Errorf("line %d: the file is neither a list of rules nor a map with rules, tiers and overrides", root.line)
	case hasParts(root):
		f := newFields(root)
		d.Tiers.Match = Match(f.oneOf(string(MatchAll), string(MatchFirst))("match"))
		records, tiers, overrides := f.list("rules"), f.list("tiers"), f.list("overrides")
		if err := f.end(); err != nil {
			return nil, err
		}
		if err := b.records(records); err != nil {
			return nil, err
		}
		if err := b.tierRecords(tiers); err != nil {
			return nil, err
		}
		for _, item := range overrides {
			if err := b.override(d, item); err != nil {
				return nil, err
			}
		}
	default:
		b.alone = true
		if err := b.records([]*node{root}); err != nil {
			return nil, err
		}
	}
	return d, b.finish(d)
}
