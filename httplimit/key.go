package httplimit

import (
	"errors"
	"fmt"
	"net/http"
)

// Key names who a request is limited as: one text, one bucket.
type Key func(r *http.Request) (string, error)

var (
	// ErrNoKey is returned by a Key when what it reads is absent or empty.
	ErrNoKey = errors.New("httplimit: the request has no key")

	// ErrBadKey is returned by a Key when what it reads is there but cannot be relied on.
	ErrBadKey = errors.New("httplimit: the request has a bad key")
)

// Of returns the key of r. An empty key is ErrNoKey.
func (k Key) Of(r *http.Request) (string, error) {
	text, err := k(r)
	if err == nil && text == "" {
		err = fmt.Errorf("%w: it is empty", ErrNoKey)
	}
	return text, err
}
