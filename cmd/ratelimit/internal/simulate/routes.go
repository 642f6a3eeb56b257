package simulate

import (
	"fmt"
	"net/http"
	"net/url"
	"strings"
)

// maxRoutes limits the requests whose routes are remembered.
const maxRoutes = 4096

// routes know the route of a request as a net/http.ServeMux does.
type routes struct {
	mux   *http.ServeMux
	known map[route]string
}

type route struct{ method, path string }

// newRoutes returns routes with these patterns. If they are optional, it skips patterns that a ServeMux rejects.
func newRoutes(patterns []string, optional bool) (*routes, error) {
	r := &routes{mux: http.NewServeMux(), known: make(map[route]string)}
	for _, pattern := range patterns {
		err := r.add(pattern)
		if err != nil && !optional {
			return nil, fmt.Errorf("%w: the route %.80q: %w; write it as net/http.ServeMux does, such as GET /search/{id}",
				ErrInvalidConfig, pattern, err)
		}
	}
	return r, nil
}

// add adds a pattern. A ServeMux panics if the pattern is invalid.
func (r *routes) add(pattern string) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("%v", p)
		}
	}()
	r.mux.HandleFunc(pattern, func(http.ResponseWriter, *http.Request) {})
	return nil
}

// of returns the route of a request: the pattern that matches it, or otherwise its method and path. A line without a
// request has the route "-".
func (r *routes) of(method, target string) string {
	path := pathOf(target)
	asked := route{method, path}
	if path == "" {
		return "-"
	}
	if pattern, known := r.known[asked]; known {
		return pattern
	}
	answer := asked.String()
	if unescaped, err := url.PathUnescape(path); err == nil && strings.HasPrefix(path, "/") {
		_, pattern := r.mux.Handler(&http.Request{Method: method, URL: &url.URL{Path: unescaped, RawPath: path}})
		if pattern != "" {
			answer = pattern
		}
	}
	if len(r.known) < maxRoutes {
		r.known[route{strings.Clone(method), strings.Clone(path)}] = answer
	}
	return answer
}

func (r route) String() string {
	if r.method == "" {
		return r.path
	}
	return r.method + " " + r.path
}

// pathOf returns the path of the target of a request line.
func pathOf(target string) string {
	if at := strings.IndexAny(target, "?#"); at >= 0 {
		target = target[:at]
	}
	if scheme := strings.Index(target, "://"); scheme > 0 && target[0] != '/' {
		slash := strings.IndexByte(target[scheme+len("://"):], '/')
		if slash < 0 {
			return "/"
		}
		target = target[scheme+len("://")+slash:]
	}
	return target
}
