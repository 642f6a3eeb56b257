package rules

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/words"
)

// fields reads the fields of an object, each once. The first error stays, and end returns it.
type fields struct {
	line   int
	fields []field
	known  []string
	err    error
	lacks  error // what is missing, unless err or a field that is not known says why
}

func newFields(n *node) *fields {
	f := &fields{line: n.line, fields: n.fields}
	if n.kind != object {
		f.fail(n.line, "there is %s where a map should be", n.kind)
	}
	return f
}

// fail notes an error, unless there is one.
func (f *fields) fail(line int, format string, args ...any) {
	if f.err == nil {
		f.err = fmt.Errorf("line %d: %w", line, fmt.Errorf(format, args...))
	}
}

// end returns the error, if any, and one for a field that nobody has read.
func (f *fields) end() error {
	for _, other := range f.fields {
		if !slices.Contains(f.known, other.name) {
			f.fail(other.line, "there is no field %.80q; there are %s", other.name, strings.Join(f.known, ", "))
		}
	}
	if f.err == nil {
		return f.lacks
	}
	return f.err
}

// lack notes what is missing: a field that is not known may have been meant to be it, so that its error comes first.
func (f *fields) lack(line int, what string) {
	if f.lacks == nil {
		f.lacks = fmt.Errorf("line %d: %s", line, what)
	}
}

// one returns the field that has one of the names, if there is one and it is not null.
func (f *fields) one(names ...string) *field {
	f.known = append(f.known, names...)
	var found *field
	for i := range f.fields {
		this := &f.fields[i]
		if !slices.Contains(names, this.name) || this.value.kind == nothing {
			continue
		}
		if found != nil {
			f.fail(this.line, "%q says what %q on line %d says already; keep one", this.name, found.name, found.line)
		}
		found = this
	}
	return found
}

// has reports whether a field is there that one of the names has, and is not null.
func (f *fields) has(names ...string) bool {
	return slices.ContainsFunc(f.fields, func(o field) bool { return slices.Contains(names, o.name) && o.value.kind != nothing })
}

// ofKind is one for values of a kind.
func (f *fields) ofKind(kind nodeKind, names ...string) *field {
	found := f.one(names...)
	if found != nil && found.value.kind != kind {
		f.fail(found.value.line, "%q is %s; it has to be %s", found.name, found.value.kind, kind)
		return nil
	}
	return found
}

// text returns a text: "" where there is none.
func (f *fields) text(names ...string) string {
	if found := f.ofKind(scalar, names...); found != nil {
		return found.value.text
	}
	return ""
}

// oneOf returns a text that is one of a few words.
func (f *fields) oneOf(words ...string) func(names ...string) string {
	return func(names ...string) string {
		found := f.ofKind(scalar, names...)
		if found == nil {
			return ""
		}
		if !slices.Contains(words, found.value.text) {
			f.fail(found.value.line, "%q is %.40q; use %s", found.name, found.value.text, strings.Join(words, " or "))
		}
		return found.value.text
	}
}

var decimal = regexp.MustCompile(`^-?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]+)?$`)

// number returns a number, or nil where there is none.
func (f *fields) number(names ...string) *float64 {
	found := f.ofKind(scalar, names...)
	if found == nil {
		return nil
	}
	n, err := strconv.ParseFloat(found.value.text, 64)
	if found.value.quoted || err != nil || !decimal.MatchString(found.value.text) {
		f.fail(found.value.line, "%q is %.40q; it has to be a number", found.name, found.value.text)
		return nil
	}
	return &n
}

// above is number for one above 0, which is 0 where there is none.
func (f *fields) above(names ...string) float64 {
	n := f.number(names...)
	if n == nil {
		return 0
	}
	if !(*n > 0) {
		f.fail(f.one(names...).line, "%q is %v; use a number above 0", names[0], *n)
	}
	return *n
}

// whole returns a whole number, which is 0 where there is none.
func (f *fields) whole(name string) int {
	found := f.ofKind(scalar, name)
	if found == nil {
		return 0
	}
	n, err := strconv.Atoi(found.value.text)
	if found.value.quoted || err != nil {
		f.fail(found.value.line, "%q is %.40q; it has to be a whole number", found.name, found.value.text)
	}
	return n
}

// truth returns true or false, or nil where there is none.
func (f *fields) truth(name string) *bool {
	found := f.ofKind(scalar, name)
	if found == nil {
		return nil
	}
	is := found.value.text == "true"
	if found.value.quoted || !is && found.value.text != "false" {
		f.fail(found.value.line, "%q is %.40q; it has to be true or false", found.name, found.value.text)
	}
	return &is
}

// instant returns an instant.
func (f *fields) instant(name string) time.Time {
	found := f.ofKind(scalar, name)
	if found == nil {
		return time.Time{}
	}
	at, err := time.Parse(time.RFC3339Nano, found.value.text)
	if err != nil {
		f.fail(found.value.line, "%q is %.40q; write it as 2026-01-31T15:04:05Z", found.name, found.value.text)
	}
	return at.UTC()
}

// span returns a span of time.
func (f *fields) span(name string) time.Duration {
	found := f.ofKind(scalar, name)
	if found == nil {
		return 0
	}
	d, err := words.ParseSpan(found.value.text)
	if err != nil {
		f.fail(found.value.line, "%q is %.40q; %w", found.name, found.value.text, err)
	}
	return d
}

// list returns the items of a list.
func (f *fields) list(name string) []*node {
	if found := f.ofKind(list, name); found != nil {
		return found.value.items
	}
	return nil
}

// texts returns the items of a list of texts.
func (f *fields) texts(name string) []string {
	var texts []string
	for _, item := range f.list(name) {
		if item.kind != scalar {
			f.fail(item.line, "%q has %s in it; it has to be a list of words", name, item.kind)
		}
		texts = append(texts, item.text)
	}
	return texts
}

// words returns an object whose values are texts.
func (f *fields) words(name string) map[string]string {
	found := f.ofKind(object, name)
	if found == nil || len(found.value.fields) == 0 {
		return nil
	}
	words := make(map[string]string, len(found.value.fields))
	for _, o := range found.value.fields {
		if o.value.kind != scalar {
			f.fail(o.line, "%q of %q is %s; it has to be a word", o.name, name, o.value.kind)
		}
		words[o.name] = o.value.text
	}
	return words
}
