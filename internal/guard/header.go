package guard

import (
	"net/textproto"
	"strings"
)

// HeaderKey returns the value of a header, or of gRPC's metadata, as a key. Servers read several texts as the same
// value: HTTP/2 lets clients add spaces around it (RFC 9110, section 5.5), and in Authorization the scheme has no case.
// So it returns one of them. Binary metadata is unchanged.
func HeaderKey(name, value string) string {
	name = strings.ToLower(name)
	if strings.HasSuffix(name, "-bin") {
		return value
	}
	value = textproto.TrimString(value)
	scheme, rest, both := strings.Cut(value, " ")
	if !both || name != "authorization" {
		return value
	}
	return strings.ToUpper(scheme[:1]) + strings.ToLower(scheme[1:]) + " " + strings.TrimLeft(rest, " ")
}
