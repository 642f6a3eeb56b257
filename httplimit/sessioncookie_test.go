package httplimit_test

import (
	"encoding/base64"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
)

// TestACookieIsNotShared promises that no shared cache may keep a response that sets a cookie, whatever the handler says
// and however it sends it, and that other responses are left alone.
func TestACookieIsNotShared(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	cookie := s.visit(home, "").cookie.Value
	for said, want := range map[string]string{
		"":                             "private",
		"no-cache":                     "private, no-cache",
		"Public, max-age=60":           "private, max-age=60",
		"max-age=60, s-maxage=600":     "private, max-age=60",
		`private="X-Secret", no-cache`: "private, no-cache",
		`private="A, B", max-age=60`:   "private, no-cache",
		"max-age=60, private":          "max-age=60, private",
		"no-store":                     "no-store",
	} {
		for name, send := range map[string]func(w http.ResponseWriter){
			"Nothing": func(http.ResponseWriter) {},
			"Status":  func(w http.ResponseWriter) { w.WriteHeader(http.StatusNotModified) },
			"Body":    func(w http.ResponseWriter) { _, _ = w.Write([]byte("hello")) },
			"Flush":   func(w http.ResponseWriter) { w.(http.Flusher).Flush() },
		} {
			handler := s.sessions.Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				if said != "" {
					w.Header().Set("Cache-Control", said)
				}
				send(w)
			}))
			sent := do(handler, from(home)).Result()
			require.Len(t, sent.Cookies(), 1)
			require.Equal(t, want, sent.Header.Get("Cache-Control"), "%s, %s", name, said)

			sent = do(handler, from(home, [2]string{"Cookie", cookieName + "=" + cookie})).Result()
			require.Empty(t, sent.Cookies())
			require.Equal(t, said, sent.Header.Get("Cache-Control"), "%s, %s", name, said)
		}
	}
}

// TestSessionThatDoesNotCount tells what becomes of cookies that are not what the site has issued: each is as
// good as none.
func TestSessionThatDoesNotCount(t *testing.T) {
	t.Parallel()
	s := newSite(t, solves)
	fresh := s.visit(home, "")
	verified := s.visit(home, "", solution("p1"))
	require.Equal(t, "session|"+verified.session.ID, verified.key)

	worthless := func(t *testing.T, cookie, address, key string) {
		t.Helper()
		got := s.visit(address, cookie)
		require.Equal(t, key, got.key)
		require.False(t, got.session.Verified)
		require.NotContains(t, []string{fresh.session.ID, verified.session.ID}, got.session.ID)
		require.NotNil(t, got.cookie, "a new session is issued")
	}

	t.Run("Tampered", func(t *testing.T) {
		for _, cookie := range []string{fresh.cookie.Value, verified.cookie.Value} {
			raw, err := base64.RawURLEncoding.DecodeString(cookie)
			require.NoError(t, err)
			for bit := range len(raw) * 8 {
				raw[bit/8] ^= 1 << (bit % 8)
				worthless(t, base64.RawURLEncoding.EncodeToString(raw), home, homesKey)
				raw[bit/8] ^= 1 << (bit % 8)
			}
		}
	})
	t.Run("Garbage", func(t *testing.T) {
		whole := verified.cookie.Value
		for _, cookie := range []string{"x", whole[1:], whole + "A", whole[:40], strings.Repeat("A", len(whole)), strings.Repeat("!", len(whole)), strings.Repeat("A", 10_000)} {
			worthless(t, cookie, home, homesKey)
		}
	})
	t.Run("FromAnotherAddress", func(t *testing.T) {
		worthless(t, fresh.cookie.Value, away, awaysKey)
	})
	t.Run("SignedByAnotherSite", func(t *testing.T) {
		other := newSite(t, solves, func(c *httplimit.SessionConfig) { c.Secrets = [][]byte{secret(2)} })
		worthless(t, other.visit(home, "").cookie.Value, home, homesKey)
		worthless(t, other.visit(home, "", solution("p1")).cookie.Value, home, homesKey)
	})
	t.Run("SignedForAnotherCookie", func(t *testing.T) {
		other := newSite(t, solves, func(c *httplimit.SessionConfig) { c.Name = "__Host-other" })
		worthless(t, other.visit(home, "", solution("p1")).cookie.Value, home, homesKey)
	})
	t.Run("FromAClockFarAhead", func(t *testing.T) {
		ahead := newSite(t, solves)
		ahead.now = s.now.Add(6 * time.Minute)
		worthless(t, ahead.visit(home, "", solution("p1")).cookie.Value, home, homesKey)
		ahead.now = s.now.Add(4 * time.Minute)
		require.True(t, s.visit(home, ahead.visit(home, "", solution("p1")).cookie.Value).session.Verified)
	})
	t.Run("Expired", func(t *testing.T) {
		s.now = s.now.Add(7*24*time.Hour - time.Second)
		last := s.visit(home, verified.cookie.Value)
		require.Equal(t, verified.key, last.key)
		s.now = s.now.Add(time.Second)
		worthless(t, fresh.cookie.Value, home, homesKey)
		worthless(t, verified.cookie.Value, home, homesKey)
	})
}

func TestSessionSecretsRotate(t *testing.T) {
	t.Parallel()
	s := newSite(t, solves)
	fresh, solved := s.visit(home, ""), s.visit(home, "", solution("p1"))

	s.config.Secrets = [][]byte{secret(2), secret(1)}
	s.start()
	for _, before := range []seen{fresh, solved} {
		after := s.visit(home, before.cookie.Value)
		require.Equal(t, before.session, after.session)
		require.Equal(t, before.key, after.key)
		require.NotNil(t, after.cookie, "it is signed anew")

		s.config.Secrets = [][]byte{secret(2)}
		s.start()
		require.Equal(t, before.session, s.visit(home, after.cookie.Value).session)
		require.NotEqual(t, before.session, s.visit(home, before.cookie.Value).session)
		s.config.Secrets = [][]byte{secret(2), secret(1)}
		s.start()
	}
}

func TestSessionAmongOtherCookies(t *testing.T) {
	t.Parallel()
	s := newSite(t, solves)
	solved := s.visit(home, "", solution("p1"))
	value := cookieName + "=" + solved.cookie.Value
	require.Equal(t, solved.key, s.visit(home, "", [2]string{"Cookie", cookieName + "=x; theme=dark; " + value}).key)
	require.Equal(t, homesKey, s.visit(home, "", [2]string{"Cookie", strings.Repeat(cookieName+"=x; ", 4) + value}).key, "what is looked at has a bound")
}

func TestSessionOverPlainHTTP(t *testing.T) {
	t.Parallel()
	s := newSite(t, func(c *httplimit.SessionConfig) { c.Insecure = true })
	got := s.visit(home, "")
	require.Equal(t, "visitor", got.cookie.Name)
	require.False(t, got.cookie.Secure)
	require.True(t, got.cookie.HttpOnly)
}
