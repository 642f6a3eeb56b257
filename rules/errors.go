package rules

import (
	"errors"
	"fmt"

	"github.com/pgratelimit/pgratelimit/internal/pgerr"
)

var (
	// ErrInvalid is returned by the methods of a Store, before any change, if a change is invalid. The message says what
	// to write instead.
	ErrInvalid = errors.New("rules: invalid")

	// ErrNotFound is returned by Delete, RemoveOverride and Resume if there's nothing to delete or end. Nothing was
	// changed.
	ErrNotFound = errors.New("rules: not found")

	// ErrInvalidConfig is returned by NewStore, NewSet and NewSite if an argument or a field of the configuration is
	// invalid, and by calls on a Store, a Set or a Site that these didn't make, or on a Store that WithTx bound to nil.
	ErrInvalidConfig = errors.New("rules: invalid configuration")
)

// explain adds the remedy to err if the schema is not ready.
func explain(err error, schema string) error {
	return pgerr.Explain(err, schema, "the privileges of an Application to load rules, and those of an Operator to "+
		"change them")
}

func invalid(format string, args ...any) error {
	return fmt.Errorf("%w: %w", ErrInvalid, fmt.Errorf(format, args...))
}
