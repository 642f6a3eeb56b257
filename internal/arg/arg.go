// Package arg checks arguments that several packages take, and has what a context tells a call.
package arg

import (
	"context"
	"fmt"
	"reflect"
	"regexp"
)

var validSchema = regexp.MustCompile(`^[a-z_][a-z0-9_]{0,62}$`)

// CheckSchema returns an error if name is not valid as the name of a schema. The error says what to use instead.
func CheckSchema(name string) error {
	if !validSchema.MatchString(name) {
		return fmt.Errorf("schema %.80q: use a lower-case letter or _, then up to 62 of a-z, 0-9 and _", name)
	}
	return nil
}

// CheckContext returns an error for a nil context of a call: without it the call would panic deep inside.
func CheckContext(ctx context.Context, call string) error {
	if ctx == nil {
		return fmt.Errorf("%s with a nil context; pass the one of the request, or context.Background()", call)
	}
	return nil
}

// IsNil reports whether v is nil or holds a nil pointer.
func IsNil(v any) bool {
	r := reflect.ValueOf(v)
	return !r.IsValid() || r.Kind() == reflect.Pointer && r.IsNil()
}
