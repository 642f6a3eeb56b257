package main

import (
	"embed"
	"html/template"
	"net/http"
)

//go:embed web
var web embed.FS

// addPage adds the page that shows visitors what they have left, and its parts.
func (g *gateway) addPage(mux *http.ServeMux) {
	page := template.Must(template.ParseFS(web, "web/page.html"))
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, r *http.Request) {
		caller, err := g.caller(r)
		if err != nil {
			http.Error(w, "the request does not say who it is from", http.StatusBadRequest)
			return
		}
		h := w.Header()
		h.Set("Content-Type", "text/html; charset=utf-8")
		h.Set("Content-Security-Policy", "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'")
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Cache-Control", "private") // it depends on the caller
		limit := g.limiter.Resolve(perKey.For(caller).Plan(identityOf(r.Context()).plan))
		_ = page.Execute(w, map[string]any{ // the client may be gone
			"Limit": limit.Name(), "Policy": limit.Policy().String(), "Capacity": limit.Capacity(), "CostHeader": costHeader,
		})
	})
	for _, file := range []string{"page.js", "style.css"} {
		mux.HandleFunc("GET /"+file, func(w http.ResponseWriter, r *http.Request) { http.ServeFileFS(w, r, web, "web/"+file) })
	}
}
