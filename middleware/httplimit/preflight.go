package httplimit

import "net/http"

// IsPreflight reports whether a request is a CORS preflight. Use it as [Config.Skip] if the CORS middleware is inside
// this one, or is the router. Any client can send such a request, so use it only if every preflight is answered without
// work.
func IsPreflight(r *http.Request) bool {
	return r.Method == http.MethodOptions && r.Header.Get("Origin") != "" &&
		r.Header.Get("Access-Control-Request-Method") != ""
}
