package admin

import (
	"bytes"
	"embed"
	"fmt"
	"html/template"
	"math"
	"net/http"
	"net/url"
	"path"
	"time"

	"github.com/pgratelimit/pgratelimit/middleware/httplimit/client"
)

//go:embed web
var web embed.FS

// pages are the templates of the pages, by name.
type pages map[string]*template.Template

// page is what every page has.
type page struct {
	// Title is the title of the document. It contains no key.
	Title string
	// Here is the entry of the navigation that the page belongs to.
	Here string
	// Name is who looks at it, and MayChange whether changes are offered.
	Name      string
	MayChange bool
	// HasRules is whether the program has rules in tables.
	HasRules bool
	// Done says what a change that led here has done.
	Done string
	// Behind says that this process decides by other rules than the tables may have.
	Behind string
	// Down is whether nothing could be read.
	Down bool
	// Body is what the page itself shows.
	Body any
}

func parsePages() (pages, error) {
	files, err := web.ReadDir("web")
	if err != nil {
		return nil, err
	}
	layout, err := template.New("layout.html").Funcs(functions()).ParseFS(web, "web/layout.html", "web/parts.html")
	if err != nil {
		return nil, fmt.Errorf("admin: %w", err)
	}
	parsed := make(pages)
	for _, file := range files {
		name := file.Name()
		if path.Ext(name) != ".html" || name == "layout.html" || name == "parts.html" {
			continue
		}
		clone, err := layout.Clone()
		if err != nil {
			return nil, fmt.Errorf("admin: %w", err)
		}
		if parsed[name], err = clone.ParseFS(web, "web/"+name); err != nil {
			return nil, fmt.Errorf("admin: %w", err)
		}
	}
	return parsed, nil
}

// show answers with a page. Nothing is sent until all of it is there.
func (v *visit) show(status int, name string, p page) {
	p.Name, p.MayChange, p.HasRules, p.Behind = v.who.Name, v.mayChange(), v.store != nil, v.behind()
	p.Done = doneText(v.r.URL.Query().Get("done"))
	var out bytes.Buffer
	if err := v.pages[name].ExecuteTemplate(&out, "layout.html", p); err != nil {
		v.log("a page could not be written", err)
		v.say(http.StatusInternalServerError, "The page could not be written. The reason is in the log of the program.")
		return
	}
	v.w.Header().Set("Content-Type", "text/html; charset=utf-8")
	if status == http.StatusServiceUnavailable {
		v.w.Header().Set("Retry-After", "5")
	}
	v.w.WriteHeader(status)
	_, _ = v.w.Write(out.Bytes()) // a client that is gone does not need it
}

// mostBehind is how long a process may not have heard from the tables before its pages say so.
const mostBehind = time.Minute

// behind says that this process decides by other rules than the tables may have, or nothing.
func (h *Handler) behind() string {
	const mend = " See that rules.Set.Run runs, and that it reaches the database."
	if h.set == nil {
		return ""
	}
	switch age := h.set.Age(); {
	case age == math.MaxInt64:
		return "This process has not loaded the rules yet. Decisions and levels use the definitions in the code." + mend
	case age > mostBehind:
		return "This process has not read the tables for " + span(age) + ". It decides by version " + whole(h.set.Version()) +
			" of the rules." + mend
	}
	return ""
}

// showParts answers with a page once its parts are there.
func (g *gather) show(name string, p page) {
	p.Down = g.isDown()
	status := http.StatusOK
	if p.Down {
		status = http.StatusServiceUnavailable
	}
	g.visit.show(status, name, p)
}

// file answers with a file of this package.
func file(contentType, name string) func(*visit) {
	return func(v *visit) {
		content, err := web.ReadFile(name)
		if err != nil {
			v.say(http.StatusNotFound, "There is no such page.")
			return
		}
		v.w.Header().Set("Content-Type", contentType)
		v.w.Header().Set("Cache-Control", "no-cache")
		_, _ = v.w.Write(content)
	}
}

// module answers with the JavaScript module that projects buckets.
func module(v *visit) { client.Handler().ServeHTTP(v.w, v.r) }

// link returns the address of a page with a query of names and values, relative to the pages.
func link(page string, pairs ...string) (string, error) {
	if len(pairs)%2 != 0 {
		return "", fmt.Errorf("link %q: a name has no value", page)
	}
	query := make(url.Values, len(pairs)/2)
	for i := 0; i < len(pairs); i += 2 {
		query.Add(pairs[i], pairs[i+1])
	}
	if page == "" {
		page = "./"
	}
	if len(query) == 0 {
		return page, nil
	}
	return page + "?" + query.Encode(), nil
}
