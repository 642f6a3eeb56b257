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

// Fingerprint returns that of the secret under which the keys in the tables are stored, and "" when none is there yet. With
// it comes what LearnLayout asks for.
func (s *Session) Fingerprint(ctx context.Context) (string, error) {
	if s.engine != nil {
		return s.engine.Fingerprint(""), nil
	}
	rows, err := s.conn.Query(ctx, s.statements.fingerprintRead)
	if err != nil {
		return "", err
	}
	var stored string
	var hasCitus bool
	defer rows.Close()
	for rows.Next() {
		if err := rows.Scan(&stored, &hasCitus); err != nil {
			return "", err
		}
	}
	if err := rows.Err(); err != nil {
		return "", err
	}
	return stored, s.learnLayout(ctx, hasCitus)
}

// StoreFingerprint stores own when there is no fingerprint yet, and returns the one that is there then. It first reads, so
// that whoever comes later writes nothing. s is a session on the pool. The fingerprint is stored at READ COMMITTED,
// whatever the database's default is: no transaction that looked at SERIALIZABLE loses against it.
func (s *Session) StoreFingerprint(ctx context.Context, verb, own string) (stored string, err error) {
	if s.engine != nil {
		return s.engine.Fingerprint(own), nil
	}
	err = s.retry(ctx, verb, func() (err error) {
		stored, err = s.Fingerprint(ctx)
		return err
	})
	if err != nil || stored != "" {
		return stored, err
	}
	err = s.retryTx(ctx, verb, func(tx *Session) error {
		if _, err := tx.conn.Exec(ctx, tx.statements.fingerprintInsert, own); err != nil {
			return err
		}
		stored, err = tx.Fingerprint(ctx)
		return err
	})
	return stored, err
}
