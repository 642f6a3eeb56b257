package ratelimit

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// leaseID is what the ID of a lease says.
type leaseID struct {
	fence int64
	of    []leaseOf // in the order of locking
}

// leaseOf is what a lease holds of one limit.
type leaseOf struct {
	row    bucket.Key
	plan   string // that the key was on
	slots  int64  // 0: none, because the limit was off, or refused in shadow
	length int64  // of the lease when it was taken, in microseconds
}

const (
	leaseVersion = "L1" // what an ID begins with

	maxPlanBytes = maxKeyBytes // isText checks both

	// maxLeaseID bounds an ID: for each of the limits of a call a name, a key, a plan and two numbers.
	maxLeaseID = len(leaseVersion) + (maxRequests*(64+maxKeyBytes+maxPlanBytes+24)+64)*4/3
)

// String returns the ID: the version, and then in base64url the fencing number, for each limit its name, its key as stored,
// its plan, the slots and the length, and a checksum.
func (id *leaseID) String() string {
	b := binary.AppendUvarint(nil, uint64(id.fence))
	text := func(s string) {
		b = binary.AppendUvarint(b, uint64(len(s)))
		b = append(b, s...)
	}
	for _, of := range id.of {
		text(of.row.Name)
		text(of.row.Key)
		text(of.plan)
		b = binary.AppendUvarint(b, uint64(of.slots))
		b = binary.AppendUvarint(b, uint64(of.length))
	}
	b = binary.BigEndian.AppendUint32(b, crc32.ChecksumIEEE(b))
	return leaseVersion + base64.RawURLEncoding.EncodeToString(b)
}

// parseLeaseID returns what an ID says. An ID that it accepts is one that String returns.
func parseLeaseID(text string) (*leaseID, error) {
	invalid := func(problem string) (*leaseID, error) { return nil, fmt.Errorf("%w: %s", ErrInvalidLease, problem) }
	encoded, known := strings.CutPrefix(text, leaseVersion)
	switch {
	case text == "":
		return invalid("it is empty, as that of an Acquire that was refused")
	case len(text) > maxLeaseID:
		return invalid(fmt.Sprintf("it has %d bytes, and none has more than %d", len(text), maxLeaseID))
	case !known:
		return invalid(fmt.Sprintf("%.20q is not how the ID of a Lease begins; pass the one that Acquire returned, and that of a Reservation to Settle or Cancel", text))
	}
	b, err := base64.RawURLEncoding.Strict().DecodeString(encoded)
	if n := len(b) - 4; err != nil || n < 0 || binary.BigEndian.Uint32(b[n:]) != crc32.ChecksumIEEE(b[:n]) {
		return invalid("it was cut off or changed; pass the one that Acquire returned")
	}
	id, valid := decodeLeaseID(b[:len(b)-4])
	if !valid || id.String() != text {
		return invalid("it holds what Acquire does not put there; pass the one that Acquire returned")
	}
	return id, nil
}

// decodeLeaseID is parseLeaseID for the bytes that are encoded.
func decodeLeaseID(b []byte) (id *leaseID, valid bool) {
	valid = true
	rest := bytes.NewReader(b)
	number := func(least, most int64) int64 {
		n, err := binary.ReadUvarint(rest)
		valid = valid && err == nil && n >= uint64(least) && n <= uint64(most)
		if !valid {
			return 0
		}
		return int64(n)
	}
	text := func() string {
		s := make([]byte, number(0, maxKeyBytes))
		n, _ := rest.Read(s)
		valid = valid && n == len(s)
		return string(s)
	}
	id = &leaseID{fence: number(1, 1<<62)}
	for valid && rest.Len() > 0 && len(id.of) < maxRequests {
		var of leaseOf
		of.row.Name, of.row.Key, of.plan = text(), text(), text()
		of.slots, of.length = number(0, maxSlots), number(time.Millisecond.Microseconds(), bucket.MaxLease)
		n := len(id.of)
		valid = valid && validName.MatchString(of.row.Name) && isText(of.row.Key) && isText(of.plan) &&
			(n == 0 || id.of[n-1].row.Compare(of.row) < 0)
		id.of = append(id.of, of)
	}
	return id, valid && rest.Len() == 0
}

// StoredLeaseID returns the ID of the lease with a fencing number on the bucket of a request, which is in the stored form:
// that of [Limit.ForStored], or [Limit.Global]. It is for tools that read leases in the table and release them. An Acquire
// for several limits has one lease on each of their buckets; this ID is that of one alone. It returns an error that wraps
// ErrInvalidLease for a number that no lease has, and ErrInvalidRequest for a key that is not in the stored form.
func StoredLeaseID(request Request, fence int64) (string, error) {
	switch {
	case request.limit.isZero() || !request.stored && !request.global:
		return "", fmt.Errorf("%w: the lease of %v; name the bucket with ForStored", ErrInvalidRequest, request)
	case fence < 1:
		return "", fmt.Errorf("%w: the fencing number is %d; use one that the table has", ErrInvalidLease, fence)
	}
	of := leaseOf{
		row: bucket.Key{Name: request.limit.Name(), Key: request.key}, plan: request.plan, slots: 1,
		length: Concurrency{}.lease().Microseconds(),
	}
	id := (&leaseID{fence: fence, of: []leaseOf{of}}).String()
	_, err := parseLeaseID(id)
	return id, err
}
