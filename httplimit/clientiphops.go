package httplimit

import (
	"iter"
	"net/netip"
	"slices"
	"strings"

	"github.com/pgratelimit/pgratelimit/internal/address"
)

// elementsBackward yields the elements of the list that lines are, the last first, without the white space around them. It reads from
// right to left, because the proxies have written the right end of the list.
func elementsBackward(lines []string) iter.Seq[string] {
	return func(yield func(string) bool) {
		for _, line := range slices.Backward(lines) {
			for more := true; more; {
				comma := strings.LastIndexByte(line, ',')
				if !yield(strings.Trim(line[comma+1:], " \t")) {
					return
				}
				line, more = line[:max(comma, 0)], comma >= 0
			}
		}
	}
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

// isPort reports whether s is a colon and a port of up to five digits.
func isPort(s string) bool {
	port, ok := strings.CutPrefix(s, ":")
	return ok && port != "" && len(port) <= len("65535") && strings.Trim(port, "0123456789") == ""
}
