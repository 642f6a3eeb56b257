package httplimit

import (
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/pgratelimit/pgratelimit/internal/guard"
)

// Key returns the key of a request; requests with the same text share a bucket. Write your own, or use one of this
// package. It returns an error that wraps ErrNoKey if the request has no key, and ErrBadKey if the key is unusable.
// Such a request is answered with an error, and never shares a bucket with others.
//
// A Key trusts its input. If any client can set the header with the user's name, the limit has no effect: read data
// that your own code has verified, from the context, or limit by [ClientIP] too. [Key.Of] also checks the text that a
// Key of your own returns.
type Key func(r *http.Request) (string, error)

var (
	// ErrNoKey is returned by a Key if its input is absent or empty. The message names the input.
	ErrNoKey = errors.New("httplimit: the request has no key")

	// ErrBadKey is returned by a Key if its input is malformed, or given twice with different values. The message says
	// which, without the value.
	ErrBadKey = errors.New("httplimit: the request has a bad key")
)

// Of returns the key of r in its stored form: 1 to 256 bytes of UTF-8 without NUL. A longer key, or other text, is
// replaced by its SHA-256 ("sha256:" and 43 characters), so every value works and no two share a bucket. An empty key
// is ErrNoKey.
func (k Key) Of(r *http.Request) (string, error) {
	if k == nil {
		return "", fmt.Errorf("%w: the Key is nil", ErrNoKey)
	}
	text, err := k(r)
	switch {
	case err != nil:
		return "", err
	case text == "":
		return "", fmt.Errorf("%w: it is empty", ErrNoKey)
	}
	return storable(text), nil
}

const (
	maxKeyBytes  = 256 // what the core stores
	digestPrefix = "sha256:"
)

// storable returns text if the database can store it, or else its digest. It also digests a text that looks like a
// digest, so a client cannot send the key of another client's long value.
func storable(text string) string {
	if len(text) <= maxKeyBytes && utf8.ValidString(text) && strings.IndexByte(text, 0) < 0 &&
		!strings.HasPrefix(text, digestPrefix) {
		return text
	}
	sum := sha256.Sum256([]byte(text))
	return digestPrefix + base64.RawURLEncoding.EncodeToString(sum[:])
}

// Header returns the Key of the header called name. Header lines that differ are ErrBadKey, because the handler may
// read either of them. Spaces around a value don't count, and in Authorization, "bearer x" is the key "Bearer x",
// because schemes have no case (RFC 9110). Don't use it for a client's address; use [ClientIP]. It panics for Host,
// which net/http has in [http.Request.Host] only.
func Header(name string) Key {
	mustName("Header", name)
	if http.CanonicalHeaderKey(name) == "Host" {
		panic("httplimit: Header: net/http removes Host from the header; write a Key that returns r.Host")
	}
	return func(r *http.Request) (string, error) {
		values := slices.Clone(r.Header.Values(name))
		for i := range values {
			values[i] = guard.HeaderKey(name, values[i])
		}
		return onlyValue("header", name, values)
	}
}

// Cookie returns the Key of the cookie called name. Cookies that differ are ErrBadKey.
func Cookie(name string) Key {
	mustName("Cookie", name)
	return func(r *http.Request) (string, error) {
		var values []string
		for _, cookie := range r.CookiesNamed(name) {
			values = append(values, cookie.Value)
		}
		return onlyValue("cookie", name, values)
	}
}

// Query returns the Key of the query parameter called name. Parameters that differ are ErrBadKey.
func Query(name string) Key {
	mustName("Query", name)
	return func(r *http.Request) (string, error) { return onlyValue("query value", name, r.URL.Query()[name]) }
}

// PathValue returns the Key that is a wildcard's value in the pattern that matched, as in [http.Request.PathValue]. Put
// the limit inside the mux, because before the mux has matched, every request is ErrNoKey.
func PathValue(name string) Key {
	mustName("PathValue", name)
	return func(r *http.Request) (string, error) {
		return onlyValue("path value", name, []string{r.PathValue(name)})
	}
}

// ContextValue returns the Key of the value under key in the request's context, for example the signed-in user that
// earlier middleware has verified: a string, an integer, a type of either, or a [fmt.Stringer]. The zero value counts
// as absent, because no user is called "" or 0. Any other type is ErrBadKey.
func ContextValue(key any) Key {
	if key == nil {
		panic("httplimit: ContextValue: the key is nil")
	}
	return func(r *http.Request) (string, error) {
		value := r.Context().Value(key)
		held := reflect.ValueOf(value)
		if !held.IsValid() || held.IsZero() {
			return "", fmt.Errorf("%w: the context has no %T", ErrNoKey, key)
		}
		if s, ok := value.(fmt.Stringer); ok {
			return onlyValue("context value", fmt.Sprintf("%T", key), []string{s.String()})
		}
		if held.Kind() == reflect.String || held.CanInt() || held.CanUint() {
			return fmt.Sprint(value), nil
		}
		return "", fmt.Errorf("%w: the context's %T is a %T; put a string, an integer or a fmt.Stringer there", ErrBadKey,
			key, value)
	}
}

// mustName panics when a constructor is given no name, which is a mistake of the program.
func mustName(constructor, name string) {
	if name == "" {
		panic("httplimit: " + constructor + ": the name is empty")
	}
}

// onlyValue returns the only value of the header, cookie or parameter called name.
func onlyValue(kind, name string, values []string) (string, error) {
	switch distinct := slices.Compact(slices.Sorted(slices.Values(values))); {
	case len(distinct) > 1:
		return "", fmt.Errorf("%w: %s %.80q is given twice and differs", ErrBadKey, kind, name)
	case len(distinct) == 0 || distinct[0] == "":
		return "", fmt.Errorf("%w: %s %.80q is missing or empty", ErrNoKey, kind, name)
	default:
		return distinct[0], nil
	}
}
