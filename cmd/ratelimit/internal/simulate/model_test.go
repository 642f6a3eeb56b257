package simulate_test

import (
	"fmt"
	"math/big"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/cmd/ratelimit/internal/simulate"
)

// TestRunAgreesWithAModel holds a replay to what docs/cli.md says, written down once more in fractions that round nothing:
// several limits of a call, all or nothing, plans, overrides with an end, limits on trial and out of use, and costs.
func TestRunAgreesWithAModel(t *testing.T) {
	t.Parallel()
	began := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	until := began.Add(10*time.Minute + 7*time.Second)
	m := &model{buckets: make(map[[2]string]*modelBucket)}
	config := simulate.Config{Rules: document(t, fmt.Sprintf(`
match: all
rules:
  - {limit: user, rate: 7, period: minute, capacity: 5}
  - {limit: user, plan: pro, rate: 21, period: minute, capacity: 15}
  - {limit: window, rate: 11, period: 50s, capacity: 14, kind: fixed window, start: %[1]s}
  - {limit: trial, rate: 3, period: minute, capacity: 4, mode: shadow}
  - {limit: unused, rate: 1, period: hour, mode: off}
  - {limit: site, rate: 13, period: 7s, capacity: 29}
overrides:
  - {limit: user, key: u0, multiplier: 3, until: %[2]s}
tiers:
  - {limit: user, key: "{user}", cost_source: "query:n"}
  - {limit: window, key: "{address}", route: GET /search, cost_source: "query:n"}
  - {limit: trial, key: "{user}"}
  - {limit: unused}
  - {limit: site, cost_source: "query:n"}
`, began.Format(time.RFC3339), until.Format(time.RFC3339)))}
	var got []string
	config.Refused = func(r simulate.Refusal) error {
		got = append(got, fmt.Sprintf("%d %s %s %v", r.Line, r.Limit, r.Key, r.Shadow))
		return nil
	}

	random := rand.New(rand.NewPCG(7, 8))
	var text, want []string
	at := began
	for line := range 10_000 {
		if random.IntN(3) == 0 {
			at = at.Add(time.Duration(random.IntN(3_000_000)) * time.Microsecond)
		}
		when := at
		if random.IntN(10) == 0 { // a line that steps back
			when = when.Add(-time.Duration(random.IntN(3)) * time.Second)
		}
		user, address := fmt.Sprint("u", random.IntN(6)), fmt.Sprint("10.0.0.", random.IntN(4))
		plan, path, cost := [...]string{"", "pro"}[random.IntN(2)], [...]string{"/search", "/other"}[random.IntN(2)], 1+random.IntN(8)
		if random.IntN(5) > 0 {
			cost = 1 + random.IntN(2)
		}
		text = append(text, fmt.Sprintf(`{"ts":%q,"user":%q,"plan":%q,"ip":%q,"method":"GET","path":"%s?n=%d.5"}`,
			when.Format(time.RFC3339Nano), user, plan, address, path, cost))
		paid := new(big.Rat).Add(big.NewRat(int64(cost), 1), big.NewRat(1, 2))
		multiple := int64(1)
		if plan == "pro" {
			multiple = 3
		}
		asks := []modelAsk{
			{limit: "user", key: user, cost: paid, terms: modelTerms{7 * multiple, time.Minute, 5 * multiple, false}},
			{limit: "trial", key: user, cost: big.NewRat(1, 1), terms: modelTerms{3, time.Minute, 4, false}, shadow: true},
			{limit: "site", cost: paid, terms: modelTerms{13, 7 * time.Second, 29, false}},
		}
		if user == "u0" { // 3 times what would be without it
			asks[0].after, asks[0].until = asks[0].terms, until
			asks[0].terms = modelTerms{21 * multiple, time.Minute, 15 * multiple, false}
		}
		if path == "/search" {
			asks = slices.Insert(asks, 1, modelAsk{limit: "window", key: address, cost: paid, terms: modelTerms{11, 50 * time.Second, 14, true}})
		}
		if slices.ContainsFunc(asks, func(a modelAsk) bool { return a.cost.Cmp(big.NewRat(a.holding(when).capacity, 1)) > 0 }) {
			continue // counted as Failed
		}
		for _, refused := range m.take(began, when, asks) {
			want = append(want, fmt.Sprintf("%d %s", line+1, refused))
		}
	}
	report := run(t, config, lines(text...))
	for i := range min(len(want), len(got)) {
		require.Equal(t, want[i], got[i])
	}
	require.Len(t, got, len(want))
	require.Greater(t, report.Refused, int64(1000))
	require.Greater(t, report.Admitted, int64(1000))
	for _, name := range []string{"user", "window", "trial", "site"} {
		require.True(t, slices.ContainsFunc(want, func(s string) bool { return strings.Contains(s, " "+name+" ") }), name)
	}
}

