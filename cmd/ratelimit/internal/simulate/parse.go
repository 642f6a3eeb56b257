package simulate

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/address"
)

// record has the fields of a request in a line. Missing fields are empty.
type record struct {
	at      time.Time
	address string
	user    string
	tenant  string
	plan    string
	method  string
	target  string // as in the request line: a path with a query, or a URL
	route   string
	fields  map[string]string // the attributes of parser.wanted
}

// parser reads lines.
type parser struct {
	wanted []string               // the other attributes that tiers name
	paths  map[string][]fieldPath // the JSON fields of each attribute; the first existing one counts
	record *record                // of the line that parse reads

	// Consecutive lines often have the same time.
	lastText string
	lastAt   time.Time
}

// fieldPath is the names of the objects around a JSON field, and its own name.
type fieldPath []string

// newParser returns a parser. names are the names of JSON fields by attribute, and wanted are other attributes.
func newParser(names map[string]string, wanted []string) *parser {
	p := &parser{wanted: wanted, paths: make(map[string][]fieldPath)}
	for _, attribute := range append([]string{
		"time", "address", "user", "tenant", "plan", "method", "path", "route",
		"request",
	}, wanted...) {
		found := fieldsOf(attribute, names)
		var paths []fieldPath
		for _, name := range found {
			paths = append(paths, fieldPath{name}) // a name may have dots in it
			if strings.Contains(name, ".") {
				paths = append(paths, strings.Split(name, "."))
			}
		}
		p.paths[attribute] = paths
	}
	return p
}

// fieldsOf returns the names of the JSON fields of an attribute. The entries of Envoy for the client's address are the
// address, if the log has no fields of these names.
func fieldsOf(attribute string, names map[string]string) []string {
	if name := names[attribute]; name != "" {
		return []string{name}
	}
	if attribute != "address" && address.IsAttribute(attribute) {
		return append([]string{attribute}, fieldsOf("address", names)...)
	}
	return defaultFields(attribute)
}

// defaultFields returns the names of an attribute in JSON logs of Caddy, Traefik, Google Cloud and others; the first
// existing one counts. Other attributes have a field with their own name.
func defaultFields(attribute string) []string {
	switch attribute {
	case "time":
		return []string{"time", "ts", "timestamp", "@timestamp"}
	case "address":
		return []string{
			"remote_addr", "ip", "client_ip", "remote_ip", "address",
			"request.client_ip", "request.remote_ip", "ClientHost", "httpRequest.remoteIp",
		}
	case "user":
		return []string{"user", "remote_user", "user_id", "ClientUsername"}
	case "method":
		return []string{"method", "request_method", "request.method", "RequestMethod", "httpRequest.requestMethod"}
	case "path":
		return []string{"path", "url", "uri", "request_uri", "request.uri", "RequestPath", "httpRequest.requestUrl"}
	}
	return []string{attribute}
}

// parse reads a line into r, whose previous content it drops: a JSON object, or a line of the Common Log Format.
func (p *parser) parse(line string, r *record) error {
	p.record = r
	r.clear()
	if strings.HasPrefix(line, "{") {
		return p.parseJSON(line)
	}
	return p.parseCommon(line)
}

// clear empties the record, and keeps its map.
func (r *record) clear() {
	fields := r.fields
	clear(fields)
	*r = record{fields: fields}
}

// setFields sets the other attributes. value returns attributes that are not part of the request line.
func (p *parser) setFields(value func(name string) string) {
	r := p.record
	for _, name := range p.wanted {
		switch name {
		case "method":
			r.fields[name] = r.method
		case "path":
			r.fields[name] = pathOf(r.target)
		default:
			r.fields[name] = value(name)
		}
	}
}

// requestLine sets the fields of a request line such as GET /search?q=1 HTTP/1.1. Other text sets nothing, for example
// from a client that speaks TLS to a port without TLS.
func (r *record) requestLine(line string) {
	method, rest, found := strings.Cut(line, " ")
	if !found || !isMethod(method) {
		return
	}
	if at := strings.LastIndex(rest, " HTTP/"); at >= 0 {
		rest = rest[:at]
	}
	r.method, r.target = method, strings.TrimSpace(rest)
}

// isMethod reports whether s can be a method: up to 20 letters and hyphens.
func isMethod(s string) bool {
	for i := range len(s) {
		if c := s[i] | 0x20; (c < 'a' || c > 'z') && s[i] != '-' {
			return false
		}
	}
	return s != "" && s != "-" && len(s) <= 20
}

// said returns the value of a field. "-" is an empty value.
func said(field string) string {
	if field == "-" {
		return ""
	}
	return field
}

// errNotCommon is returned for a line that is in no format.
var errNotCommon = errors.New(`it is neither a JSON object nor in the Common Log Format: address identity user ` +
	`[02/Jan/2006:15:04:05 -0700] "request" status size, and then "referer" "user agent" and more`)

// parseCommon reads a line of the Common Log Format, with the referer and the user agent if the line has them.
func (p *parser) parseCommon(line string) error {
	r := p.record
	client, rest, _ := strings.Cut(line, " ")
	_, rest, ok := strings.Cut(rest, " ") // the identity
	user, at, rest, hasTime := p.cutTime(rest)
	request, rest, hasRequest := cutQuoted(rest)
	status, rest, _ := strings.Cut(strings.TrimPrefix(rest, " "), " ")
	size, rest, _ := strings.Cut(rest, " ")
	if !ok || !hasTime || !hasRequest || !isNumber(status) || size != "-" && !isNumber(size) {
		return errNotCommon
	}
	referer, rest, _ := cutQuoted(rest)
	agent, _, _ := cutQuoted(strings.TrimPrefix(rest, " "))
	r.at, r.address, r.user = at, said(client), said(user)
	r.requestLine(request)
	p.setFields(func(name string) string {
		switch name {
		case "status":
			return status
		case "size", "bytes":
			return said(size)
		case "referer":
			return said(referer)
		case "user_agent":
			return said(agent)
		}
		if address.IsAttribute(name) {
			return r.address
		}
		return ""
	})
	return nil
}

