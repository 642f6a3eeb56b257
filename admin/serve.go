package admin

import (
	"context"
	"net/http"
	"net/url"
	"path"
	"strings"
	"unicode/utf8"

	"github.com/pgratelimit/pgratelimit/internal/telemetry"
)

const (
	maxForm = 128 << 10 // bytes of a form: a key before it is hashed, and some
	maxName = 64        // bytes of a name in the tables
	maxKey  = 256       // bytes of a key in the tables
)

// contentSecurityPolicy lets nothing in but what this package serves.
const contentSecurityPolicy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; " +
	"connect-src 'self'; " +
	"form-action 'self'; frame-ancestors 'none'; base-uri 'none'"

// route is what answers to a path.
type route struct {
	get  func(*visit)
	post func(*visit)
	// changes is whether post changes something, and so asks for Identity.MayChange.
	changes bool
}

// visit is a request, and who makes it.
type visit struct {
	*Handler
	w   http.ResponseWriter
	r   *http.Request
	who Identity
}

// routing returns the pages by the last elements of their paths.
func (h *Handler) routing() map[string]route {
	change := func(do func(*visit, context.Context) (done, error)) route {
		return route{post: changing(do), changes: true}
	}
	return map[string]route{
		"":                 {get: (*visit).overview},
		"limit":            {get: (*visit).limit},
		"now":              {get: (*visit).now},
		"key":              {get: (*visit).key},
		"find":             {post: (*visit).find},
		"state":            {get: (*visit).state},
		"reservations":     {get: (*visit).reservations},
		"reservation":      {get: (*visit).reservation},
		"rules":            {get: (*visit).rules},
		"rule":             {get: (*visit).rule},
		"preview":          {get: (*visit).preview},
		"preview-override": {get: (*visit).previewOverride},
		"overrides":        {get: (*visit).overrides},
		"history":          {get: (*visit).history},
		"reset":            change((*visit).reset),
		"credit":           change((*visit).credit),
		"cancel":           change((*visit).cancel),
		"pause":            change((*visit).pause),
		"resume":           change((*visit).resume),
		"override":         change((*visit).override),
		"remove-override":  change((*visit).removeOverride),
		"put-rule":         change((*visit).putRule),
		"delete-rule":      change((*visit).deleteRule),
		"admin.css":        {get: file("text/css; charset=utf-8", "web/admin.css")},
		"admin.js":         {get: file("text/javascript; charset=utf-8", "web/admin.js")},
		"ratelimit.js":     {get: module},
	}
}

// ServeHTTP answers with the page that the last element of the path names.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	header := w.Header()
	header.Set("Content-Security-Policy", contentSecurityPolicy)
	header.Set("X-Content-Type-Options", "nosniff")
	header.Set("Referrer-Policy", "same-origin") // with no-referrer browsers would not name the origin of a form
	header.Set("Cross-Origin-Opener-Policy", "same-origin")
	header.Set("Cross-Origin-Resource-Policy", "same-origin")
	header.Set("Cache-Control", "no-store")
	v := &visit{Handler: h, w: w, r: r}
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		if err := h.checkOrigin(r); err != "" {
			v.say(http.StatusForbidden, err)
			return
		}
	}
	who, err := h.config.Authorize(r)
	if err != nil {
		v.say(http.StatusForbidden, "You have no access to this page. Sign in as another user, or ask the operators of the "+
			"program.")
		return
	}
	v.who = who
	v.serve()
}

// checkOrigin returns why it refuses a request that may change something, or an empty text. Sec-Fetch-Site tells a
// request of another site, and in older browsers Origin does. A request with neither header is refused, because it may
// come from any site.
func (h *Handler) checkOrigin(r *http.Request) string {
	if h.crossSite.Check(r) != nil {
		return "This request came from another site, and changes nothing. Open the page itself and make the change there."
	}
	if r.Header.Get("Sec-Fetch-Site") == "" && r.Header.Get("Origin") == "" {
		return "This request does not say which site it came from, and changes nothing. Use a newer browser; " +
			"a program sends the header Origin with this site's scheme and host."
	}
	return ""
}

