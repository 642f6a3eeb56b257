package simulate

import (
	"errors"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// What is wrong with a line that is not in the Common Log Format:
//
//	address identity user [02/Jan/2006:15:04:05 -0700] "request" status size "referer" "user agent"
//
// with the name of the server before it or not.
var (
	errNoAddress   = errors.New("it does not begin with an address, an identity and a user")
	errNoTime      = errors.New("it has no time such as [02/Jan/2006:15:04:05 -0700] after the user")
	errNoRequest   = errors.New("it has no request in quotes after the time")
	errNoStatus    = errors.New("it has no status and size after the request")
	errNotCombined = errors.New("it has no referer and user agent in quotes at its end, or is cut off")
)

// parseCommon reads a line of the Common Log Format, and the referer and the user agent where they are there. Combined says
// that they have to be.
func (p *parser) parseCommon(line string, combined bool) error {
	r := &p.record
	address, rest, _ := strings.Cut(line, " ")
	identity, rest, ok := strings.Cut(rest, " ")
	if isServer(address, identity) {
		address = identity
		identity, rest, ok = strings.Cut(rest, " ")
	}
	if !ok || address == "" || identity == "" {
		return errNoAddress
	}
	user, at, rest, ok := p.cutTime(rest)
	if !ok {
		return errNoTime
	}
	request, rest, ok := cutQuoted(rest)
	if !ok {
		return errNoRequest
	}
	status, rest, _ := strings.Cut(strings.TrimPrefix(rest, " "), " ")
	size, rest, more := strings.Cut(rest, " ")
	if !isNumber(status) || !isNumber(size) && size != "-" {
		return errNoStatus
	}
	var referer, agent string
	if more {
		var ok bool
		if referer, rest, ok = cutQuoted(rest); ok {
			agent, _, ok = cutQuoted(strings.TrimPrefix(rest, " "))
		}
		more = ok
	}
	if combined && !more {
		return errNotCombined
	}
	r.at, r.address, r.user = at, said(address), said(user)
	r.requestLine(request)
	for _, name := range p.wanted {
		r.fields[name] = said(r.common(name, status, size, referer, agent))
	}
	return nil
}

// isServer reports whether a line begins with the name of a server, as Apache's vhost_combined does: what follows is an
// address then, where an identity should be.
func isServer(text, next string) bool {
	if next == "-" || strings.HasSuffix(text, ",") { // which is a list of addresses
		return false
	}
	if _, err := netip.ParseAddr(next); err != nil {
		return false
	}
	_, err := netip.ParseAddr(text)
	return err != nil
}

// common returns a further attribute of a line.
func (r *record) common(name, status, size, referer, agent string) string {
	switch name {
	case "method":
		return r.method
	case "path":
		return pathOf(r.target)
	case "status":
		return status
	case "size", "bytes":
		return size
	case "referer":
		return referer
	case "user_agent":
		return agent
	}
	return ""
}

// cutQuoted returns what stands in the quotes that the text begins with, without escapes, and what follows them.
func cutQuoted(text string) (quoted, rest string, ok bool) {
	if text == "" || text[0] != '"' {
		return "", "", false
	}
	escaped := false
	for i := 1; i < len(text); i++ {
		switch text[i] {
		case '\\':
			escaped = true
			i++
		case '"':
			quoted, rest = text[1:i], text[i+1:]
			if escaped {
				quoted = unescape(quoted)
			}
			return quoted, rest, true
		}
	}
	return "", "", false
}

// unescape returns the text that servers write with a \ before quotes, and with bytes as \x16.
func unescape(text string) string {
	var b strings.Builder
	for i := 0; i < len(text); i++ {
		if text[i] != '\\' || i+1 == len(text) {
			b.WriteByte(text[i])
			continue
		}
		i++
		if text[i] == 'x' && i+2 < len(text) {
			if n, err := strconv.ParseUint(text[i+1:i+3], 16, 8); err == nil {
				b.WriteByte(byte(n))
				i += 2
				continue
			}
		}
		at := slices.Index([]byte("nrt"), text[i])
		if at >= 0 {
			b.WriteByte("\n\r\t"[at])
			continue
		}
		b.WriteByte(text[i])
	}
	return b.String()
}

// isNumber reports whether s is a number that a status or a size can be.
func isNumber(s string) bool {
	for i := range len(s) {
		if s[i] < '0' || s[i] > '9' {
			return false
		}
	}
	return s != "" && len(s) <= 19
}
