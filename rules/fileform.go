package rules

import (
	"errors"
	"fmt"
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strings"
)

// builder gathers what the records of a file say.
type builder struct {
	alone      bool // whether the file is a single record
	rules      []Rule
	asked      []asked
	ids        seen[RuleID]
	overridden seen[Bucket]
}

func newBuilder() *builder { return &builder{ids: seen[RuleID]{}, overridden: seen[Bucket]{}} }

// seen is what a file has said already.
type seen[T comparable] map[T]bool

// add reports whether it is new.
func (s seen[T]) add(t T) bool {
	was := s[t]
	s[t] = true
	return !was
}

// form is how a record says whom it is asked of.
type form int

const (
	plain form = iota // a record of tiers
	keyed             // by limit_keys
	row               // by key_pattern
)

// asked is what a record says of whom it is asked of.
type asked struct {
	form form
	tier Tier
	plan string // that of a row
	text string // the limit_keys, or the key_pattern
	line int
}

// keyed reads how the first other form says whom a record is asked of.
func (b *builder) keyed(f *fields, r *Rule) error {
	t := Tier{When: attributesOf(f.words("match"))}
	readCost(f, &t)
	keys := f.texts("limit_keys")
	switch {
	case r.Limit == "" && !b.alone:
		return errors.New("it has no name; the limit is called by it")
	case !f.has("limit_keys") && !b.alone:
		return errors.New("it has no limit_keys; list whose buckets there are, or write [] for one that everybody shares")
	}
	for i, key := range keys {
		if !strings.Contains(key, ":") || !validAttribute.MatchString(key) {
			return fmt.Errorf("limit_keys has %.80q; use ip:address, header:<name>, query:<name> or jwt:<claim>", key)
		}
		if i > 0 {
			t.Key += "|"
		}
		t.Key += "{" + attributeOf(key) + "}"
	}
	t.Limit = r.Limit
	if t.Limit == "" {
		t.Limit = "default"
	}
	b.asked = append(b.asked, asked{form: keyed, tier: t, text: t.Key, line: f.line})
	return nil
}

// attributeOf returns the attribute that another form of file calls name.
func attributeOf(name string) string {
	switch name {
	case "ip:address", "ip", "ip_address":
		return "address"
	case "user_id":
		return "user"
	case "tenant_id":
		return "tenant"
	}
	return name
}

func attributesOf(match map[string]string) map[string]string {
	when := make(map[string]string, len(match))
	for name, value := range match {
		when[attributeOf(name)] = value
	}
	if len(when) == 0 {
		return nil
	}
	return when
}

// Placeholders of a pattern with what joins them to the text before.
var joined = regexp.MustCompile(`[^A-Za-z0-9]*\{[^{}]*\}`)

// row reads how the second other form says whom a record is asked of.
func (b *builder) row(f *fields, r *Rule) error {
	f.one("rule_id")
	f.one("created_at")
	t, text := Tier{}, f.text("key_pattern")
	readCost(f, &t)
	scope := f.oneOf("user", "endpoint", "global", "ip")("scope")
	route, isRoute := strings.CutPrefix(text, "endpoint:")
	placed := placeholder.FindAllStringSubmatch(text, -1)
	switch {
	case text == "":
		return errors.New("it has no key_pattern")
	case len(placed) > 0:
		t.Key = placeholder.ReplaceAllStringFunc(text, func(name string) string { return "{" + attributeOf(name[1:len(name)-1]) + "}" })
	case isRoute && route != "":
		t.Endpoint = route
	case text != "global":
		return fmt.Errorf("its key_pattern is %.80q; use one such as user:{user_id}, endpoint:/search or global", text)
	}
	if is := scopeOf(&t); scope != "" && !slices.Contains(is, scope) {
		return fmt.Errorf("its scope is %s, and its key_pattern %.80q is of the scope %s", scope, text, strings.Join(is, " or "))
	}
	if r.Limit == "" {
		r.Limit = strings.TrimLeft(joined.ReplaceAllString(text, ""), ":/.-_|, ")
	}
	if r.Limit == "" {
		r.Limit = scope
	}
	t.Limit = r.Limit
	b.asked = append(b.asked, asked{form: row, tier: t, plan: r.Plan, text: text, line: f.line})
	return nil
}

// scopeOf returns the scopes that a row may say to be of.
func scopeOf(t *Tier) []string {
	scopes := []string{}
	for attribute, scope := range map[string]string{"{user}": "user", "{address}": "ip", "{endpoint}": "endpoint"} {
		if strings.Contains(t.Key, attribute) {
			scopes = append(scopes, scope)
		}
	}
	switch {
	case t.Endpoint != "":
		return []string{"endpoint"}
	case t.Key == "":
		return []string{"global"}
	}
	slices.Sort(scopes)
	return scopes
}

// finish makes the document of what the records say.
func (b *builder) finish(d *Document) error {
	d.Rules = b.rules
	texts, forAll := map[string]string{}, map[string]bool{}
	for _, a := range b.asked {
		if a.form != row {
			continue
		}
		if other, ok := texts[a.tier.Limit]; ok && other != a.text {
			return fmt.Errorf("line %d: the limit of the key_pattern %q is %q, as that of %q; give one of them another limit",
				a.line, a.text, a.tier.Limit, other)
		}
		texts[a.tier.Limit] = a.text
		forAll[a.tier.Limit] = forAll[a.tier.Limit] || a.plan == ""
	}
	for _, a := range b.asked {
		if a.form == row && !forAll[a.tier.Limit] {
			a.tier.When = map[string]string{"plan": a.plan}
		}
		same := func(t Tier) bool { return reflect.DeepEqual(t, a.tier) } // as of the rows of several plans
		if a.form == plain || !slices.ContainsFunc(d.Tiers.Tiers, same) {
			d.Tiers.Tiers = append(d.Tiers.Tiers, a.tier)
		}
		if len(d.Tiers.Tiers) > maxTiers {
			return fmt.Errorf("line %d: there are more than %d tiers", a.line, maxTiers)
		}
	}
	if d.Tiers.Match == "" {
		d.Tiers.Match = b.match(len(d.Tiers.Tiers))
	}
	if d.Tiers.Match == "" && len(d.Tiers.Tiers) > 0 {
		return errors.New("match is missing: say all, so that each limit is asked whose tier fits, or first, so that the first tier that fits is")
	}
	return nil
}

// match returns how the records are to be matched, where their forms say it, of a file that does not.
func (b *builder) match(tiers int) Match {
	forms := map[form]bool{}
	for _, a := range b.asked {
		forms[a.form] = true
	}
	switch {
	case len(forms) != 1 || forms[plain]:
		return ""
	case forms[row] || tiers == 1:
		return MatchAll
	}
	for i, a := range b.asked {
		isLast := i == len(b.asked)-1
		if a.text != b.asked[0].text || isLast != (len(a.tier.When) == 0) {
			return ""
		}
	}
	return MatchFirst
}

// sortedNames returns the names of a map in order.
func sortedNames(m map[string]string) []string { return slices.Sorted(maps.Keys(m)) }
