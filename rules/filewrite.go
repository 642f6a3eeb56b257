package rules

import (
	"bytes"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// YAML returns the document as a file that Read reads, under one name for each thing.
func (d *Document) YAML() []byte {
	var b bytes.Buffer
	d.node().writeYAML(&b, 0)
	return b.Bytes()
}

// node returns the document as nodes.
func (d *Document) node() *node {
	n := &node{kind: object}
	n.word("match", string(d.Tiers.Match))
	rules := n.list("rules")
	for i := range d.Rules {
		rules.items = append(rules.items, d.Rules[i].node())
	}
	if len(d.Tiers.Tiers) > 0 {
		tiers := n.list("tiers")
		for i := range d.Tiers.Tiers {
			tiers.items = append(tiers.items, d.Tiers.Tiers[i].node())
		}
	}
	if len(d.Overrides) > 0 {
		overrides := n.list("overrides")
		for i := range d.Overrides {
			overrides.items = append(overrides.items, d.Overrides[i].node())
		}
	}
	return n
}

func (r *Rule) node() *node {
	n := &node{kind: object}
	n.word("limit", r.Limit)
	n.word("plan", r.Plan)
	r.addPolicy(n)
	n.word("on_change", string(r.OnChange))
	n.word("unit", r.Unit)
	n.word("description", r.Description)
	return n
}

func (t *Tier) node() *node {
	n := &node{kind: object}
	n.word("limit", t.Limit)
	n.word("key", t.Key)
	n.word("endpoint", t.Endpoint)
	if len(t.When) > 0 {
		when := &node{kind: object}
		for _, name := range sortedNames(t.When) {
			when.put(name, &node{kind: scalar, text: t.When[name], quoted: true})
		}
		n.put("when", when)
	}
	n.word("cost_source", t.CostSource)
	if t.FixedCost != 0 {
		n.number("fixed_cost", &t.FixedCost)
	}
	if t.DefaultCost != 0 {
		n.number("default_cost", &t.DefaultCost)
	}
	return n
}

func (o *Override) node() *node {
	n := &node{kind: object}
	n.word("limit", o.Limit)
	n.word("key", o.Key)
	if o.Multiplier != 0 {
		n.number("multiplier", &o.Multiplier)
	}
	n.word("on_plan", o.OnPlan)
	if o.Policy != nil {
		policy := &node{kind: object}
		o.Policy.addPolicy(policy)
		n.put("policy", policy)
	}
	n.word("on_change", string(o.OnChange))
	n.instant("until", o.Until)
	return n
}

func (n *node) put(name string, value *node) {
	n.fields = append(n.fields, field{name: name, value: value})
}

// list adds a list.
func (n *node) list(name string) *node {
	l := &node{kind: list}
	n.put(name, l)
	return l
}

// word adds a text, unless it is empty.
func (n *node) word(name, text string) {
	if text != "" {
		n.put(name, &node{kind: scalar, text: text, quoted: true})
	}
}

// number adds a number, unless there is none.
func (n *node) number(name string, value *float64) {
	if value != nil {
		n.put(name, &node{kind: scalar, text: strconv.FormatFloat(*value, 'g', -1, 64)})
	}
}

func (n *node) instant(name string, at time.Time) {
	if !at.IsZero() {
		n.word(name, at.UTC().Format(time.RFC3339Nano))
	}
}

// unquoted are the words that need no quotes in YAML, once those are left out that mean something.
var (
	unquoted = regexp.MustCompile(`^([A-Za-z/]|[A-Za-z/][A-Za-z0-9_./:-]*[A-Za-z0-9_/])( ([A-Za-z0-9_/]|[A-Za-z0-9_/][A-Za-z0-9_./:-]*[A-Za-z0-9_/]))*$|^([0-9]+[hms])+$`)
	meaning  = regexp.MustCompile(`^(?i:null|true|false|yes|no|on|off|y|n)$`)
)

// writeYAML writes a node, and the end of its line.
func (n *node) writeYAML(b *bytes.Buffer, indent int) {
	margin := "\n" + strings.Repeat("  ", indent)
	switch {
	case n.kind == scalar:
		b.WriteString(" " + n.yamlText() + "\n")
	case len(n.items)+len(n.fields) == 0:
		b.WriteString(map[nodeKind]string{list: " []\n", object: " {}\n"}[n.kind])
	case n.kind == list:
		b.WriteString("\n")
		for _, item := range n.items {
			b.WriteString(margin[1:] + "-")
			if item.kind == object {
				item.writeFields(b, indent+1, " ")
				continue
			}
			item.writeYAML(b, indent+1)
		}
	default:
		if indent > 0 {
			b.WriteString("\n")
		}
		n.writeFields(b, indent, margin[1:])
	}
}

// writeFields writes the fields of an object, the first of them after some other margin than the rest.
func (n *node) writeFields(b *bytes.Buffer, indent int, first string) {
	margin := first
	for _, f := range n.fields {
		name := node{text: f.name, quoted: true}
		b.WriteString(margin + name.yamlText() + ":")
		f.value.writeYAML(b, indent+1)
		margin = strings.Repeat("  ", indent)
	}
}

// yamlText returns a scalar in YAML.
func (n *node) yamlText() string {
	if !n.quoted || unquoted.MatchString(n.text) && !meaning.MatchString(n.text) {
		return n.text
	}
	return strconv.QuoteToASCII(n.text)
}
