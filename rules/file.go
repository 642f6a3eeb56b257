package rules

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"

	"github.com/pgratelimit/pgratelimit/internal/strictjson"
	"github.com/pgratelimit/pgratelimit/internal/yamltext"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Document is the content of a rules file: the rules of limits, the tiers of a site, and the overrides of single keys.
//
// A file is YAML or JSON with the fields match, rules, tiers and overrides:
//
//	match: all                  # or first; needed where there are tiers
//	rules:
//	  - limit: search
//	    plan: free              # every plan without a rule of its own, and none, if it is left out
//	    kind: token bucket      # or fixed window, sliding window, calendar window, concurrency
//	    rate: 10
//	    period: 1m              # also second, minute, hour, day, week, 7d
//	    capacity: 50            # default: the rate; 0 stores no tokens
//	    max_reserved: 0         # tokens that Reserve can owe; default: no bound
//	    shards: 4
//	    mode: on                # or shadow, off
//	    on_change: carry        # or keep, scale, add, reset
//	    unit: requests
//	    description: what a visitor may search
//	  - limit: uploads
//	    kind: fixed window
//	    rate: 10
//	    period: 1h
//	    start: 2026-01-01T00:00:00Z
//	  - limit: exports
//	    kind: sliding window
//	    rate: 100
//	    period: 1m
//	    slices: 60
//	  - limit: quota
//	    kind: calendar window
//	    rate: 1000
//	    resets: week            # or day, month, quarter, year
//	    zone: Europe/Berlin     # default: UTC
//	    first_weekday: monday   # of a week; default: sunday
//	  - limit: yearly
//	    kind: calendar window
//	    rate: 1000
//	    resets: year
//	    first_day: 6            # of a month, a quarter or a year; default: 1
//	    first_month: april      # of a quarter or a year; default: january
//	  - limit: jobs
//	    kind: concurrency
//	    slots: 5
//	    lease: 1m
//	tiers:
//	  - limit: search
//	    key: "{user}"
//	    route: GET /search
//	    when: {plan: free}
//	    cost_source: header:x-cost
//	    fixed_cost: 1
//	    default_cost: 1
//	overrides:
//	  - limit: search
//	    key: ada                # the stored key
//	    multiplier: 10          # or on_plan: pro, or policy: with the fields of a policy, and mode: beside it
//	    on_change: keep
//	    until: 2026-12-31T00:00:00Z
//
// The policy of a rule has the fields that [ratelimit.MarshalPolicy] writes.
type Document struct {
	// Rules are the policies, each limit and plan once.
	Rules []Rule
	// Tiers are the tiers of the site. Its Match is empty only where there are none.
	Tiers TierSet
	// Overrides are the policies of single keys.
	Overrides []Override
}

const (
	maxFileBytes = 2 << 20
	maxDepth     = 16
)

// ReadFile returns the content of the file at path, as Read does.
func ReadFile(path string) (*Document, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("rules: %w", err)
	}
	defer file.Close()
	d, err := Read(file)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return d, nil
}

// Read parses a rules file in YAML or JSON, up to 2 MiB. A field that doesn't exist or occurs twice, and a value of
// another type, are errors, which wrap ErrInvalid and name the line. NewSite checks later that the program declares the
// attributes of the file's tiers.
func Read(r io.Reader) (*Document, error) {
	root, err := readNode(r)
	if err != nil {
		return nil, err
	}
	d := &Document{}
	if err := d.read(root); err != nil {
		return nil, invalid("%w", err)
	}
	if err := d.validate(); err != nil {
		return nil, err
	}
	return d, nil
}

// ParsePolicy returns the policy with a rule's fields, separated by commas, as in a rules file: "rate: 10, period:
// minute, capacity: 50". Errors wrap ErrInvalid.
func ParsePolicy(fields string) (ratelimit.Policy, error) {
	root, err := readNode(strings.NewReader("{" + fields + "}"))
	if err != nil {
		return nil, err
	}
	data, err := jsonOf(root, 0)
	var policy ratelimit.Policy
	if err == nil {
		policy, err = ratelimit.UnmarshalPolicy(data)
	}
	if err != nil {
		return nil, invalid("%s", strings.TrimPrefix(err.Error(), ratelimit.ErrInvalidLimit.Error()+": "))
	}
	return policy, nil
}

