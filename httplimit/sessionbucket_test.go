package httplimit_test

import (
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

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