const commonTime = "02/Jan/2006:15:04:05 -0700"

// cutTime cuts the text after the identity: user [02/Jan/2006:15:04:05 -0700] and the rest. A user can contain spaces
// and brackets.
func (p *parser) cutTime(text string) (user string, at time.Time, rest string, ok bool) {
	for from := 0; ; {
		open := strings.Index(text[from:], " [")
		if open < 0 {
			return "", time.Time{}, "", false
		}
		open += from
		from = open + len(" [")
		end := from + len(commonTime)
		if end+2 <= len(text) && text[end:end+2] == "] " {
			if at, ok = p.instant(text[from:end], commonTime); ok {
				return text[:open], at, text[end+2:], true
			}
		}
	}
}

// cutQuoted returns the quoted text at the beginning, without escapes, and the rest.
func cutQuoted(text string) (quoted, rest string, ok bool) {
	if text == "" || text[0] != '"' {
		return "", "", false
	}
	for i := 1; i < len(text); i++ {
		switch text[i] {
		case '\\':
			i++
		case '"':
			quoted = text[1:i]
			if unescaped, err := strconv.Unquote(text[:i+1]); err == nil { // servers escape quotes and bytes, such as \x16
				quoted = unescaped
			}
			return quoted, text[i+1:], true
		}
	}
	return "", "", false
}

// isNumber reports whether s can be a status or a size.
func isNumber(s string) bool {
	_, err := strconv.ParseUint(s, 10, 64)
	return err == nil
}

var errNoObject = errors.New("it is no JSON object, or is cut off")

// parseJSON reads a JSON object.
func (p *parser) parseJSON(line string) error {
	var object map[string]json.RawMessage
	if json.Unmarshal([]byte(line), &object) != nil || object == nil {
		return errNoObject
	}
	field := func(attribute string) string {
		for _, path := range p.paths[attribute] {
			if value := fieldAt(object, path); value != "" {
				return value
			}
		}
		return ""
	}
	r, text := p.record, field("time")
	if text == "" {
		names := make([]string, len(p.paths["time"]))
		for i, path := range p.paths["time"] {
			names[i] = strings.Join(path, ".")
		}
		return fmt.Errorf("it has no field for the time; there may be %s", strings.Join(names, ", "))
	}
	var ok bool
	if r.at, ok = p.instant(text, time.RFC3339Nano, commonTime, "2006-01-02T15:04:05Z0700", "2006-01-02 15:04:05Z07:00",
		"2006-01-02T15:04:05", time.DateTime); !ok {
		return errors.New("its time is neither RFC 3339 nor a number of seconds since 1970")
	}
	r.address, r.user, r.tenant, r.plan = field("address"), field("user"), field("tenant"), field("plan")
	r.method, r.target, r.route = field("method"), field("path"), field("route")
	if r.method == "" && r.target == "" {
		r.requestLine(field("request"))
	}
	p.setFields(field)
	return nil
}

// fieldAt returns a field as text, if it is a string, a number or a boolean.
func fieldAt(object map[string]json.RawMessage, path fieldPath) string {
	raw := object[path[0]]
	for _, name := range path[1:] {
		var inner map[string]json.RawMessage
		if len(raw) == 0 || raw[0] != '{' || json.Unmarshal(raw, &inner) != nil {
			return ""
		}
		raw = inner[name]
	}
	switch {
	case len(raw) == 0 || raw[0] == '{' || raw[0] == '[' || string(raw) == "null":
		return ""
	case raw[0] != '"':
		return string(raw)
	}
	var text string
	if json.Unmarshal(raw, &text) != nil {
		return ""
	}
	return said(text)
}

// instant parses a time in one of the layouts, in UTC if it has no zone. A number is seconds, milliseconds,
// microseconds or nanoseconds since 1970, by its size.
func (p *parser) instant(text string, layouts ...string) (at time.Time, ok bool) {
	if text == p.lastText {
		return p.lastAt, true
	}
	if at, ok = parseNumber(text); !ok {
		for _, layout := range layouts {
			var err error
			if at, err = time.Parse(layout, text); err == nil {
				at, ok = at.UTC(), at.Year() > 0 && at.Year() <= 9999
				break
			}
		}
	}
	if ok {
		p.lastText, p.lastAt = strings.Clone(text), at
	}
	return at, ok
}

func parseNumber(text string) (at time.Time, ok bool) {
	const lastMicrosecond = 253402300799e6 // of the year 9999
	n, err := strconv.ParseFloat(text, 64)
	us := n * 1e6
	switch {
	case err != nil:
		return time.Time{}, false
	case n >= 1e17:
		us = n / 1e3
	case n >= 1e14:
		us = n
	case n >= 1e11:
		us = n * 1e3
	}
	if !(us >= 0 && us <= lastMicrosecond) {
		return time.Time{}, false
	}
	return time.UnixMicro(int64(math.Round(us))).UTC(), true
}