// readNode parses a file.
func readNode(r io.Reader) (*yaml.Node, error) {
	text, err := io.ReadAll(io.LimitReader(r, maxFileBytes+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("rules: read: %w", err)
	case len(text) > maxFileBytes:
		return nil, invalid("the file has more than %d bytes; store so many rules by a program", maxFileBytes)
	case !utf8.Valid(text):
		return nil, invalid("the file is not UTF-8")
	}
	var file yaml.Node
	decoder := yaml.NewDecoder(bytes.NewReader(text))
	switch err := decoder.Decode(&file); {
	case errors.Is(err, io.EOF):
		return nil, invalid("the file is empty")
	case err != nil:
		problem := strings.TrimPrefix(err.Error(), "yaml: ")
		if !strings.HasPrefix(problem, "line ") {
			problem = "line 1: " + problem
		}
		return nil, invalid("%s", problem)
	}
	if err := decoder.Decode(&yaml.Node{}); !errors.Is(err, io.EOF) {
		return nil, invalid("the file has more than one document, or one that is not YAML; write one in each file")
	}
	return file.Content[0], nil
}

// read reads the parts of a file.
func (d *Document) read(root *yaml.Node) error {
	if root.Kind != yaml.MappingNode {
		return fmt.Errorf("line %d: the file is not a map with match, rules, tiers and overrides", root.Line)
	}
	seen := make(map[string]bool)
	for i := 0; i < len(root.Content); i += 2 {
		name, value := root.Content[i], root.Content[i+1]
		if seen[name.Value] {
			return fmt.Errorf("line %d: %q is given twice; keep one", name.Line, name.Value)
		}
		seen[name.Value] = true
		var err error
		switch name.Value {
		case "match":
			if value.ShortTag() != "!!null" {
				d.Tiers.Match = Match(value.Value)
			}
		case "rules":
			d.Rules, err = listOf(value, name.Value, func(r *Rule) (any, error) { return RuleID{r.Limit, r.Plan}, r.validate() })
		case "tiers":
			d.Tiers.Tiers, err = listOf(value, name.Value, func(t *Tier) (any, error) { return nil, t.check() })
		case "overrides":
			d.Overrides, err = listOf(value, name.Value,
				func(o *Override) (any, error) { return Bucket{o.Limit, o.Key}, o.Validate() })
		default:
			err = fmt.Errorf("line %d: there is no field %.40q; there are match, rules, tiers, overrides", name.Line, name.Value)
		}
		if err != nil {
			return err
		}
	}
	if d.Tiers.Match == "" && len(d.Tiers.Tiers) > 0 {
		return errors.New("match is missing; write all to ask the limit of each tier that fits, or first for only the " +
			"first")
	}
	return nil
}

// listOf decodes and checks the items of a list. check returns the identity of an item, of which there may be one; nil:
// it has none.
func listOf[T any](n *yaml.Node, name string, check func(*T) (any, error)) (items []T, err error) {
	if n.Kind != yaml.SequenceNode && n.ShortTag() != "!!null" {
		return nil, fmt.Errorf("line %d: %q is not a list", n.Line, name)
	}
	seen := make(map[any]int)
	for _, item := range n.Content {
		var t T
		data, err := jsonOf(item, 0)
		if err == nil {
			err = json.Unmarshal(data, &t)
		}
		var id any
		if err == nil {
			id, err = check(&t)
		}
		if line := seen[id]; err == nil && id != nil && line > 0 {
			err = fmt.Errorf("it repeats line %d; keep one", line)
		}
		if err != nil {
			return nil, fmt.Errorf("line %d: %s", lineOf(item, err), strings.TrimPrefix(err.Error(), ErrInvalid.Error()+": "))
		}
		seen[id] = item.Line
		items = append(items, t)
	}
	return items, nil
}

// lineOf returns the line of the field that err is about, or of the item.
func lineOf(item *yaml.Node, err error) int {
	if at, ok := errors.AsType[*lineError](err); ok {
		return at.line
	}
	if wrong, ok := errors.AsType[*strictjson.Error](err); ok {
		return max(lastLine(item, wrong.Field), item.Line)
	}
	return item.Line
}

// lastLine returns the last line of the item on which a field has the name; 0 if there is none.
func lastLine(item *yaml.Node, field string) (line int) {
	for i, n := range item.Content {
		if item.Kind == yaml.MappingNode && i%2 == 0 && n.Value == field {
			line = n.Line
		}
		line = max(line, lastLine(n, field))
	}
	return line
}

type lineError struct {
	line    int
	problem string
}

func (e *lineError) Error() string { return e.problem }

// jsonOf returns a part of a file as JSON. A word or number in quotes, and a YAML value that JSON does not have,
// becomes a text.
func jsonOf(n *yaml.Node, depth int) ([]byte, error) {
	switch {
	case depth > maxDepth:
		return nil, &lineError{n.Line, fmt.Sprintf("it is nested more than %d deep", maxDepth)}
	case n.Kind == yaml.AliasNode || n.Anchor != "" || n.Style&yaml.TaggedStyle != 0:
		return nil, &lineError{n.Line, "anchors, aliases and tags are not read; write out what they stand for"}
	case n.Kind == yaml.ScalarNode:
		if n.ShortTag() == "!!null" {
			return []byte("null"), nil
		}
		if n.ShortTag() != "!!str" && json.Valid([]byte(n.Value)) {
			return []byte(n.Value), nil
		}
		return json.Marshal(n.Value)
	}
	open, end := byte('['), byte(']')
	if n.Kind == yaml.MappingNode {
		open, end = '{', '}'
	}
	out := []byte{open}
	for i, item := range n.Content {
		isName := n.Kind == yaml.MappingNode && i%2 == 0
		if isName && item.Kind != yaml.ScalarNode {
			return nil, &lineError{item.Line, "the name of a field is no word"}
		}
		var text []byte
		var err error
		if isName {
			text, err = json.Marshal(item.Value)
			text = append(text, ':')
		} else {
			text, err = jsonOf(item, depth+1)
		}
		if err != nil {
			return nil, err
		}
		if i > 0 && (isName || n.Kind == yaml.SequenceNode) {
			out = append(out, ',')
		}
		out = append(out, text...)
	}
	return append(out, end), nil
}

// documentText has the parts of a document as they are written.
type documentText struct {
	Match     Match      `json:"match,omitempty"`
	Rules     []Rule     `json:"rules,omitempty"`
	Tiers     []Tier     `json:"tiers,omitempty"`
	Overrides []Override `json:"overrides,omitempty"`
}

// MarshalJSON returns the document as a rules file in JSON, which Read reads.
func (d Document) MarshalJSON() ([]byte, error) {
	return json.Marshal(documentText{d.Tiers.Match, d.Rules, d.Tiers.Tiers, d.Overrides})
}

// YAML writes the document as a rules file, which Read reads. A policy that ratelimit.MarshalPolicy rejects is an
// error.
func (d Document) YAML() ([]byte, error) {
	data, err := json.Marshal(d)
	if err != nil {
		return nil, fmt.Errorf("rules: write: %w", err)
	}
	file, err := yamltext.FromJSON(data)
	if err != nil {
		return nil, fmt.Errorf("rules: write: %w", err)
	}
	return file, nil
}

// validate returns an error where the parts of a document, each of which is checked, do not go together.
func (d *Document) validate() error {
	for i := range d.Rules {
		if err := d.validateCosts(&d.Rules[i]); err != nil {
			return err
		}
	}
	_, err := newTiers(d.Tiers, anyLimit, d.Attributes()...)
	return err
}

// validateCosts returns an error if a rule has less capacity than the known cost of a tier: it would admit no request.
func (d *Document) validateCosts(r *Rule) error {
	limit, err := r.AsLimit()
	if err != nil {
		return err
	}
	for i := range d.Tiers.Tiers {
		c := newCost(&d.Tiers.Tiers[i])
		if asks := c.known(); d.Tiers.Tiers[i].Limit == r.Limit && asks > limit.Capacity() {
			return invalid("rule %q, plan %q: its capacity is %v, and a tier asks %v of it, so that nobody would pass; raise "+
				"the capacity or lower the cost",
				r.Limit, r.Plan, limit.Capacity(), asks)
		}
	}
	return nil
}

// Attributes returns the tiers' attributes that SiteConfig must declare, sorted: all except those that every program
// has.
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
	return slices.DeleteFunc(slices.Compact(named),
		func(name string) bool { return slices.Contains(ownAttributes(), name) })
}

// anyLimit stands for a limit that a document names and a program defines.
func anyLimit(name string) (ratelimit.Limit, bool) {
	limit, err := ratelimit.NewLimit(name, ratelimit.PerSecond(1))
	return limit, err == nil
}
