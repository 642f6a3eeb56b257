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

// Join returns the key of its parts together, as a tenant and a user of it:
//
//	SendMessage.For(ratelimit.Join(tenant, ratelimit.ID(user.ID)))
//
// Parts that differ give keys that differ: between them is a "|", and what a part has of "|" and "\" is escaped with a "\", so
// that "a|b" with "c" is not "a" with "b|c". When a part is empty, so is the key, which every call refuses with
// [ErrInvalidKey]: a part that was forgotten shall not put all who lack it into one bucket. For one limit make all keys in
// one way: a key that was joined may be the text of one that was not.
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

// ID returns an integer as a key, or a part of one for [Join]: its decimal digits. Of 0, which is mostly an ID that was not
// set, it returns "", which every call refuses with [ErrInvalidKey].
func ID[T ~int | ~int8 | ~int16 | ~int32 | ~int64 | ~uint | ~uint8 | ~uint16 | ~uint32 | ~uint64](id T) string {
	switch {
	case id == 0:
		return ""
	case id < 0:
		return strconv.FormatInt(int64(id), 10)
	}
	return strconv.FormatUint(uint64(id), 10)
}

// UUID returns a UUID as a key, or a part of one for [Join]: 36 characters in lower case, as the String of UUID packages has
// them. Any type of 16 bytes will do; of a pgtype.UUID pass its Bytes. Of the nil UUID it returns "", which every call refuses
// with [ErrInvalidKey].
func UUID[T ~[16]byte](id T) string {
	b := [16]byte(id)
	if b == [16]byte{} {
		return ""
	}
	digits := hex.EncodeToString(b[:])
	return digits[:8] + "-" + digits[8:12] + "-" + digits[12:16] + "-" + digits[16:20] + "-" + digits[20:]
}
