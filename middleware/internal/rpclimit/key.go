package rpclimit

import (
	"errors"
	"fmt"

	"github.com/pgratelimit/pgratelimit/internal/address"
	"github.com/pgratelimit/pgratelimit/internal/guard"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// AddressKey returns the key of the peer at an address.
func AddressKey(remote string) (string, error) {
	key, err := address.Key(remote, address.IPv4Bits, address.IPv6Bits)
	if err != nil {
		return "", errors.New("the peer has no IP address")
	}
	return key, nil
}

// MissingKeyError says that a call has no key. Its text has no value, so that the client may see it.
type MissingKeyError struct{ text string }

func (e *MissingKeyError) Error() string { return e.text }

// Unwrap returns ratelimit.ErrInvalidKey.
func (*MissingKeyError) Unwrap() error { return ratelimit.ErrInvalidKey }

// OnlyValue returns the only value of a header or of metadata, the kind, as guard.HeaderKey. Without a value there is
// no key, and of several the client would choose one, so both are a *MissingKeyError.
func OnlyValue(kind, name string, values []string) (key string, _ error) {
	if len(values) == 1 {
		key = guard.HeaderKey(name, values[0])
	}
	if key == "" {
		return "", &MissingKeyError{fmt.Sprintf("%s %s: this call needs it once and not empty, and has it %d times", kind,
			name, len(values))}
	}
	return key, nil
}
