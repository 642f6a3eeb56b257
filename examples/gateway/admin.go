package main

import (
	"crypto/rand"
	"crypto/subtle"
	"errors"
	"net/http"

	"github.com/pgratelimit/pgratelimit/admin"
	"github.com/pgratelimit/pgratelimit/admin/playground"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// operators are who may see the admin page: who gives one of the passwords, under any name. A service asks who is signed in
// instead. With the zero operators nobody may.
type operators struct {
	look   string // the password of who may look
	change string // the password of who may change something, too
}

func newOperators() operators { return operators{look: rand.Text(), change: rand.Text()} }

var errStranger = errors.New("this is nobody's password")

// authorize says who makes a request, for the admin page.
func (o operators) authorize(r *http.Request) (admin.Identity, error) {
	name, password, _ := r.BasicAuth()
	switch {
	case isSecret(password, o.change):
		return admin.Identity{Name: name, MayChange: true}, nil
	case isSecret(password, o.look):
		return admin.Identity{Name: name}, nil
	}
	return admin.Identity{}, errStranger
}

// isSecret tells in a time that says nothing about the secret.
func isSecret(given, secret string) bool {
	return secret != "" && subtle.ConstantTimeCompare([]byte(given), []byte(secret)) == 1
}

// signIn has browsers ask for a name and a password. The page itself only refuses.
func (o operators) signIn(page http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if _, err := o.authorize(r); err != nil {
			w.Header().Set("WWW-Authenticate", `Basic realm="gateway", charset="UTF-8"`)
			http.Error(w, "give any name, and one of the passwords that the program printed", http.StatusUnauthorized)
			return
		}
		page.ServeHTTP(w, r)
	})
}

// addAdmin adds the page for those who look after the limits, and the playground, which everybody may have.
func (g *gateway) addAdmin(mux *http.ServeMux) error {
	page, err := admin.New(g.limiter, g.set, admin.Config{
		Pool: g.pool, Authorize: g.operators.authorize, Limits: []ratelimit.Limit{perKey}, Logger: g.log,
	})
	if err != nil {
		return err
	}
	mux.Handle("/admin/", g.operators.signIn(page))
	mux.Handle("/playground/", playground.Handler())
	return nil
}
