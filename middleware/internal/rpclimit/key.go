package rpclimit

import (
	"errors"
	"fmt"

	"github.com/pgratelimit/pgratelimit/internal/address"
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

// OnlyValue returns the only value of a header. Without a value there is no key, and of several the client would choose
// one, so both are a *MissingKeyError.
func OnlyValue(name string, values []string) (string, error) {
	if len(values) != 1 || values[0] == "" {
		return "", &MissingKeyError{fmt.Sprintf("%s: this call needs it once and not empty, and has it %d times", name,
			len(values))}
	}
	return values[0], nil
}
