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
)

// Key names who a request is limited as: one text, one bucket. Write your own, or build one from those of
// this package. It returns an error that wraps ErrNoKey when the request does not say who it is from, and
// ErrBadKey when what it says cannot be used; such a request is answered with an error and never shares a
// bucket with others.
//
// A Key believes what it reads. A user's name from a header that any client can set limits nobody: read
// what your own code has verified, from the context, or limit by [ClientIP] too.
//
// Whoever limits calls [Key.Of], which also checks what a Key of your own returns.
type Key func(r *http.Request) (string, error)

var (
	// ErrNoKey is returned by a Key when what it reads is absent or empty. The message says what was missing.
	ErrNoKey = errors.New("httplimit: the request has no key")

	// ErrBadKey is returned by a Key when what it reads is there but cannot be relied on: it is malformed, or
	// given twice and differently. The message says which, and holds nothing of the value.
	ErrBadKey = errors.New("httplimit: the request has a bad key")
)

// Of returns the key of r as it is stored: 1 to 256 bytes of UTF-8 without NUL. A key that is longer, or not
// such text, is replaced by its SHA-256 ("sha256:" and 43 characters), so that every value works and no two
// share a bucket. An empty key is ErrNoKey.
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

// storable returns text when the database can store it, else its digest. A text that looks like a digest is
// digested as well, so that nobody can spell the key of somebody else's long value.
func storable(text string) string {
	if len(text) <= maxKeyBytes && utf8.ValidString(text) && strings.IndexByte(text, 0) < 0 && !strings.HasPrefix(text, digestPrefix) {
		return text
	}
	sum := sha256.Sum256([]byte(text))
	return digestPrefix + base64.RawURLEncoding.EncodeToString(sum[:])
}

// Header returns the Key of the header called name. Header lines that differ are ErrBadKey: nobody could say
// which of them the handler believes. Do not use it for a client's address; that is [ClientIP].
func Header(name string) Key {
	mustName("Header", name)
	return func(r *http.Request) (string, error) { return onlyValue("header", name, r.Header.Values(name)) }
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

// PathValue returns the Key of the wildcard called name in the pattern that matched, as
// [http.Request.PathValue] has it. The limit must be inside the mux: before the mux has matched there are no
// path values, and every request is ErrNoKey.
func PathValue(name string) Key {
	mustName("PathValue", name)
	return func(r *http.Request) (string, error) {
		return onlyValue("path value", name, []string{r.PathValue(name)})
	}
}

// ContextValue returns the Key of the value under key in the request's context, where code in front of the
// limit has put who is signed in: a string, an integer, a type of either, or a [fmt.Stringer]. The zero value
// is absent, since no user is called "" or 0. Any other type is ErrBadKey.
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
		return "", fmt.Errorf("%w: the context's %T is a %T; put a string, an integer or a fmt.Stringer there", ErrBadKey, key, value)
	}
}

// mustName panics when a constructor is given no name, which is a mistake of the program.
func mustName(constructor, name string) {
	if name == "" {
		panic("httplimit: " + constructor + ": the name is empty")
	}
}

// onlyValue returns the one value that a request gives for what is called name.
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