// modelTerms are those of a token bucket, or of a fixed window.
type modelTerms struct {
	rate     int64
	period   time.Duration
	capacity int64
	window   bool
}

// modelAsk is what a line asks of a bucket: under terms, and from until on under others.
type modelAsk struct {
	limit, key   string
	cost         *big.Rat
	terms, after modelTerms
	until        time.Time
	shadow       bool
}

// holding returns the terms at an instant.
func (a *modelAsk) holding(at time.Time) modelTerms {
	if !a.until.IsZero() && !at.Before(a.until) {
		return a.after
	}
	return a.terms
}

// modelBucket is what a bucket held at an instant.
type modelBucket struct {
	value *big.Rat
	at    time.Time
}

type model struct{ buckets map[[2]string]*modelBucket }

// take takes all or nothing, and returns what refused. What is on trial refuses nobody, and gives nothing where it has too little.
func (m *model) take(began, at time.Time, asks []modelAsk) (refused []string) {
	after := make([]*modelBucket, len(asks))
	admitted := true
	for i := range asks {
		a := &asks[i]
		b := m.buckets[[2]string{a.limit, a.key}]
		if b == nil {
			b = &modelBucket{big.NewRat(a.holding(at).capacity, 1), at}
			if a.terms.window {
				b.at = began.Add(at.Sub(began).Truncate(a.terms.period))
			}
		}
		now := at
		if now.Before(b.at) {
			now = b.at
		}
		value := b.value
		from := b.at
		if !a.until.IsZero() && from.Before(a.until) && !now.Before(a.until) {
			value, from = a.terms.grown(began, value, from, a.until), a.until
		}
		terms := a.holding(now)
		value = new(big.Rat).Sub(terms.grown(began, value, from, now), a.cost)
		if terms.window {
			now = began.Add(floor(now.Sub(began), terms.period) * terms.period)
		}
		if value.Sign() < 0 {
			refused = append(refused, fmt.Sprintf("%s %s %v", a.limit, a.key, a.shadow))
			admitted = admitted && a.shadow
			continue
		}
		after[i] = &modelBucket{value, now}
	}
	if admitted {
		for i, b := range after {
			if b != nil {
				m.buckets[[2]string{asks[i].limit, asks[i].key}] = b
			}
		}
	}
	return refused
}

// grown returns what there is at an instant of a value from an earlier one.
func (t modelTerms) grown(began time.Time, value *big.Rat, from, to time.Time) *big.Rat {
	arrived := big.NewRat(t.rate*int64(to.Sub(from)), int64(t.period))
	if t.window {
		arrived = big.NewRat(t.rate*int64(floor(to.Sub(began), t.period)-floor(from.Sub(began), t.period)), 1)
	}
	sum := arrived.Add(arrived, value)
	if full := big.NewRat(t.capacity, 1); sum.Cmp(full) > 0 {
		return full
	}
	return sum
}

func floor(d, by time.Duration) time.Duration {
	n := d / by
	if d%by < 0 {
		n--
	}
	return n
}
