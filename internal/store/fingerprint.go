package store

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
)

// NoSecret is the fingerprint of a program that stores keys as they are.
const NoSecret = "none"

// FingerprintOf returns what the tables keep of a secret, from which it cannot be learnt.
func FingerprintOf(secret []byte) string {
	if len(secret) == 0 {
		return NoSecret
	}
	mac := hmac.New(sha256.New, secret)
	mac.Write([]byte("pgratelimit: the fingerprint of HashKey")) // without the NUL that is in whatever a Limiter hashes
	return base64.RawURLEncoding.EncodeToString(mac.Sum(nil))
}

// Fingerprint returns that of the secret under which the keys in the tables are stored, and "" when none is there yet; and by
// which way it was asked. With it the Store learns how the tables are laid out.
func (s *Session) Fingerprint(ctx context.Context) (stored string, way Way, err error) {
	return s.Engine().Fingerprint(ctx, &s.Unit, "")
}

// StoreFingerprint stores own when there is no fingerprint yet, and returns the one that is there then. It first reads, so
// that whoever comes later writes nothing; and writes nothing when judge returns an error for the way by which it did. s is a session on the
// pool. The fingerprint is stored at READ COMMITTED, whatever the database's default is: no transaction that looked at SERIALIZABLE loses
// against it.
func (s *Session) StoreFingerprint(ctx context.Context, verb, own string, judge func(Way) error) (stored string, err error) {
	var way Way
	err = s.retry(ctx, verb, func() (err error) {
		stored, way, err = s.Engine().Fingerprint(ctx, &s.Unit, own)
		return err
	})
	if err == nil {
		err = judge(way)
	}
	if err != nil || stored != "" {
		return stored, err
	}
	err = s.retryTx(ctx, verb, func(tx *Session) error {
		if err := tx.Engine().StoreFingerprint(ctx, &tx.Unit, own); err != nil {
			return err
		}
		stored, _, err = tx.Fingerprint(ctx)
		return err
	})
	return stored, err
}

// Fingerprint reads it by fingerprint_read.sql.
func (postgres) Fingerprint(ctx context.Context, u *Unit, _ string) (stored string, way Way, err error) {
	rows, err := u.conn.Query(ctx, u.statements.fingerprintRead, runAtOnce, u.table())
	if err != nil {
		return "", Way{}, err
	}
	defer rows.Close()
	var backend uint32
	var hasCitus, inPartitions18 bool
	for rows.Next() {
		if err := rows.Scan(&stored, &backend, &hasCitus, &inPartitions18); err != nil {
			return "", Way{}, err
		}
		way = wayOf(rows, backend)
	}
	if err := rows.Err(); err != nil {
		return "", Way{}, err
	}
	return stored, way, u.learnLayout(ctx, hasCitus, inPartitions18)
}

// StoreFingerprint inserts it.
func (postgres) StoreFingerprint(ctx context.Context, u *Unit, own string) error {
	_, err := u.conn.Exec(ctx, u.statements.fingerprintInsert, own)
	return err
}
