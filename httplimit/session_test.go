package httplimit_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

func TestSessionIsIssuedOnFirstContact(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	first := s.visit(home, "")
	require.True(t, first.known)
	require.Len(t, first.session.ID, 22)
	require.False(t, first.session.Verified)
	require.True(t, first.session.IssuedAt.Equal(s.now))
	require.Equal(t, homesKey, first.key)
	require.Equal(t, "private", first.header.Get("Cache-Control"))
	require.Equal(t, cookieName, first.cookie.Name)
	require.Equal(t, "/", first.cookie.Path)
	require.Empty(t, first.cookie.Domain)
	require.True(t, first.cookie.Secure)
	require.True(t, first.cookie.HttpOnly)
	require.Equal(t, http.SameSiteLaxMode, first.cookie.SameSite)
	require.Equal(t, int((7 * 24 * time.Hour).Seconds()), first.cookie.MaxAge)
	require.NotContains(t, first.cookie.Value, "2001")

	s.now = s.now.Add(24 * time.Hour)
	again := s.visit(homeToo, first.cookie.Value)
	require.Nil(t, again.cookie, "a session that counts is not set again")
	require.Empty(t, again.header)
	require.Equal(t, first.session.ID, again.session.ID)
	require.True(t, first.session.IssuedAt.Equal(again.session.IssuedAt))
	require.Equal(t, homesKey, again.key, "age alone is worth nothing")

	require.NotEqual(t, first.session.ID, s.visit(home, "").session.ID)
}

func TestSessionWithoutAnAddress(t *testing.T) {
	t.Parallel()
	s := newSite(t, solves)
	got := s.visit("@", "", solution("p1"))
	require.False(t, got.known)
	require.Nil(t, got.cookie)
	require.ErrorIs(t, got.err, httplimit.ErrNoKey)
}

func TestSessionKeyNeedsTheHandler(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	_, err := s.sessions.Key().Of(from(home))
	require.ErrorContains(t, err, "Sessions.Handler")
	require.NotErrorIs(t, err, httplimit.ErrNoKey)
	require.NotErrorIs(t, err, httplimit.ErrBadKey)
	_, found := s.sessions.From(t.Context())
	require.False(t, found)

	other := newSite(t)
	other.sessions.Handler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		_, err = s.sessions.Key().Of(r)
	})).ServeHTTP(httptest.NewRecorder(), from(home))
	require.Error(t, err, "of these sessions, not of others")
}

func TestSessionConfig(t *testing.T) {
	t.Parallel()
	for name, spoil := range map[string]func(*httplimit.SessionConfig){
		"Secrets is empty": func(c *httplimit.SessionConfig) { c.Secrets = nil },
		"Secrets[1] has":   func(c *httplimit.SessionConfig) { c.Secrets = [][]byte{secret(1), []byte("short")} },
		"Source is nil":    func(c *httplimit.SessionConfig) { c.Source = nil },
		"Bits.IPv6":        func(c *httplimit.SessionConfig) { c.Bits.IPv6 = 128 },
		"Lifetime is":      func(c *httplimit.SessionConfig) { c.Lifetime = -time.Hour },
		"Lifetime is 1":    func(c *httplimit.SessionConfig) { c.Lifetime = 10_000 * time.Hour },
		"Name":             func(c *httplimit.SessionConfig) { c.Name = "a b" },
		"Insecure":         func(c *httplimit.SessionConfig) { c.Insecure, c.Name = true, "__HOST-visitor" },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			config := httplimit.SessionConfig{Secrets: [][]byte{secret(1)}, Source: httplimit.Peer}
			spoil(&config)
			_, err := httplimit.NewSessions(config)
			require.ErrorIs(t, err, ratelimit.ErrInvalidConfig)
			require.ErrorContains(t, err, name)
		})
	}
}

func ExampleSessions() {
	sessions, err := httplimit.NewSessions(httplimit.SessionConfig{
		Secrets: [][]byte{[]byte("a secret of sixteen bytes or more")},
		Source:  httplimit.Peer,
		Verify: func(r *http.Request, _ httplimit.Session) (string, error) {
			if r.Method != http.MethodPost || r.URL.Path != "/challenge" {
				return "", nil
			}
			// Here the provider of the challenge is asked whether the token is right.
			return r.PostFormValue("token"), nil
		},
	})
	if err != nil {
		panic(err)
	}
	key := sessions.Key() // for the limit inside
	page := sessions.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		text, err := key.Of(r)
		_, own, _ := strings.Cut(text, "|")
		visitor, _ := sessions.From(r.Context())
		fmt.Fprint(w, "verified: ", visitor.Verified, ", own bucket: ", own == visitor.ID, ", error: ", err)
	}))

	w := httptest.NewRecorder()
	page.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/", nil))
	fmt.Println(w.Body)

	form := httptest.NewRequest(http.MethodPost, "/challenge", strings.NewReader("token=solved"))
	form.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	form.AddCookie(w.Result().Cookies()[0])
	w = httptest.NewRecorder()
	page.ServeHTTP(w, form)
	fmt.Println(w.Body)
	// Output:
	// verified: false, own bucket: false, error: <nil>
	// verified: true, own bucket: true, error: <nil>
}
