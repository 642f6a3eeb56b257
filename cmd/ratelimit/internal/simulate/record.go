package simulate

import (
	"fmt"
	"strings"
	"time"
)

// record is what a line says of a request. What it does not say is empty.
type record struct {
	at      time.Time
	address string
	user    string
	tenant  string
	plan    string
	method  string
	target  string // as in the request line: a path with a query, or a URL
	route   string
	fields  map[string]string // further attributes, as far as they are wanted
}

// parser reads lines.
type parser struct {
	format Format
	wanted []string // the further attributes that tiers name
	clock  clock
	json   jsonFields
	record record
}

// newParser returns a parser. Names are those of JSON fields by attribute, and wanted are further attributes.
func newParser(format Format, names map[string]string, wanted []string) *parser {
	return &parser{
		format: format, wanted: wanted, json: newJSONFields(names, wanted),
		record: record{fields: make(map[string]string, len(wanted))},
	}
}

// parse reads a line. The record is good until the next call.
func (p *parser) parse(line string) (*record, error) {
	fields := p.record.fields
	clear(fields)
	p.record = record{fields: fields}
	if p.format != Detect {
		return &p.record, p.parseAs(p.format, line)
	}
	var reason error
	for _, format := range []Format{JSON, Combined, Common} {
		err := p.parseAs(format, line)
		if err == nil {
			p.format = format
			return &p.record, nil
		}
		if format == JSON || !strings.HasPrefix(line, "{") { // of what is no object, Common says why
			reason = err
		}
		clear(fields)
		p.record = record{fields: fields}
	}
	return &p.record, fmt.Errorf("the line is in none of the formats common, combined and json: %w", reason)
}

func (p *parser) parseAs(format Format, line string) error {
	if format == JSON {
		return p.parseJSON(line)
	}
	return p.parseCommon(line, format == Combined)
}

// requestLine sets what the first line of a request says: GET /search?q=1 HTTP/1.1. What is no such line, as of a client that
// speaks TLS to a port without it, sets nothing.
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

// isMethod reports whether s may be a method: letters and hyphens, 20 at most.
func isMethod(s string) bool {
	for i := range len(s) {
		if c := s[i] | 0x20; (c < 'a' || c > 'z') && s[i] != '-' {
			return false
		}
	}
	return s != "" && s != "-" && len(s) <= 20
}

// said returns what a field says: "-" is nothing.
func said(field string) string {
	if field == "-" {
		return ""
	}
	return field
}
