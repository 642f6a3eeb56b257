package main

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"encoding/base64"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync/atomic"

	"golang.org/x/crypto/argon2"
)

// hashCost is what one argon2id hash takes.
type hashCost struct {
	memoryKiB uint32
	passes    uint32
	threads   uint8
}

// defaultCost returns the OWASP Password Storage Cheat Sheet's second choice: 19 MiB, 2 passes, 1 thread.
func defaultCost() hashCost { return hashCost{memoryKiB: 19 * 1024, passes: 2, threads: 1} }

const (
	saltBytes = 16
	hashBytes = 32
)

var errBadHash = errors.New("the stored password hash cannot be read")

// hasher makes and checks password hashes, a bounded number at a time: each takes a core and 19 MiB, so a
// flood of attempts that the limits admit must still not take them all.
type hasher struct {
	cost     hashCost
	slots    chan struct{}
	decoy    string       // what the password of an unknown login is checked against
	computed atomic.Int64 // hashes computed in verify: a metric, and what the demo and the tests count
}

// newHasher returns a hasher that computes at most concurrent hashes at a time; 0 means one for each core.
func newHasher(cost hashCost, concurrent int) *hasher {
	if concurrent == 0 {
		concurrent = runtime.GOMAXPROCS(0)
	}
	h := &hasher{cost: cost, slots: make(chan struct{}, concurrent)}
	h.decoy = h.hash(rand.Text())
	return h
}

// hash returns a new hash of password in the PHC format, $argon2id$v=19$m=..,t=..,p=..$salt$hash.
func (h *hasher) hash(password string) string {
	salt := make([]byte, saltBytes)
	_, _ = rand.Read(salt) // never fails
	sum := argon2.IDKey([]byte(password), salt, h.cost.passes, h.cost.memoryKiB, h.cost.threads, hashBytes)
	return fmt.Sprintf("$argon2id$v=%d$m=%d,t=%d,p=%d$%s$%s", argon2.Version, h.cost.memoryKiB, h.cost.passes,
		h.cost.threads, base64.RawStdEncoding.EncodeToString(salt), base64.RawStdEncoding.EncodeToString(sum))
}

// verify reports whether password is the one that stored was made from. It waits for a free slot, as long
// as ctx allows.
func (h *hasher) verify(ctx context.Context, password, stored string) (bool, error) {
	cost, salt, sum, err := parseHash(stored)
	if err != nil {
		return false, err
	}
	select {
	case h.slots <- struct{}{}:
		defer func() { <-h.slots }()
	case <-ctx.Done():
		return false, fmt.Errorf("wait to check a password: %w", context.Cause(ctx))
	}
	h.computed.Add(1)
	computed := argon2.IDKey([]byte(password), salt, cost.passes, cost.memoryKiB, cost.threads, uint32(len(sum)))
	return subtle.ConstantTimeCompare(computed, sum) == 1, nil
}

func parseHash(stored string) (cost hashCost, salt, sum []byte, err error) {
	parts := strings.Split(stored, "$") // "", argon2id, v=19, m=..,t=..,p=.., salt, hash
	if len(parts) != 6 || parts[1] != "argon2id" || parts[2] != fmt.Sprintf("v=%d", argon2.Version) {
		return cost, nil, nil, errBadHash
	}
	if _, err := fmt.Sscanf(parts[3], "m=%d,t=%d,p=%d", &cost.memoryKiB, &cost.passes, &cost.threads); err != nil {
		return cost, nil, nil, fmt.Errorf("%w: %w", errBadHash, err)
	}
	salt, saltErr := base64.RawStdEncoding.DecodeString(parts[4])
	sum, sumErr := base64.RawStdEncoding.DecodeString(parts[5])
	if err := errors.Join(saltErr, sumErr); err != nil || len(sum) < saltBytes || cost.passes == 0 || cost.threads == 0 {
		return cost, nil, nil, errors.Join(errBadHash, err)
	}
	return cost, salt, sum, nil
}
