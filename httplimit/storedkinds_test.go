package httplimit_test

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	tables "github.com/pgratelimit/pgratelimit/rules"
)

// serveStored stores rules, with a tier for each user, and serves a site that is limited by them.
func serveStored(t *testing.T, handler http.Handler, stated ...tables.Rule) *tablesite {
	t.Helper()
	s := &tablesite{bundle: setup(t)}
	var err error
	s.store, err = tables.NewStore(s.pool, tables.StoreConfig{Lead: -1})
	require.NoError(t, err)
	s.set, err = tables.NewSet(s.pool, tables.Config{})
	require.NoError(t, err)
	set := tables.TierSet{}
	for _, r := range stated {
		set.Tiers = append(set.Tiers, tables.Tier{Limit: r.Limit, Key: "{user}"})
	}
	s.apply(t, tables.Changes{Put: stated, Tiers: &set})
	s.limiter, err = ratelimit.New(s.pool, ratelimit.Config{AsOf: s.clock, Observer: s.told, Policies: s.set})
	require.NoError(t, err)
	site, err := tables.NewSite(s.set, tables.SiteConfig{})
	require.NoError(t, err)
	s.config.Requests = httplimit.FromRules(site, signedIn)
	s.server = serve(t, s.limited(t, s.config, handler))
	return s
}

// served sends a request of a user, and returns an error unless it is served.
func (s *tablesite) served(ctx context.Context, user string) error {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, s.server.URL, http.NoBody)
	if err != nil {
		return err
	}
	r.Header.Set("X-User", user)
	response, err := s.server.Client().Do(r)
	if err != nil {
		return err
	}
	if response.StatusCode != http.StatusOK {
		err = errors.New(response.Status)
	}
	return errors.Join(err, response.Body.Close())
}

// TestFromRulesOfSlots promises that a tier of slots holds one while the handler runs, and takes from the other tiers.
func TestFromRulesOfSlots(t *testing.T) {
	t.Parallel()
	working, done := make(chan struct{}), make(chan struct{})
	s := serveStored(t, http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		working <- struct{}{}
		<-done
	}), tables.Rule{Limit: "jobs", Policy: ratelimit.Concurrency{Most: 1, Lease: time.Hour}}, tables.Rule{Limit: "calls", Policy: ratelimit.TokenBucket{Rate: 10, Period: time.Hour}})
	var first, other error
	var group sync.WaitGroup
	group.Go(func() { first = s.served(t.Context(), "ada") })
	<-working
	require.Equal(t, 0.0, s.left(t, inTables("jobs").For("ada")))
	require.Equal(t, 9.0, s.left(t, inTables("calls").For("ada")))
	refused := s.get(t, "/", "X-User", "ada")
	require.Contains(t, refused, "429 by the tier jobs, rule jobs")
	require.Equal(t, 9.0, s.left(t, inTables("calls").For("ada")), "a refused request takes nothing")
	group.Go(func() { other = s.served(t.Context(), "bob") })
	<-working
	close(done)
	group.Wait()
	require.NoError(t, errors.Join(first, other))
	for _, user := range []string{"ada", "bob"} {
		require.Eventually(t, func() bool { return s.left(t, inTables("jobs").For(user)) == 1 }, patient, time.Millisecond, "it is released")
	}
}

// TestTransportOfAStoredLimit promises that outcomes are reported of a limit that only a rule makes adaptive, and of none when
// the rule does so no longer.
func TestTransportOfAStoredLimit(t *testing.T) {
	t.Parallel()
	s := serveStored(t, respond(), tables.Rule{Limit: "upstream", Policy: ratelimit.Adaptive{Contract: ratelimit.TokenBucket{Rate: 3, Period: time.Minute}, Apply: true}})
	sent := 0
	transport := calling(s.limiter, func(*http.Request) (*http.Response, error) {
		sent++
		return &http.Response{StatusCode: http.StatusTooManyRequests, Header: http.Header{"Retry-After": {"7"}}, Body: http.NoBody}, nil
	})
	transport.Take = true
	transport.Request = func(r *http.Request) (ratelimit.Request, bool) { return inTables("upstream").For(r.Host), true }
	send := func() error {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://account", nil)
		require.NoError(t, err)
		response, err := transport.RoundTrip(r)
		if response != nil {
			require.NoError(t, response.Body.Close())
		}
		return err
	}
	require.NoError(t, send())
	var limited *ratelimit.LimitedError
	require.ErrorAs(t, send(), &limited)
	require.False(t, limited.Decision.States[0].PausedUntil.IsZero(), "it is left alone as it has asked")
	s.setClock(s.clock().Add(8 * time.Second))
	require.Eventually(t, func() bool {
		_, err := s.limiter.Check(t.Context(), inTables("upstream").For("account")) // which writes the pending reports
		require.NoError(t, err)
		var throttled float64
		err = s.pool.QueryRow(t.Context(), `SELECT coalesce(sum(throttled), 0) FROM ratelimit.prices`).Scan(&throttled)
		require.NoError(t, err)
		s.setClock(s.clock().Add(time.Second))
		return throttled == 1
	}, patient, time.Millisecond)
	s.apply(t, tables.Changes{Put: []tables.Rule{{Limit: "upstream", Policy: ratelimit.TokenBucket{Rate: 3, Period: time.Minute}}}})
	require.NoError(t, send())
	require.NoError(t, send(), "nothing pauses it")
	require.Equal(t, 3, sent)
}
