package simulate_test

import (
	"io"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/cmd/ratelimit/internal/simulate"
	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// TestRunAgreesWithPostgres holds a replay to a Limiter on a server, whose clock is that of the log with its jumps, and whose rules and
// tiers are those of the file, from the tables: each refusal is the same, to the microsecond of its wait.
func TestRunAgreesWithPostgres(t *testing.T) {
	t.Parallel()
	n := testsize.Of(1500, 3000)
	file := document(t, `
match: all
rules:
  - {limit: address, rate: 6, period: minute, capacity: 4}
  - {limit: search, rate: 7, period: minute, kind: fixed window, capacity: 9}
  - {limit: trial, rate: 20, period: minute, mode: shadow}
  - {limit: site, rate: 40, period: second, shards: 1}
  - {limit: burst, kind: sliding window, rate: 5, period: 20s, slices: 8}
  - {limit: quota, kind: calendar window, rate: 20, resets: day, zone: Europe/Berlin}
overrides:
  - {limit: address, key: 10.0.0.0, multiplier: 3, until: 2031-05-06T07:08:30Z}
tiers:
  - {limit: site}
  - {limit: address, key: "{address}"}
  - {limit: search, key: "{address}", route: GET /search}
  - {limit: trial, key: "{user_agent}"}
  - {limit: burst, key: "{address}", route: GET /items/42}
  - {limit: quota, key: "{address}"}
`)
	text, err := io.ReadAll(newTraffic(n, 200))
	require.NoError(t, err)
	log := strings.Split(strings.TrimSpace(string(text)), "\n")
	for i := range log { // a clock that was wrong, for a moment and for a while, by a year and by a day
		switch {
		case i%701 == 700:
			log[i] = strings.Replace(log[i], "/2031:", "/2032:", 1)
		case i%1000 >= 950:
			log[i] = strings.Replace(log[i], "06/May", "05/May", 1)
		}
	}

	var simulated []simulate.Refusal
	report := run(t, simulate.Config{Rules: file, Refused: func(r simulate.Refusal) error {
		r.Source = ""
		simulated = append(simulated, r)
		return nil
	}}, lines(log...))
	require.EqualValues(t, n, report.Decided)
	require.Greater(t, report.Refused, int64(100))
	for _, limit := range report.Limits {
		require.True(t, limit.Refused > 10 || limit.Limit != "burst" && limit.Limit != "quota", "%+v", limit)
	}
	require.Greater(t, report.StepBackUs, (365 * 24 * time.Hour).Microseconds())

	pool := postgrestest.New(t)
	store, err := rules.NewStore(pool, rules.StoreConfig{})
	require.NoError(t, err)
	_, err = store.Apply(t.Context(), rules.Edit{Author: "ana", Reason: "a test"},
		rules.Changes{Put: file.Rules, Override: file.Overrides, Tiers: &file.Tiers})
	require.NoError(t, err)
	set, err := rules.NewSet(pool, rules.Config{})
	require.NoError(t, err)
	require.NoError(t, set.Load(t.Context()))
	site, err := rules.NewSite(set, rules.SiteConfig{Attributes: []string{"user_agent"}})
	require.NoError(t, err)
	var now time.Time
	limiter, err := ratelimit.New(pool, ratelimit.Config{Policies: set, AsOf: func() time.Time { return now }})
	require.NoError(t, err)

	var decided []simulate.Refusal
	var refused int64
	for i, line := range log {
		// Read in another way than by this package.
		quoted := strings.Split(line, `"`)
		text, _, _ := strings.Cut(quoted[0][strings.Index(quoted[0], "[")+1:], "]")
		now, err = time.Parse("02/Jan/2006:15:04:05 -0700", text)
		require.NoError(t, err)
		route, _, _ := strings.Cut(strings.TrimSuffix(quoted[1], " HTTP/1.1"), "?")
		address := strings.Fields(line)[0]
		requests, err := site.Requests(rules.Attributes{Address: address, Route: route, More: map[string]string{"user_agent": quoted[5]}}, nil)
		require.NoError(t, err)
		d, err := limiter.Take(t.Context(), requests...)
		require.NoError(t, err)
		if !d.Allowed {
			refused++
		}
		for j := range d.States {
			s := &d.States[j]
			if s.Allowed {
				continue
			}
			key := map[string]string{"address": address, "search": address, "trial": quoted[5], "burst": address, "quota": address}[s.Limit.Name()]
			decided = append(decided, simulate.Refusal{
				Time: now.UTC(), Limit: s.Limit.Name(), Key: key, Rule: s.Rule, Cost: s.Cost, RetryAfterUs: s.RetryAfter.Microseconds(),
				Shadow: s.Mode == ratelimit.Shadow, Line: int64(i) + 1,
			})
		}
	}
	require.Equal(t, refused, report.Refused)
	require.Equal(t, decided, simulated)
}
