package httplimit

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/telemetry"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Session is what a site knows of an anonymous visitor.
type Session struct {
	// ID names the session: 22 characters of base64url. It changes once, when the session is verified.
	ID string
	// Verified is whether SessionConfig.Verify has vouched for the visitor.
	Verified bool
	// IssuedAt is when the ID was issued, in whole seconds, in UTC.
	IssuedAt time.Time
}

// SessionConfig is how Sessions work. Secrets and Source are required.
type SessionConfig struct {
	// Secrets sign the sessions. The first signs, all verify: to change it, put the new one in front, and
	// take the old one away a Lifetime later. Sessions keep their IDs then, but a proof that is presented
	// once more is another session. 16 random bytes each at least.
	Secrets [][]byte
	// Source is where a client's address is read, as in ClientIP.
	Source Source
	// Bits is how much of the address counts, as in ClientIP.
	Bits Bits
	// Verify returns a proof that the visitor of r deserves a bucket of his own, and "" when there is none
	// in r: the token of a captcha that its provider has confirmed, the nonce of a puzzle that is solved, an
	// invitation's code. The same proof is the same session, so a solution that is sent a thousand times,
	// with or without cookies, is worth one bucket. The proof may be a limit's word, too: when s is some
	// minutes old, take from a limit of five sessions a day for the address, and return s.ID if it allows.
	// Defaults to nil: no session is ever verified.
	//
	// It is asked before any limit, for each request whose session is not verified. So let it return ""
	// at once unless r brings a proof, and limit by address how often it asks a provider. After an error,
	// which is logged, the request goes on unverified.
	Verify func(r *http.Request, s Session) (proof string, err error)
	// Lifetime is how long a session lasts from IssuedAt; a verified one has to prove itself anew then.
	// Defaults to 7 days.
	Lifetime time.Duration
	// Name is the cookie's name. Defaults to "__Host-visitor", which browsers accept from this very host
	// only, and to "visitor" when Insecure.
	Name string
	// Insecure lets the cookie travel over plain HTTP. For development on hosts other than localhost.
	Insecure bool
	// Logger gets the errors of Verify. Defaults to slog.Default.
	Logger *slog.Logger
	// AsOf replaces time.Now, for tests. Defaults to nil.
	AsOf func() time.Time
}

const (
	defaultSessionLifetime = 7 * ratelimit.Day
	maxSessionLifetime     = 400 * ratelimit.Day // browsers keep no cookie longer
	maxSessionCookies      = 4                   // of one name in a request that are looked at
)

func (c SessionConfig) withDefaults() SessionConfig {
	c.Bits = c.Bits.withDefaults()
	if c.Lifetime == 0 {
		c.Lifetime = defaultSessionLifetime
	}
	if c.Name == "" {
		c.Name = "__Host-visitor"
		if c.Insecure {
			c.Name = "visitor"
		}
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	if c.AsOf == nil {
		c.AsOf = time.Now
	}
	c.Secrets = slices.Clone(c.Secrets)
	for i := range c.Secrets {
		c.Secrets[i] = slices.Clone(c.Secrets[i]) // the caller may wipe its own
	}
	return c
}

func (c SessionConfig) validate() error {
	if len(c.Secrets) == 0 {
		return errors.New("SessionConfig.Secrets is empty; give one of 16 random bytes or more")
	}
	for i, secret := range c.Secrets {
		if len(secret) < minSecretBytes {
			return fmt.Errorf("SessionConfig.Secrets[%d] has %d bytes; use %d random ones or more", i, len(secret), minSecretBytes)
		}
	}
	if c.Source == nil {
		return errors.New("SessionConfig.Source is nil; say where the address is: Peer, XForwardedFor, Forwarded or TrustedHeader")
	}
	if c.Lifetime < time.Minute || c.Lifetime > maxSessionLifetime {
		return fmt.Errorf("SessionConfig.Lifetime is %v; use a minute to 400 days, or 0 for 7 days", c.Lifetime)
	}
	name := strings.ToLower(c.Name)
	if c.Insecure && (strings.HasPrefix(name, "__host-") || strings.HasPrefix(name, "__secure-")) {
		return fmt.Errorf("browsers refuse a cookie called %.80q that is Insecure; change one of the two", c.Name)
	}
	if err := (&http.Cookie{Name: c.Name}).Valid(); err != nil {
		return fmt.Errorf("SessionConfig.Name %.80q: %w", c.Name, err)
	}
	return c.Bits.validate()
}

// Sessions issues sessions to anonymous visitors and limits them, without a table of sessions: what a
// session is stands signed in its cookie.
//
// # Why a fresh session gains nothing
//
// An ID costs nothing to get, so an ID alone is worth nothing. Sessions.Key is the client's address until
// the session is verified, and the session's ID from then on:
//
//	no cookie, a forged, tampered or expired one     the address's bucket
//	a session that is not verified                   the address's bucket
//	a verified session                               its own bucket
//
// So n requests from one address (one /64) with n fresh sessions, or with none, take from one bucket, and
// whoever has presented p different proofs gets p buckets more, however many cookies he collects, drops or
// copies. Age alone verifies nobody: ten thousand sessions age as fast as one.
//
// A session that is not verified is bound to the address it was issued at: presented from another, it is no
// session, and a new one is issued there. A verified one is bound to its proof: copied to other addresses, it is
// still one bucket, which the thief then shares.
type Sessions struct{ config SessionConfig }

// NewSessions returns Sessions that work as config says. The error wraps ratelimit.ErrInvalidConfig and says what
// to change.
func NewSessions(config SessionConfig) (*Sessions, error) {
	config = config.withDefaults()
	if err := config.validate(); err != nil {
		return nil, fmt.Errorf("%w: httplimit: %w", ratelimit.ErrInvalidConfig, err)
	}
	return &Sessions{config: config}, nil
}

// Handler returns next with sessions in front of it: the request's session is in the context, and a new or
// renewed one is set as a cookie. A response that sets one is kept out of shared caches: whatever next says, its
// Cache-Control has private or no-store. Put it in front of the limits that use Key, and not of what everybody may
// share, such as scripts and pictures.
//
// A request whose address cannot be told passes without a session, unless it has a verified one.
func (s *Sessions) Handler(next http.Handler) http.Handler {
	mustHandler(next)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		v := s.visit(r)
		r = r.WithContext(context.WithValue(r.Context(), sessionContextKey{s}, v))
		if !v.renewed {
			next.ServeHTTP(w, r)
			return
		}
		http.SetCookie(w, s.cookie(v))
		sent, header := false, w.Header()
		send := func(status int) {
			if !sent {
				keepPrivate(header)
				sent = isFinal(status)
			}
		}
		next.ServeHTTP(watchSending(w, send), r)
		send(http.StatusOK) // by net/http, when next has sent nothing
	})
}

