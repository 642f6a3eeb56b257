package main

import (
	"context"
	"crypto/sha256"
	"net/http"
	"strings"

	"github.com/pgratelimit/pgratelimit/httplimit"
)

// The plans.
const (
	planFree = "free"
	planPro  = "pro"
)

// customer is who an API key belongs to.
type customer struct{ name, plan string }

// customers are found by the SHA-256 of their API keys, as in a table that holds no key.
type customers map[[sha256.Size]byte]customer

func (c customers) add(key string, who customer) { c[sha256.Sum256([]byte(key))] = who }

// identity is who a request says it is from, after that was checked.
type identity struct {
	customer      // of the key; without a key, nobody by name, on the free plan
	stranger bool // it has a key that nobody has
}

type identityKey struct{}

func identityOf(ctx context.Context) identity {
	who, _ := ctx.Value(identityKey{}).(identity)
	return who
}

// identify finds out who requests are from. It answers nobody: a key that is wrong must cost its address
// something first, or keys could be guessed at any speed.
func (c customers) identify(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		who := identity{customer: customer{plan: planFree}}
		if authorization := r.Header.Get("Authorization"); authorization != "" {
			key, _ := strings.CutPrefix(authorization, "Bearer ")
			found, ok := c[sha256.Sum256([]byte(key))]
			who = identity{customer: found, stranger: !ok}
		}
		next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), identityKey{}, who)))
	})
}

// requireKnown answers strangers, behind the limits.
func requireKnown(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if identityOf(r.Context()).stranger {
			w.Header().Set("WWW-Authenticate", "Bearer")
			http.Error(w, "nobody has this API key", http.StatusUnauthorized)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// planOf is the Key that chooses the plan, which is not whose bucket it is.
func planOf(r *http.Request) (string, error) { return identityOf(r.Context()).plan, nil }

// customerOf is the Key of who has an API key.
func customerOf(r *http.Request) (string, error) {
	if name := identityOf(r.Context()).name; name != "" {
		return name, nil
	}
	return "", httplimit.ErrNoKey
}
