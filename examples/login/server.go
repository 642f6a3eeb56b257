package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"html/template"
	"log/slog"
	"mime"
	"net/http"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

const (
	cookieName       = "session"
	maxBodyBytes     = 8 << 10
	maxPasswordBytes = 1 << 10
	requestTimeout   = 20 * time.Second // of a service: for the database and the wait for a free hash slot together
	outageRetryAfter = 5 * time.Second
)

// server is the sign-in page and its JSON twin.
type server struct {
	auth *authenticator
	log  *slog.Logger
	page *template.Template

	patience time.Duration // how long a request may take
}

func newServer(auth *authenticator, log *slog.Logger) *server {
	return &server{auth: auth, log: log, page: template.Must(template.ParseFS(web, "web/page.html")), patience: requestTimeout}
}

// handler returns the routes, behind what every answer needs.
func (s *server) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", s.home)
	mux.HandleFunc("GET /login", func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "/", http.StatusSeeOther) })
	mux.HandleFunc("POST /login", s.login)
	mux.HandleFunc("POST /logout", s.logout)
	mux.HandleFunc("GET /style.css", styleSheet)

	// A page of another site must not be able to sign a visitor in or out.
	crossOrigin := http.NewCrossOriginProtection()
	crossOrigin.SetDenyHandler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.respond(w, r, answer{
			status: http.StatusForbidden, title: "Request from another site",
			detail: "The request was sent by another site's page. Sign in on this page.",
		})
	}))
	protected := crossOrigin.Handler(mux)

	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Cache-Control", "no-store")
		h.Set("Content-Security-Policy", "default-src 'none'; style-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'")
		h.Set("X-Content-Type-Options", "nosniff")
		// Not no-referrer: browsers would then send "Origin: null" with the form, which looks like another site's.
		h.Set("Referrer-Policy", "same-origin")
		ctx, cancel := context.WithTimeout(r.Context(), s.patience)
		defer cancel()
		protected.ServeHTTP(w, r.WithContext(ctx))
	})
}

// httpServer returns a server that no slow client can hold for long.
func (s *server) httpServer() *http.Server {
	return &http.Server{
		Handler:           s.handler(),
		ReadHeaderTimeout: s.patience / 4,
		ReadTimeout:       s.patience / 2,
		WriteTimeout:      s.patience * 3 / 2,
		IdleTimeout:       time.Minute,
		MaxHeaderBytes:    16 << 10,
		ErrorLog:          slog.NewLogLogger(s.log.Handler(), slog.LevelWarn),
	}
}

// shutdownTimeout is long enough for every request that has begun.
func (s *server) shutdownTimeout() time.Duration { return s.patience + 5*time.Second }

func (s *server) home(w http.ResponseWriter, r *http.Request) {
	account := ""
	if cookie, err := r.Cookie(cookieName); err == nil {
		if account, err = findSession(r.Context(), s.auth.pool, cookie.Value); err != nil {
			s.respond(w, r, s.outage(r, err))
			return
		}
	}
	s.respond(w, r, answer{status: http.StatusOK, account: account})
}

func (s *server) login(w http.ResponseWriter, r *http.Request) {
	typed, err := readCredentials(w, r)
	if err != nil {
		s.respond(w, r, malformed(err))
		return
	}
	account, err := accountOf(typed.Login)
	if err != nil {
		s.respond(w, r, malformed(err))
		return
	}
	client, err := clientOf(r.RemoteAddr)
	if err != nil {
		s.respond(w, r, s.outage(r, err))
		return
	}
	token, err := s.auth.signIn(r.Context(), account, typed.Password, client)
	if err != nil {
		a := s.refusal(r, err)
		a.typed = typed.Login
		s.respond(w, r, a)
		return
	}
	http.SetCookie(w, sessionCookie(r, token, sessionLifetime))
	if wantsJSON(r) {
		s.respond(w, r, answer{status: http.StatusOK, account: account})
		return
	}
	http.Redirect(w, r, "/", http.StatusSeeOther) // so that reloading the page does not sign in again
}

