package httplimit

import (
	"iter"
	"net/netip"
	"slices"
	"strings"

	"github.com/pgratelimit/pgratelimit/internal/address"
)

// elementsBackward yields the elements of the list that lines are, the last first, without the white space
// around them. Commas inside quotes do not separate.
//
// It reads from right to left, since what stands on the right was written by a proxy: a quote that a client
// opens and does not close cannot reach it.
func elementsBackward(lines []string) iter.Seq[string] {
	return func(yield func(string) bool) {
		for _, line := range slices.Backward(lines) {
			for more := true; more; {
				var element string
				line, element, more = cutLast(line)
				if !yield(strings.Trim(element, " \t")) {
					return
				}
			}
		}
	}
}

// cutLast returns the parts before and after the last comma of s outside quotes, and whether there is such a comma. If
// not, element is s.
func cutLast(s string) (before, element string, found bool) {
	quoted := false
	for i := len(s) - 1; i >= 0; i-- {
		switch {
		case s[i] == '"' && !isEscaped(s[:i]):
			quoted = !quoted
		case s[i] == ',' && !quoted:
			return s[:i], s[i+1:], true
		}
	}
	return "", s, false
}

// isEscaped reports whether the character after before is escaped: an odd number of backslashes precedes it.
func isEscaped(before string) bool {
	return (len(before)-len(strings.TrimRight(before, `\`)))%2 == 1
}

// forwardedFor returns the value of the for parameter in an element of Forwarded, and false when the
// element is malformed or does not have exactly one.
func forwardedFor(element string) (node string, ok bool) {
	for element != "" {
		if rest, empty := strings.CutPrefix(element, ";"); empty {
			element = strings.TrimLeft(rest, " \t")
			continue
		}
		name, rest, assigned := strings.Cut(element, "=")
		if !assigned || !isParameterName(name) {
			return "", false
		}
		value, rest, valid := cutValue(rest)
		if !valid {
			return "", false
		}
		if strings.EqualFold(name, "for") {
			if ok {
				return "", false
			}
			node, ok = value, true
		}
		element = rest
	}
	return node, ok
}

// cutValue returns the value that s begins with, a quoted string or not, and what follows it: nothing, or a
// semicolon and more.
func cutValue(s string) (value, rest string, ok bool) {
	if !strings.HasPrefix(s, `"`) {
		value, rest = s, ""
		if i := strings.IndexByte(s, ';'); i >= 0 {
			value, rest = s[:i], s[i:]
		}
		value = strings.TrimRight(value, " \t")
		// Not only a token: some proxies leave the quotes out where a port or IPv6 would need them.
		return value, rest, value != "" && !strings.ContainsAny(value, "\" \t\\=,")
	}
	var unquoted strings.Builder
	for i := 1; i < len(s); i++ {
		switch {
		case s[i] == '"':
			rest = strings.TrimLeft(s[i+1:], " \t")
			return unquoted.String(), rest, rest == "" || rest[0] == ';'
		case s[i] == '\\' && i+1 < len(s):
			i++
		}
		unquoted.WriteByte(s[i])
	}
	return "", "", false
}

// isParameterName reports whether s can be the name of a parameter.
func isParameterName(s string) bool {
	return s != "" && strings.Trim(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789!#$%&'*+-.^_`|~") == ""
}

// parseHop returns the address in the text of one hop: 192.0.2.1, 192.0.2.1:80, 2001:db8::1, [2001:db8::1] or
// [2001:db8::1]:80. 0.0.0.0 and :: are no addresses: some proxies write them for a peer they do not know.
func parseHop(text string) (netip.Addr, bool) {
	hop, ok := parseAddress(text)
	hop = address.Fold(hop)
	return hop, ok && !hop.IsUnspecified()
}

func parseAddress(text string) (netip.Addr, bool) {
	if inner, bracketed := strings.CutPrefix(text, "["); bracketed {
		host, port, closed := strings.Cut(inner, "]")
		parsed, err := netip.ParseAddr(host)
		return parsed, closed && err == nil && parsed.Is6() && (port == "" || isPort(port))
	}
	if parsed, err := netip.ParseAddr(text); err == nil {
		return parsed, true
	}
	i := max(0, strings.LastIndexByte(text, ':'))
	parsed, err := netip.ParseAddr(text[:i])
	return parsed, err == nil && parsed.Is4() && isPort(text[i:])
}

// isPort reports whether s is a colon and a port: up to five digits, or an obfuscated one of RFC 7239.
func isPort(s string) bool {
	const digits = "0123456789"
	port, ok := strings.CutPrefix(s, ":")
	if hidden, obfuscated := strings.CutPrefix(port, "_"); obfuscated {
		return ok && isParameterName(hidden)
	}
	return ok && port != "" && len(port) <= len("65535") && strings.Trim(port, digits) == ""
}
