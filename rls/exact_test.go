package rls_test

import (
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	commonv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// TestExact expects that callers at once are admitted as often as the tightest of three limits allows, and that the others lose the
// same number of tokens, also after a rule has changed. The plan of a call selects its rule.
func TestExact(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	store, err := rules.NewStore(pool, rules.StoreConfig{Lead: -1})
	require.NoError(t, err)
	file, err := rules.Read(strings.NewReader(`
match: all
rules:
  - {limit: address, kind: fixed window, rate: 1000, period: week}
  - {limit: user, kind: fixed window, rate: 5, period: week}
  - {limit: user, kind: fixed window, rate: 50, period: week, plan: pro}
  - {limit: site, kind: fixed window, rate: 1000, period: week}
tiers:
  - {limit: address, key: "{remote_address}", when: {remote_address: "*"}}
  - {limit: user, key: "{user}", when: {user: "*"}}
  - {limit: site, when: {generic_key: site}}
`))
	require.NoError(t, err)
	edit := rules.Edit{Author: "ana", Reason: "a test"}
	_, err = store.Apply(t.Context(), edit, rules.Changes{Put: file.Rules, Tiers: &file.Tiers})
	require.NoError(t, err)
	set, err := rules.NewSet(pool, rules.Config{})
	require.NoError(t, err)
	require.NoError(t, set.Load(t.Context()))
	s := newServiceOf(t, pool, set, nil)
	call := &ratelimitv3.RateLimitRequest{Domain: "edge", Descriptors: []*commonv3.RateLimitDescriptor{
		descriptor("remote_address=192.0.2.7"), descriptor("user=ada", "plan=pro"), descriptor("generic_key=site"),
	}}
	admitted := func() (n int64) {
		var count atomic.Int64
		var callers sync.WaitGroup
		for range 16 {
			callers.Go(func() {
				for range 8 {
					r, err := s.ShouldRateLimit(t.Context(), call)
					if err == nil && r.GetOverallCode() == ratelimitv3.RateLimitResponse_OK {
						count.Add(1)
					}
				}
			})
		}
		callers.Wait()
		return count.Load()
	}
	require.EqualValues(t, 50, admitted())
	_, err = store.Put(t.Context(), edit, rules.Rule{
		Limit: "user", Plan: "pro", Policy: ratelimit.FixedWindow{Rate: 80, Period: ratelimit.Week}, OnChange: ratelimit.AddTokens,
	})
	require.NoError(t, err)
	require.NoError(t, set.Load(t.Context()))
	require.EqualValues(t, 30, admitted())
	_, text := s.ask("edge", 0, descriptor("remote_address=192.0.2.7"), withHits(descriptor("generic_key=site"), 0))
	require.Regexp(t, `^OK: OK address .* left 919 .*; OK site .* left 920 `, text)
}
