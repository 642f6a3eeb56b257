package httplimit

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

const minSecretBytes = 16

// Join returns the Key of all of keys together, as an account and an address: "ada|203.0.113.7". The parts are joined
// as by [ratelimit.Join], so that keys that differ in any part differ as a whole. When a part is missing there is no key. It panics when there are no keys, or a nil one.
func Join(keys ...Key) Key {
	keys = mustKeys("Join", keys)
	return func(r *http.Request) (string, error) {
		parts := make([]string, len(keys))
		for i, key := range keys {
			part, err := key.Of(r)
			if err != nil {
				return "", fmt.Errorf("part %d: %w", i+1, err)
			}
			parts[i] = part
		}
		return ratelimit.Join(parts...), nil
	}
}

// FirstOf returns the Key of the first of keys that the request has, as the user when one is signed in and
// else the address. It is preceded by which one it was ("0|ada", "1|203.0.113.7"), so that a user who calls
// himself 203.0.113.7 does not get that address's bucket; changing the order of keys is thus a reset.
//
// Only ErrNoKey leads on to the next key; any other error is the answer. It panics when there are no keys, or
// a nil one.
func FirstOf(keys ...Key) Key {
	keys = mustKeys("FirstOf", keys)
	return func(r *http.Request) (string, error) {
		var missing error
		for i, key := range keys {
			text, err := key.Of(r)
			switch {
			case err == nil:
				return ratelimit.Join(strconv.Itoa(i), text), nil
			case !errors.Is(err, ErrNoKey):
				return "", err
			}
			missing = err
		}
		return "", missing
	}
}

// Hashed returns the Key with the HMAC-SHA-256 of the text of key under secret, as 43 characters of base64url, so that
// neither the table nor a log has an address, a name or an API key. A new secret resets the limits. It panics if the
// secret has fewer than 16 bytes or key is nil.
//
// To hash the keys of every limit, set HashKey of ratelimit.Config instead.
func Hashed(secret []byte, key Key) Key {
	if len(secret) < minSecretBytes {
		panic(fmt.Sprintf("httplimit: Hashed: the secret has %d bytes; use %d random ones or more", len(secret), minSecretBytes))
	}
	mustKeys("Hashed", []Key{key})
	secret = slices.Clone(secret)
	return func(r *http.Request) (string, error) {
		text, err := key.Of(r)
		if err != nil {
			return "", err
		}
		return base64.RawURLEncoding.EncodeToString(keyedHash(secret, text)), nil
	}
}

// mustKeys returns a copy of keys, and panics when one is missing: a mistake of the program.
func mustKeys(constructor string, keys []Key) []Key {
	if len(keys) == 0 {
		panic("httplimit: " + constructor + ": there are no keys")
	}
	for i, key := range keys {
		if key == nil {
			panic(fmt.Sprintf("httplimit: %s: key %d is nil", constructor, i+1))
		}
	}
	return slices.Clone(keys)
}

// keyedHash returns the HMAC-SHA-256 of text under secret. The prefix keeps it apart from other uses of the secret.
func keyedHash(secret []byte, text string) []byte {
	mac := hmac.New(sha256.New, secret)
	mac.Write([]byte("httplimit key\x00"))
	mac.Write([]byte(text))
	return mac.Sum(nil)
}
