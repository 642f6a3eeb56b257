package httplimit

import (
	"crypto/hmac"
	"encoding/base64"
	"encoding/binary"
	"time"
)

// sessionToken is a session as a cookie carries it: in base64url,
//
//	version 1 byte | verified 1 | issued 8, Unix seconds | ID 16 | HMAC-SHA-256 32
//
// The HMAC covers the cookie's name and, unless it is verified, the network that the session is bound to; the
// cookie does not hold the network.
type sessionToken struct {
	verified bool
	issuedAt time.Time
	id       [16]byte
}

const (
	sessionVersion = 1
	sessionBody    = 1 + 1 + 8 + 16
	sessionMAC     = 32
	// sessionSkew is how far the clock of the server that issued a session may be ahead of this one's.
	sessionSkew = 5 * time.Minute
)

// provenSessionToken returns the verified token of proof: its ID follows from the proof, so that one proof is
// one session.
func provenSessionToken(secret []byte, proof string, now time.Time) sessionToken {
	token := sessionToken{verified: true, issuedAt: now.UTC().Truncate(time.Second)}
	copy(token.id[:], keyedHash(secret, "httplimit session proof", proof))
	return token
}

func (t sessionToken) name() string { return base64.RawURLEncoding.EncodeToString(t.id[:]) }

func (t sessionToken) session() Session {
	return Session{ID: t.name(), Verified: t.verified, IssuedAt: t.issuedAt}
}

// validAt reports whether now is in the token's time: issuedAt - skew <= now < issuedAt + lifetime.
func (t sessionToken) validAt(now time.Time, lifetime time.Duration) bool {
	return !now.Before(t.issuedAt.Add(-sessionSkew)) && now.Before(t.issuedAt.Add(lifetime))
}

// sign returns the token's text for the cookie called cookie.
func (t sessionToken) sign(secret []byte, cookie, network string) string {
	body := t.body()
	return base64.RawURLEncoding.EncodeToString(append(body, t.mac(secret, body, cookie, network)...))
}

// openSessionToken returns the token of text when secret has signed it for the cookie and, unless it is
// verified, the network.
func openSessionToken(text string, secret []byte, cookie, network string) (sessionToken, bool) {
	if len(text) != base64.RawURLEncoding.EncodedLen(sessionBody+sessionMAC) {
		return sessionToken{}, false
	}
	raw, err := base64.RawURLEncoding.Strict().DecodeString(text)
	if err != nil || len(raw) != sessionBody+sessionMAC || raw[0] != sessionVersion || raw[1] > 1 {
		return sessionToken{}, false
	}
	body := raw[:sessionBody]
	token := sessionToken{
		verified: raw[1] == 1,
		issuedAt: time.Unix(int64(binary.BigEndian.Uint64(raw[2:])), 0).UTC(),
		id:       [16]byte(body[sessionBody-16:]),
	}
	return token, hmac.Equal(raw[sessionBody:], token.mac(secret, body, cookie, network))
}

func (t sessionToken) body() []byte {
	body := make([]byte, 0, sessionBody+sessionMAC)
	body = append(body, sessionVersion, 0)
	if t.verified {
		body[1] = 1
	}
	body = binary.BigEndian.AppendUint64(body, uint64(t.issuedAt.Unix()))
	return append(body, t.id[:]...)
}

// mac returns the HMAC of body. Neither a cookie's name nor a network holds a NUL, and body has one length,
// so that no two inputs run together.
func (t sessionToken) mac(secret, body []byte, cookie, network string) []byte {
	bound := "verified"
	if !t.verified {
		bound = "network " + network
	}
	return keyedHash(secret, "httplimit session", string(body)+cookie+"\x00"+bound)
}
