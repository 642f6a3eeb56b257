// Package slots writes and reads the IDs of leases, and renews leases while work goes on.
package slots

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"slices"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
)

// ID is what the ID of a lease says.
type ID struct {
	Fence int64
	Of    []Share // in the order of locking
}

// Share is what a lease holds of one limit.
type Share struct {
	Row    bucket.Key
	Plan   string // that the key was on
	Slots  int64  // 0: none, because the limit was off, or refused in shadow
	Length int64  // of the lease when it was taken, in microseconds
}

const (
	version = "L1" // what an ID begins with

	// MaxShares bounds the limits of a lease, MaxSlots the slots of each, and maxText a key and a plan.
	MaxShares, MaxSlots, maxText = 64, 1000, 256

	// maxID bounds an ID: for each of the limits of a call a name, a key, a plan and two numbers.
	maxID = len(version) + (MaxShares*(64+2*maxText+24)+64)*4/3
)

// Sort puts the shares into the order of locking, each bucket once.
func (id *ID) Sort() {
	slices.SortFunc(id.Of, func(a, b Share) int { return a.Row.Compare(b.Row) })
	id.Of = slices.CompactFunc(id.Of, func(a, b Share) bool { return a.Row == b.Row })
}

// String returns the ID: the version, and then, in base64url, the fencing token, the parts and a checksum. The part of
// a limit is its name, its stored key, its plan, the slots and the length.
func (id *ID) String() string {
	b := binary.AppendUvarint(nil, uint64(id.Fence))
	text := func(s string) {
		b = binary.AppendUvarint(b, uint64(len(s)))
		b = append(b, s...)
	}
	for _, of := range id.Of {
		text(of.Row.Name)
		text(of.Row.Key)
		text(of.Plan)
		b = binary.AppendUvarint(b, uint64(of.Slots))
		b = binary.AppendUvarint(b, uint64(of.Length))
	}
	b = binary.BigEndian.AppendUint32(b, crc32.ChecksumIEEE(b))
	return version + base64.RawURLEncoding.EncodeToString(b)
}

// Parse parses an ID. It accepts only IDs that String returns, with shares that valid accepts. An error names the
// mistake.
func Parse(text string, valid func(of *Share) bool) (*ID, error) {
	invalid := func(problem string) (*ID, error) { return nil, errors.New(problem) }
	encoded, known := strings.CutPrefix(text, version)
	switch {
	case text == "":
		return invalid("it is empty, as after a refused Acquire")
	case len(text) > maxID:
		return invalid(fmt.Sprintf("it has %d bytes, and none has more than %d", len(text), maxID))
	case !known:
		return invalid(fmt.Sprintf("%.20q does not begin like a lease ID; pass the one that Acquire returned, and "+
			"that of a Reservation to Settle or Cancel", text))
	}
	b, err := base64.RawURLEncoding.Strict().DecodeString(encoded)
	if n := len(b) - 4; err != nil || n < 0 || binary.BigEndian.Uint32(b[n:]) != crc32.ChecksumIEEE(b[:n]) {
		return invalid("it was cut off or changed; pass the one that Acquire returned")
	}
	id, whole := decode(b[:len(b)-4], valid)
	if !whole || id.String() != text {
		return invalid("it was changed; pass the one that Acquire returned")
	}
	return id, nil
}

func decode(b []byte, valid func(of *Share) bool) (id *ID, whole bool) {
	whole = true
	rest := bytes.NewReader(b)
	number := func(least, most int64) int64 {
		n, err := binary.ReadUvarint(rest)
		whole = whole && err == nil && n >= uint64(least) && n <= uint64(most)
		if !whole {
			return 0
		}
		return int64(n)
	}
	text := func() string {
		s := make([]byte, number(0, maxText))
		n, _ := rest.Read(s)
		whole = whole && n == len(s)
		return string(s)
	}
	id = &ID{Fence: number(1, 1<<62)}
	for whole && rest.Len() > 0 && len(id.Of) < MaxShares {
		var of Share
		of.Row.Name, of.Row.Key, of.Plan = text(), text(), text()
		of.Slots, of.Length = number(0, MaxSlots), number(time.Millisecond.Microseconds(), bucket.MaxLease)
		n := len(id.Of)
		whole = whole && valid(&of) && (n == 0 || id.Of[n-1].Row.Compare(of.Row) < 0)
		id.Of = append(id.Of, of)
	}
	return id, whole && rest.Len() == 0
}