func (s *server) logout(w http.ResponseWriter, r *http.Request) {
	if cookie, err := r.Cookie(cookieName); err == nil {
		if err := endSession(r.Context(), s.auth.pool, cookie.Value); err != nil {
			s.respond(w, r, s.outage(r, err))
			return
		}
	}
	http.SetCookie(w, sessionCookie(r, "", -time.Second))
	if wantsJSON(r) {
		s.respond(w, r, answer{status: http.StatusOK})
		return
	}
	http.Redirect(w, r, "/", http.StatusSeeOther)
}

// refusal returns the answer to a sign-in that failed. Whether the account exists never shows in it.
func (s *server) refusal(r *http.Request, err error) answer {
	var limited *ratelimit.LimitedError
	switch {
	case errors.As(err, &limited):
		s.log.WarnContext(r.Context(), "sign-in refused", "reason", limited) // names the limits, and no key
		return answer{
			status:     http.StatusTooManyRequests,
			title:      "Too many attempts",
			detail:     "There were too many attempts to sign in to this account or from your network. The password was not checked.",
			retryAfter: limited.Decision.RetryAfter,
		}
	case errors.Is(err, errDenied):
		return answer{
			status: http.StatusUnauthorized,
			title:  "Not signed in",
			detail: "The login or the password is wrong.",
		}
	}
	return s.outage(r, err)
}

// outage returns the answer when the sign-in cannot be decided. Nobody is admitted, and the cause is for
// the log alone.
func (s *server) outage(r *http.Request, err error) answer {
	s.log.ErrorContext(r.Context(), "sign-in failed", "error", err)
	return answer{
		status:     http.StatusServiceUnavailable,
		title:      "Signing in is not possible right now",
		detail:     "Something on our side does not work.",
		retryAfter: outageRetryAfter,
	}
}

func malformed(err error) answer {
	return answer{status: http.StatusBadRequest, title: "Not understood", detail: "Please check what you typed: " + err.Error() + "."}
}

// credentials are what a person typed.
type credentials struct {
	Login    string `json:"login"`
	Password string `json:"password"`
}

// readCredentials reads a form or a JSON body. What it refuses costs nothing, because no password of any
// account can be guessed with it.
func readCredentials(w http.ResponseWriter, r *http.Request) (credentials, error) {
	r.Body = http.MaxBytesReader(w, r.Body, maxBodyBytes)
	var c credentials
	if contentType(r) == "application/json" {
		if err := json.NewDecoder(r.Body).Decode(&c); err != nil {
			return c, errors.New(`the body is not {"login": "..", "password": ".."}`)
		}
	} else {
		if err := r.ParseForm(); err != nil {
			return c, errors.New("the form cannot be read")
		}
		c.Login, c.Password = r.PostForm.Get("login"), r.PostForm.Get("password")
	}
	if c.Password == "" || len(c.Password) > maxPasswordBytes {
		return c, fmt.Errorf("the password has to have 1 to %d bytes", maxPasswordBytes)
	}
	return c, nil
}

// contentType returns the media type of the body, without its parameters.
func contentType(r *http.Request) string {
	mediaType, _, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil {
		return ""
	}
	return mediaType
}

// wantsJSON reports whether the client sent JSON or asks for it.
func wantsJSON(r *http.Request) bool {
	accept := r.Header.Get("Accept")
	return contentType(r) == "application/json" || strings.Contains(accept, "json") && !strings.Contains(accept, "text/html")
}

// sessionCookie returns the cookie that holds token. Scripts cannot read it, and other sites' forms do not
// send it. Behind a proxy that ends TLS, set Secure always.
func sessionCookie(r *http.Request, token string, lifetime time.Duration) *http.Cookie {
	return &http.Cookie{
		Name:     cookieName,
		Value:    token,
		Path:     "/",
		MaxAge:   int(lifetime / time.Second),
		Secure:   r.TLS != nil,
		HttpOnly: true,
		SameSite: http.SameSiteLaxMode,
	}
}
