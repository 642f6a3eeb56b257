package rules

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
)

var (
	validAttribute = regexp.MustCompile(`^[A-Za-z0-9_.:-]{1,64}$`)
	placeholder    = regexp.MustCompile(`\{([^{}]*)\}`)
)

const keyEscape = `\`

// pattern is the Key of a tier: literals[0] names[0] literals[1] ... names[n-1] literals[n].
type pattern struct {
	text       string
	literals   []string
	names      []string
	separators string // the bytes to escape in values: the first bytes of the literals between them
}

// newPattern returns a pattern over the attributes that are known.
func newPattern(text string, known []string) (*pattern, error) {
	p, err := parsePattern(text)
	if err != nil {
		return nil, err
	}
	for _, name := range p.names {
		if !slices.Contains(known, name) {
			return nil, fmt.Errorf("it names the attribute %.40q; there are %s", name, strings.Join(known, ", "))
		}
	}
	return p, nil
}

// parsePattern returns a pattern over any attributes.
func parsePattern(text string) (*pattern, error) {
	p := &pattern{text: text}
	end := 0
	for _, at := range placeholder.FindAllStringSubmatchIndex(text, -1) {
		p.literals, p.names = append(p.literals, text[end:at[0]]), append(p.names, text[at[2]:at[3]])
		end = at[1]
	}
	p.literals = append(p.literals, text[end:])
	for _, literal := range p.literals {
		if strings.ContainsAny(literal, `{}\`) {
			return nil, errors.New(`it has a brace or a \ outside of a {name}; use other separators`)
		}
	}
	if len(p.names) == 0 {
		return nil, errors.New("it names no attribute; write one as {user}, or leave the key empty for the bucket that " +
			"everybody shares")
	}
	for i, name := range p.names {
		if !validAttribute.MatchString(name) {
			return nil, fmt.Errorf("it names the attribute %.40q; a name has 1 to 64 letters, digits and _ . : -", name)
		}
		if i == 0 {
			continue
		}
		if p.literals[i] == "" {
			return nil, fmt.Errorf("there is nothing between {%s} and {%s}; separate them, as by a /", p.names[i-1], name)
		}
		if c := p.literals[i][0]; c < ' ' || c > '~' {
			return nil, fmt.Errorf("{%s} and {%s} are separated by text that is not ASCII; use a sign such as /",
				p.names[i-1], name)
		}
		p.separators += p.literals[i][:1]
	}
	return p, nil
}

// expand returns the key of a request, or an error for the attribute that it lacks. Different attributes have different
// keys: in a value, what separates it from the next one is escaped, so that "a/b" with "c" is not "a" with "b/c". A
// single value needs no escapes, and has none.
func (p *pattern) expand(a *Attributes) (string, error) {
	var b strings.Builder
	for i, name := range p.names {
		value, err := a.value(name)
		switch {
		case err != nil:
			return "", fmt.Errorf("the attribute %q, which is %w", name, err)
		case value == "":
			return "", fmt.Errorf("the attribute %q, and the request has none", name)
		}
		b.WriteString(p.literals[i])
		for j := range len(value) {
			if c := value[j : j+1]; p.separators != "" && (c == keyEscape || strings.Contains(p.separators, c)) {
				b.WriteString(keyEscape)
			}
			b.WriteByte(value[j])
		}
	}
	b.WriteString(p.literals[len(p.names)])
	return b.String(), nil
}

// validateKeys returns an error where a limit has two patterns of which one request may spell the key of the other's.
func (t *readyTiers) validateKeys() error {
	byLimit := make(map[string][]*pattern, len(t.tiers))
	for i := range t.tiers {
		name, p := t.tiers[i].limit.Name(), t.tiers[i].key
		if p == nil || slices.ContainsFunc(byLimit[name], func(q *pattern) bool { return q.text == p.text }) {
			continue
		}
		for _, q := range byLimit[name] {
			if strings.HasPrefix(p.literals[0], q.literals[0]) || strings.HasPrefix(q.literals[0], p.literals[0]) {
				return invalid("tier %d, of %q: its Key %q and another tier's Key %q could make the same key; "+
					"begin each with a word of its own, such as user:{user} and address:{address}", i, name, p.text, q.text)
			}
		}
		byLimit[name] = append(byLimit[name], p)
	}
	return nil
}