// keepPrivate keeps a response out of shared caches.
func keepPrivate(header http.Header) {
	said := strings.Join(header.Values("Cache-Control"), ",")
	if strings.Contains(said, `"`) { // the names of fields, which may have commas between them
		said = "no-cache"
	}
	kept, private := []string{"private"}, false
	for directive := range strings.SplitSeq(said, ",") {
		directive = strings.TrimSpace(directive)
		name, argument, _ := strings.Cut(strings.ToLower(directive), "=")
		switch {
		case name == "no-store", name == "private" && argument == "":
			private = true
		case directive != "" && name != "private" && name != "public" && name != "s-maxage":
			kept = append(kept, directive)
		}
	}
	if !private {
		header.Set("Cache-Control", strings.Join(kept, ", "))
	}
}

// Key returns the Key of the visitor, as described at Sessions: "session|" and an ID, or "address|" and
// what ClientIP returns. Its errors are those of Source. Behind no Handler of s every request is an error
// that wraps neither ErrNoKey nor ErrBadKey, because it is not the client's fault.
func (s *Sessions) Key() Key {
	return func(r *http.Request) (string, error) {
		v, found := r.Context().Value(sessionContextKey{s}).(visit)
		switch {
		case !found:
			return "", errors.New("httplimit: the request did not pass Sessions.Handler; put it in front of the limit")
		case v.token.verified:
			return ratelimit.Join("session", v.token.name()), nil
		case v.err != nil:
			return "", v.err
		}
		return ratelimit.Join("address", v.network), nil
	}
}

// From returns the session of the request that ctx belongs to, and whether it has one.
func (s *Sessions) From(ctx context.Context) (Session, bool) {
	v, _ := ctx.Value(sessionContextKey{s}).(visit)
	if v.token.issuedAt.IsZero() {
		return Session{}, false
	}
	return v.token.session(), true
}

// sessionContextKey is where the requests of a Sessions have their visit.
type sessionContextKey struct{ sessions *Sessions }

// visit is what is known of a request's visitor.
type visit struct {
	token   sessionToken // the zero token when there is no session
	renewed bool         // the cookie has to be set
	network string       // what counts of the address
	err     error        // why there is no network
}

// visit returns what is known of the visitor of r.
func (s *Sessions) visit(r *http.Request) visit {
	now := s.config.AsOf()
	network, err := s.network(r)
	v := visit{network: network, err: err}
	var found bool
	if v.token, v.renewed, found = s.presented(r, now, network); !found {
		if err != nil {
			return v // there is nothing to bind a session to
		}
		v.token, v.renewed = newSessionToken(now), true
	}
	if v.token.verified || s.config.Verify == nil {
		return v
	}
	proof, err := s.config.Verify(r, v.token.session())
	if err != nil {
		s.config.Logger.ErrorContext(r.Context(), "session not verified", "error", telemetry.ErrorText(err))
	} else if proof != "" {
		v.token, v.renewed = provenSessionToken(s.config.Secrets[0], proof, now), true
	}
	return v
}

func (s *Sessions) network(r *http.Request) (string, error) {
	address, err := s.config.Source(r)
	if err != nil {
		return "", err
	}
	return s.config.Bits.network(address)
}

// presented returns the session that the request brings, and whether it was signed by a secret that is
// being retired. A session counts when one of the secrets has signed it, for this network unless it is
// verified, and its time is not over.
func (s *Sessions) presented(r *http.Request, now time.Time, network string) (token sessionToken, outdated, found bool) {
	cookies := r.CookiesNamed(s.config.Name)
	for _, cookie := range cookies[:min(len(cookies), maxSessionCookies)] {
		for i, secret := range s.config.Secrets {
			token, ok := openSessionToken(cookie.Value, secret, s.config.Name, network)
			if ok && token.validAt(now, s.config.Lifetime) {
				return token, i > 0, true
			}
		}
	}
	return sessionToken{}, false, false
}

// cookie returns the cookie that carries the session of v.
func (s *Sessions) cookie(v visit) *http.Cookie {
	left := v.token.issuedAt.Add(s.config.Lifetime).Sub(s.config.AsOf())
	return &http.Cookie{
		Name:     s.config.Name,
		Value:    v.token.sign(s.config.Secrets[0], s.config.Name, v.network),
		Path:     "/",
		MaxAge:   max(1, int(left/time.Second)),
		Secure:   !s.config.Insecure,
		HttpOnly: true,
		SameSite: http.SameSiteLaxMode,
	}
}

func newSessionToken(now time.Time) sessionToken {
	token := sessionToken{issuedAt: now.UTC().Truncate(time.Second)}
	_, _ = rand.Read(token.id[:]) // it never fails: it ends the program instead
	return token
}
