package httplimit

import "net/http"

// IsPreflight reports whether a request is what a browser asks before it sends one of a page of another origin. It is for
// [Config.Skip] where the CORS middleware is inside of this one, or is the router; where it is around this one, none comes here. Anybody
// can send one, so have it only where whatever is inside answers every preflight without work.
func IsPreflight(r *http.Request) bool {
	return r.Method == http.MethodOptions && r.Header.Get("Origin") != "" && r.Header.Get("Access-Control-Request-Method") != ""
}
