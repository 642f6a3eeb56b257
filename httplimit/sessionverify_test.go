package httplimit_test

import (
	"bytes"
	"errors"
	"log/slog"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

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
