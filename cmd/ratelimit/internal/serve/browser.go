package serve

import (
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
)

// fromOwnSite passes on requests that no page of another site has made. A browser sends the stored password of an
// operator, and reaches a server of its own machine, whatever page it shows. It names the other site in Sec-Fetch-Site
// or Origin.
func fromOwnSite(next http.Handler) http.Handler {
	protection := http.NewCrossOriginProtection()
	protection.SetDenyHandler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		problem(w, http.StatusForbidden, "a page of another site made this request, so it was not answered")
	}))
	protected := protection.Handler(next)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Content-Type-Options", "nosniff")
		w.Header().Set("Cross-Origin-Resource-Policy", "same-origin")
		protected.ServeHTTP(w, r)
	})
}

// underOwnName passes on requests to one of the server's names. Without tokens a page of another site could otherwise
// let its name lead to this machine, and read the answers as its own (DNS rebinding). With tokens it cannot, as a
// browser keeps a password for each name.
func (s *Server) underOwnName(next http.Handler) http.Handler {
	if len(s.config.Credentials.Tokens) > 0 {
		return next
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !isOwnName(r.Host, s.config.Hosts) {
			problem(w, http.StatusMisdirectedRequest, fmt.Sprintf("without --token-file, requests have to name this machine, "+
				"such as "+
				"localhost, and not %.80q; add --host for other names, or --token-file", r.Host))
			return
		}
		next.ServeHTTP(w, r)
	})
}

// isOwnName reports whether a Host names this machine, or is one of names. A request without a Host is not from a
// browser.
func isOwnName(host string, names []string) bool {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	host = strings.ToLower(strings.TrimSuffix(strings.Trim(host, "[]"), "."))
	if address, err := netip.ParseAddr(host); err == nil && address.Unmap().IsLoopback() {
		return true
	}
	isHost := func(name string) bool { return strings.EqualFold(strings.TrimSuffix(name, "."), host) }
	return host == "" || host == "localhost" || slices.ContainsFunc(names, isHost)
}
