package httplimit_test

import (
	"io"
	"log"
	"net/http"

	"github.com/go-chi/chi/v5"

	"github.com/pgratelimit/pgratelimit/httplimit"
)

// chiRouter limits everything once, and one of the routes once more.
func chiRouter(everything, search func(http.Handler) http.Handler) http.Handler {
	router := chi.NewRouter()
	router.Use(everything)
	router.Get("/", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "home") })
	router.With(search).Get("/search", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "found") })
	return router
}

// With chi the middleware is used as it is, for a router or a route.
func ExampleNew_chi() {
	everything, err := httplimit.New(limiter, httplimit.Config{Rules: []httplimit.Rule{{Limit: Everybody, Global: true}}})
	if err != nil {
		log.Fatal(err)
	}
	search, err := httplimit.New(limiter, httplimit.Config{Rules: []httplimit.Rule{{Limit: PerKey, Key: apiKey}}})
	if err != nil {
		log.Fatal(err)
	}
	http.Handle("/", chiRouter(everything, search))
}
