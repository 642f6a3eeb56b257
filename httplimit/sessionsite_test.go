package httplimit_test

import (
	"bytes"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
)

const cookieName = "__Host-visitor"

func secret(fill byte) []byte { return bytes.Repeat([]byte{fill}, 32) }

// site is a server with sessions, whose clock the test moves.
type site struct {
	t        *testing.T
	now      time.Time
	config   httplimit.SessionConfig
	sessions *httplimit.Sessions
}

func newSite(t *testing.T, configure ...func(*httplimit.SessionConfig)) *site {
	t.Helper()
	s := &site{t: t, now: time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)}
	s.config = httplimit.SessionConfig{
		Secrets: [][]byte{secret(1)},
		Source:  httplimit.Peer,
		AsOf:    func() time.Time { return s.now },
	}
	for _, change := range configure {
		change(&s.config)
	}
	s.start()
	return s
}

// start makes the sessions anew, as a restart of the server does.
func (s *site) start() {
	s.t.Helper()
	var err error
	s.sessions, err = httplimit.NewSessions(s.config)
	require.NoError(s.t, err)
}

// seen is what a request came to.
type seen struct {
	cookie  *http.Cookie // nil when none was set
	header  http.Header
	session httplimit.Session
	known   bool // there is a session
	key     string
	err     error
}

// visit sends a request from address with the value of a cookie, unless that is empty.
func (s *site) visit(address, cookie string, lines ...[2]string) seen {
	s.t.Helper()
	if cookie != "" {
		lines = append(lines, [2]string{"Cookie", cookieName + "=" + cookie})
	}
	var got seen
	recorder := httptest.NewRecorder()
	s.sessions.Handler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		got.session, got.known = s.sessions.From(r.Context())
		got.key, got.err = s.sessions.Key().Of(r)
	})).ServeHTTP(recorder, from(address, lines...))
	got.header = recorder.Header()
	if set := recorder.Result().Cookies(); len(set) > 0 {
		require.Len(s.t, set, 1)
		got.cookie = set[0]
	}
	return got
}

const (
	home     = "[2001:db8:0:7::1]:1000"
	homeToo  = "[2001:db8:0:7:8::2]:2000" // in the same /64
	away     = "[2001:db8:0:8::1]:1000"
	homesKey = "address|2001:db8:0:7::/64"
	awaysKey = "address|2001:db8:0:8::/64"
)

// solves makes a site take the header Solution for a proof, whatever it holds.
func solves(c *httplimit.SessionConfig) {
	c.Verify = func(r *http.Request, _ httplimit.Session) (string, error) { return r.Header.Get("Solution"), nil }
}

func solution(proof string) [2]string { return [2]string{"Solution", proof} }
