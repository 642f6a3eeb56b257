package ratelimit

import (
	"encoding/hex"
	"strconv"
	"strings"
)

const (
	keySeparator = "|"
	keyEscape    = `\`
)

// Join returns a key made of several parts, for example of a tenant and a user:
//
//	SendMessage.For(ratelimit.Join(tenant, ratelimit.ID(user.ID)))
//
// Different parts give different keys: Join separates them with "|", and escapes "|" and "\" in a part with "\". So "a|b" and
// "c" differ from "a" and "b|c". If a part is empty, Join returns "", and calls return [ErrInvalidKey], so that a missing part
// cannot put several callers into one bucket. Make all keys of a limit in the same way, because a joined key can equal another
// plain key.
func Join(parts ...string) string {
	escaped := make([]string, len(parts))
	for i, part := range parts {
		if part == "" {
			return ""
		}
		part = strings.ReplaceAll(part, keyEscape, keyEscape+keyEscape)
		escaped[i] = strings.ReplaceAll(part, keySeparator, keyEscape+keySeparator)
	}
	return strings.Join(escaped, keySeparator)
}

// ID returns an integer as a key, or as a part for [Join]: its decimal digits. For 0, which is usually an ID that was not set,
// it returns "", and calls return [ErrInvalidKey].
func ID[T ~int | ~int8 | ~int16 | ~int32 | ~int64 | ~uint | ~uint8 | ~uint16 | ~uint32 | ~uint64](id T) string {
	switch {
	case id == 0:
		return ""
	case id < 0:
		return strconv.FormatInt(int64(id), 10)
	}
	return strconv.FormatUint(uint64(id), 10)
}

// UUID returns a UUID as a key, or as a part for [Join]: 36 characters in lower case, as the String methods of UUID packages
// return. It accepts any type of 16 bytes; for a pgtype.UUID pass its Bytes. For the nil UUID it returns "", and calls return
// [ErrInvalidKey].
func UUID[T ~[16]byte](id T) string {
	b := [16]byte(id)
	if b == [16]byte{} {
		return ""
	}
	digits := hex.EncodeToString(b[:])
	return digits[:8] + "-" + digits[8:12] + "-" + digits[12:16] + "-" + digits[16:20] + "-" + digits[20:]
}
