package main

import (
	"bytes"
	"embed"
	"encoding/json"
	"net/http"
	"strconv"
	"time"
)

//go:embed web
var web embed.FS

// answer is what a request is answered with, as a page or as JSON.
type answer struct {
	status     int
	account    string        // who is signed in, if anybody
	typed      string        // the login as it was typed, to put back into the form
	title      string        // what went wrong; empty when nothing did
	detail     string        // why, for the person who reads it
	retryAfter time.Duration // 0: waiting does not help
}

// problem is an answer that is not a success, as RFC 9457 has it.
type problem struct {
	Title      string `json:"title"`
	Status     int    `json:"status"`
	Detail     string `json:"detail"`
	RetryAfter int64  `json:"retryAfter,omitempty"` // seconds, as in the header
}

// respond writes a as the client wants it.
func (s *server) respond(w http.ResponseWriter, r *http.Request, a answer) {
	if a.retryAfter > 0 {
		w.Header().Set("Retry-After", strconv.FormatInt(wholeSeconds(a.retryAfter), 10))
	}
	var body bytes.Buffer // written whole or not at all
	var err error
	switch {
	case !wantsJSON(r):
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		err = s.page.Execute(&body, a.view())
	case a.title != "":
		w.Header().Set("Content-Type", "application/problem+json")
		err = json.NewEncoder(&body).Encode(problem{a.title, a.status, a.detail, wholeSeconds(a.retryAfter)})
	default:
		w.Header().Set("Content-Type", "application/json")
		err = json.NewEncoder(&body).Encode(map[string]string{"login": a.account})
	}
	if err != nil {
		s.log.ErrorContext(r.Context(), "answer not rendered", "error", err)
		http.Error(w, "Internal Server Error", http.StatusInternalServerError)
		return
	}
	w.WriteHeader(a.status)
	_, _ = body.WriteTo(w) // a client that is gone needs no answer
}

// view is an answer as page.html shows it.
type view struct {
	Account, Typed, Title, Detail, Wait string
}

func (a answer) view() view {
	v := view{Account: a.account, Typed: a.typed, Title: a.title, Detail: a.detail}
	if a.retryAfter > 0 {
		v.Wait = inWords(a.retryAfter)
	}
	return v
}

// wholeSeconds returns d in seconds, rounded up: who waits that long has waited long enough.
func wholeSeconds(d time.Duration) int64 {
	return int64((d + time.Second - 1) / time.Second)
}

// inWords returns how long to wait: in seconds up to a minute, and then in minutes, rounded up.
func inWords(d time.Duration) string {
	unit, n := "second", wholeSeconds(d)
	if n > 60 {
		unit, n = "minute", (n+59)/60
	}
	if n != 1 {
		unit += "s"
	}
	return strconv.FormatInt(n, 10) + " " + unit
}

func styleSheet(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Cache-Control", "max-age=3600")
	http.ServeFileFS(w, r, web, "web/style.css")
}
