// Package httplimit puts limits in front of the handlers of net/http.
package httplimit

import (
	"errors"
	"net/http"
)

// Key returns who a request is limited as.
type Key func(r *http.Request) (string, error)

// ErrNoKey is returned by a Key when the request has none.
var ErrNoKey = errors.New("httplimit: no key")
