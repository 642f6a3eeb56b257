package httplimit_test

import (
	"bytes"
	"encoding/base64"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
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

func TestSessionIsVerifiedByAProof(t *testing.T) {
	t.Parallel()
	s := newSite(t, solves)
	fresh := s.visit(home, "")
	solved := s.visit(home, fresh.cookie.Value, solution("p1"))
	require.True(t, solved.session.Verified)
	require.Equal(t, "session|"+solved.session.ID, solved.key, "in the request that brings the proof already")

	t.Run("AndStaysSo", func(t *testing.T) {
		later := s.visit(home, solved.cookie.Value)
		require.True(t, later.session.Verified)
		require.Equal(t, solved.key, later.key)
		require.Nil(t, later.cookie)
	})
	t.Run("OfWhichEachIsOneSession", func(t *testing.T) {
		require.Equal(t, solved.key, s.visit(home, "", solution("p1")).key, "without a cookie")
		require.Equal(t, solved.key, s.visit(away, s.visit(away, "").cookie.Value, solution("p1")).key, "with a fresh one")
		require.NotEqual(t, solved.key, s.visit(home, "", solution("p2")).key)
	})
	t.Run("AndKeepsItsBucketWhereverItIsCopied", func(t *testing.T) {
		require.Equal(t, solved.key, s.visit(away, solved.cookie.Value).key)
		require.Equal(t, solved.key, s.visit("@", solved.cookie.Value).key, "even where no address is known")
	})
	t.Run("ButTheFreshOneIsStillWorthNothing", func(t *testing.T) {
		require.Equal(t, homesKey, s.visit(home, fresh.cookie.Value).key)
	})
	t.Run("WhichIsNotAskedForAgain", func(t *testing.T) {
		require.Equal(t, solved.key, s.visit(home, solved.cookie.Value, solution("p2")).key)
	})
}

func TestSessionVerifyFails(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	s := newSite(t, func(c *httplimit.SessionConfig) {
		c.Logger = slog.New(slog.NewTextHandler(&log, nil))
		c.Verify = func(*http.Request, httplimit.Session) (string, error) {
			return "p1", errors.New("provider is down: https://site:hunter2@provider.test")
		}
	})
	got := s.visit(home, "")
	require.Equal(t, homesKey, got.key)
	require.False(t, got.session.Verified)
	require.Contains(t, log.String(), "provider is down")
	require.NotContains(t, log.String(), "hunter2")
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

func TestSessionOverPlainHTTP(t *testing.T) {
	t.Parallel()
	s := newSite(t, func(c *httplimit.SessionConfig) { c.Insecure = true })
	got := s.visit(home, "")
	require.Equal(t, "visitor", got.cookie.Name)
	require.False(t, got.cookie.Secure)
	require.True(t, got.cookie.HttpOnly)
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

// TestFreshSessionsGainNothing is what anonymous sessions are for: on a real limit of 20, thousands of
// requests from one /64 get exactly 20, whatever they do with their cookies.
func TestFreshSessionsGainNothing(t *testing.T) {
	t.Parallel()
	const capacity = 20
	for name, test := range map[string]struct {
		n      int
		cookie func(issued []string, i int) string
	}{
		"DroppingEveryCookie": {10_000, func([]string, int) string { return "" }},
		"CollectingFirst":     {2_000, func(issued []string, i int) string { return issued[i%len(issued)] }},
		"Tampering":           {2_000, func(issued []string, i int) string { return issued[i%len(issued)][i%9:] + "A" }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSite(t, solves)
			limit := ratelimit.Define("visits", ratelimit.TokenBucket{Rate: capacity, Period: time.Minute})
			var issued []string
			for range 1000 {
				issued = append(issued, s.visit(home, "").cookie.Value)
			}
			s.now = s.now.Add(time.Hour) // which ages them
			var count tally
			handler := s.sessions.Handler(count.limited(newLimiter(t), limit, s.sessions.Key()))
			sendAll(t, test.n, handler, func(i int) *http.Request {
				r := from(fmt.Sprintf("[2001:db8:0:7::%x]:80", i))
				if cookie := test.cookie(issued, i); cookie != "" {
					r.Header.Set("Cookie", cookieName+"="+cookie)
				}
				return r
			})
			require.EqualValues(t, capacity, count.admitted.Load())
			require.EqualValues(t, test.n-capacity, count.refused.Load())
			require.Zero(t, count.failed.Load())
		})
	}
}

// TestProofsAreWorthABucketEach: whoever solved p challenges gets p buckets and his address's, however often
// he sends the solutions and from wherever.
func TestProofsAreWorthABucketEach(t *testing.T) {
	t.Parallel()
	const n, capacity, proofs = 2_000, 20, 3
	s := newSite(t, solves)
	limit := ratelimit.Define("visits", ratelimit.TokenBucket{Rate: capacity, Period: time.Minute})
	var count tally
	handler := s.sessions.Handler(count.limited(newLimiter(t), limit, s.sessions.Key()))
	sendAll(t, n, handler, func(i int) *http.Request {
		if i%4 == proofs {
			return from(home)
		}
		return from(fmt.Sprintf("[2001:db8:0:%x::1]:80", i), solution(fmt.Sprintf("p%d", i%4)))
	})
	require.EqualValues(t, (proofs+1)*capacity, count.admitted.Load())
	require.Zero(t, count.failed.Load())
}

// TestVerifyByALimit verifies without a challenge: sessions that have been there for ten minutes get a bucket of
// their own, but no more than five a day of an address.
func TestVerifyByALimit(t *testing.T) {
	t.Parallel()
	limiter := newLimiter(t)
	newcomers := ratelimit.Define("newcomers", ratelimit.TokenBucket{Rate: 5, Period: ratelimit.Day})
	address := httplimit.ClientIP(httplimit.Peer, httplimit.Bits{})
	var s *site
	s = newSite(t, func(c *httplimit.SessionConfig) {
		c.Verify = func(r *http.Request, visitor httplimit.Session) (string, error) {
			if s.now.Sub(visitor.IssuedAt) < 10*time.Minute {
				return "", nil
			}
			network, err := address.Of(r)
			if err != nil {
				return "", err
			}
			d, err := limiter.Take(r.Context(), newcomers.For(network))
			if err != nil || !d.Allowed {
				return "", err
			}
			return visitor.ID, nil
		}
	})
	cookies := make([]string, 100)
	for i := range cookies {
		got := s.visit(home, "")
		require.Equal(t, homesKey, got.key)
		cookies[i] = got.cookie.Value
	}
	s.now = s.now.Add(10 * time.Minute)
	buckets := map[string]int{}
	for range 3 {
		for i, cookie := range cookies {
			got := s.visit(home, cookie)
			if got.cookie != nil {
				cookies[i] = got.cookie.Value
			}
			buckets[got.key]++
		}
	}
	require.Len(t, buckets, 6)
	require.Equal(t, 3*95, buckets[homesKey])
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