func (v *visit) serve() {
	directory, name := path.Split(v.r.URL.Path)
	if v.r.URL.Path == "" { // http.StripPrefix has taken everything: the page has no slash at its end
		target := "./" + url.PathEscape(path.Base(requestPath(v.r))) + "/"
		if v.r.URL.RawQuery != "" {
			target += "?" + v.r.URL.RawQuery
		}
		v.redirect(http.StatusMovedPermanently, target)
		return
	}
	if path.Base(directory) == "playground" {
		v.play(name)
		return
	}
	if name == "playground" {
		v.redirect(http.StatusMovedPermanently, "playground/")
		return
	}
	route, known := v.routes[name]
	if !known {
		v.say(http.StatusNotFound, "There is no such page.")
		return
	}
	do, allowed := route.get, "GET, HEAD"
	if route.get == nil {
		allowed = "POST"
	}
	if v.r.Method == http.MethodPost {
		do = route.post
	} else if v.r.Method != http.MethodGet && v.r.Method != http.MethodHead {
		do = nil
	}
	switch {
	case do == nil:
		v.w.Header().Set("Allow", allowed)
		v.say(http.StatusMethodNotAllowed, "This address does not take "+v.r.Method+"; it takes "+allowed+
			". Nothing was changed.")
	case route.changes && !v.mayChange():
		v.say(http.StatusForbidden, "You cannot make changes. Nothing was changed.")
	case !isText(v.r.URL.Query()):
		v.say(http.StatusBadRequest, notText)
	default:
		v.r.Body = http.MaxBytesReader(v.w, v.r.Body, maxForm)
		do(v)
	}
}

// notText is the text about names and keys that no table can hold.
const notText = "A name or a key of the request is not text, or too long, or there twice: tables store UTF-8 without " +
	"NUL, " +
	"up to 64 bytes of a name and 256 of a key."

// isText reports whether the tables could hold what a query or a form says. A field that is there twice could mean
// either value.
func isText(fields url.Values) bool {
	for name, all := range fields {
		most := maxForm
		switch name {
		case "limit", "name", "plan", "after_limit", "search":
			most = maxName
		case "key", "prefix", "after", "after_key":
			most = maxKey
		}
		for _, text := range all {
			if len(all) > 1 || len(text) > most || !utf8.ValidString(text) || strings.IndexByte(text, 0) >= 0 {
				return false
			}
		}
	}
	return true
}

// play answers with the playground, whose files are all in one directory.
func (v *visit) play(name string) {
	r := v.r.Clone(v.r.Context())
	r.URL.Path, r.URL.RawPath = "/"+name, ""
	v.playground.ServeHTTP(v.w, r)
}

// mayChange reports whether the visitor may change something: history has no entry without an author.
func (v *visit) mayChange() bool { return v.who.MayChange && strings.TrimSpace(v.who.Name) != "" }

// requestPath returns the path in the request, with the prefix that http.StripPrefix removed.
func requestPath(r *http.Request) string {
	if u, err := url.ParseRequestURI(r.RequestURI); err == nil {
		return u.Path
	}
	return r.URL.Path
}

// redirect sends the client to an address relative to the one it asked for. http.Redirect would need to know the
// prefix.
func (v *visit) redirect(status int, target string) {
	v.w.Header().Set("Location", target)
	v.w.WriteHeader(status)
}

// say answers with a sentence and nothing else.
func (v *visit) say(status int, sentence string) {
	v.w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	v.w.WriteHeader(status)
	_, _ = v.w.Write([]byte(sentence + "\n")) // a client that is gone does not need it
}

// log tells the Logger what could not be done, without keys.
func (v *visit) log(what string, err error) {
	v.config.Logger.WarnContext(v.r.Context(), "admin: "+what, "error", telemetry.ErrorText(err))
}
