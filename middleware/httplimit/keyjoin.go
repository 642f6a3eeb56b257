package httplimit

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Join returns the Key of all of keys together, such as an account and an address: "ada|203.0.113.7". It joins the
// parts as [ratelimit.Join] does, so keys that differ in any part differ as a whole. If a part is missing there is no
// key. It panics without keys, or with a nil one.
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

// FirstOf returns the Key of the first of keys that the request has, such as the user if one is signed in and otherwise
// the address. The key begins with which one it was ("0|ada", "1|203.0.113.7"), so a user called 203.0.113.7 doesn't
// get that address's bucket. So if you change the order of keys, all buckets are new.
//
// Only ErrNoKey leads on to the next key; any other error is the answer. It panics without keys, or with a nil one.
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
