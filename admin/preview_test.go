package admin_test

import (
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/admin"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/refusals"
	"github.com/pgratelimit/pgratelimit/rules"
)

// preview opens the preview of a rule of 60 a minute and 100 at most, and returns its text.
func (f *fixture) preview(t *testing.T, rate, capacity, mode string) string {
	t.Helper()
	page := f.page(t, "preview", "limit", "messages", "plan", "", "rate", rate, "period", "1m",
		"capacity", capacity, "kind", "token bucket", "mode", mode, "on_change", "keep")
	return strings.Join(strings.Fields(page), " ")
}

func TestPreviewSaysWhatARuleWouldHaveMeant(t *testing.T) {
	t.Parallel()
	f := setup(t)
	require.Contains(t, f.preview(t, "90", "100", "on"), "No refusals were counted")
	// Two keys, one of which was refused less than the rule gives in an hour, and refusals without a key.
	f.Exec(t, `INSERT INTO ratelimit.refusals SELECT date_trunc('minute', now()) - interval '5 minutes', 'messages', 'x', k, false, n, n, 1
		FROM (VALUES ('ada', 100000), ('bob', 40), ('', 7)) AS v (k, n)`)
	before := f.written(t)

	raised := f.preview(t, "90", "120", "on")
	require.Contains(t, raised, `<td class="before">60 per minute, capacity 100</td><td class="after">90 per minute, capacity 120</td>`)
	require.Contains(t, raised, "100,047 requests were refused")
	require.Contains(t, raised, "At most 5,657 of these tokens", "120 + 61 minutes of 90, and 40, and 7")

	require.Contains(t, f.preview(t, "30", "100", "on"), "ratelimit simulate")
	require.Contains(t, f.preview(t, "90", "50", "on"), "ratelimit simulate", "it gives less of something")
	require.NotContains(t, f.preview(t, "60", "100", "on"), "ratelimit simulate")
	require.Contains(t, f.preview(t, "60", "100", "on"), "Nothing changes.")
	require.Contains(t, f.preview(t, "60", "100", "off"), "At most 100,047 of these tokens", "it would refuse nobody")
	require.Contains(t, f.preview(t, "-1", "100", "on"), "Rate is no number from 0 up")
	require.Equal(t, before, f.written(t), "a preview changes nothing")
	require.Contains(t, f.preview(t, "90", "120", "on"), `action="put-rule"`)
}

// TestPreviewOfKinds shows the change of a rule to another kind, and says which fields are no fields of a kind.
func TestPreviewOfKinds(t *testing.T) {
	t.Parallel()
	f := setup(t)
	preview := func(fields ...string) string {
		return f.page(t, "preview", append([]string{"limit", "messages", "plan", ""}, fields...)...)
	}
	page := preview("kind", "concurrency", "more", "most: 5\nlease: 30s", "mode", "on", "on_change", "keep")
	require.Contains(t, page, `<td class="before">60 per minute, capacity 100</td><td class="after">5 at a time, leases of 30s</td>`)
	require.Contains(t, page, "What the change would do")
	f.Put(t, rules.Rule{Limit: "messages", Policy: ratelimit.PerMinute(7)})
	page = f.page(t, "preview", "limit", "messages", "plan", "pro", "kind", "calendar window", "rate", "3", "more", "resets: day",
		"mode", "on", "on_change", "keep")
	require.Contains(t, page, `<td class="before">7 per minute</td><td class="after">3 per day in UTC</td>`, "a plan without a rule has the one of all")
	for want, fields := range map[string][]string{
		"&#34;rate&#34; is no field of a concurrency": {"kind", "concurrency", "more", "most: 5", "rate", "3"},
		"its Most is 0":                                       {"kind", "concurrency"},
		"&#34;most&#34; is &#34;x&#34;; write":                {"kind", "concurrency", "more", "most: x"},
		"its Resets is not set":                               {"kind", "calendar window", "rate", "3"},
		"its Rate is 0":                                       {"kind", "calendar window", "more", "resets: day"},
		"&#34;capacity&#34; is no field of a sliding window":  {"kind", "sliding window", "rate", "3", "period", "1h", "capacity", "3"},
		"it has a FirstDay, which is for Monthly":             {"kind", "calendar window", "rate", "3", "more", "resets: day\nfirst_day: 3"},
		"&#34;rate&#34; is there twice":                       {"rate", "3", "period", "1h", "more", "rate: 4"},
		"Mode, unit and description have fields of their own": {"rate", "3", "period", "1h", "more", "mode: off"},
		"anchors, aliases and tags are not read":              {"rate", "3", "period", "1h", "more", "shards: &a 4"},
	} {
		require.Contains(t, preview(fields...), want, fields)
	}
}

// TestPreviewOfMoreThanItLooksAt says from when on it counts.
func TestPreviewOfMoreThanItLooksAt(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "writes 120,000 rows")
	f := setup(t)
	f.Exec(t, `INSERT INTO ratelimit.refusals SELECT date_trunc('minute', now()) - m * interval '1 minute', 'messages', 'x', 'user-' || i, false, 1, 1, 1
		FROM generate_series(1, 3) AS m, generate_series(1, 40000) AS i`)
	page := f.preview(t, "90", "120", "on")
	require.Contains(t, page, "80,000 requests were refused")
	require.Contains(t, page, "There are more refusals than a page reads: counted from 2")
}

// TestAtMostIsABound plays an hour under a rule and under a larger one: of what the first refused, no more than the bound
// goes through under the second.
func TestAtMostIsABound(t *testing.T) {
	t.Parallel()
	for seed := range testsize.Of[uint64](60, 150) {
		random := rand.New(rand.NewPCG(seed, 1))
		rate := 1 + random.Float64()*20
		most := rate * (0.5 + random.Float64())
		rule := func(rate, capacity float64) rules.Rule {
			var policy ratelimit.Policy = ratelimit.TokenBucket{Rate: rate, Period: time.Minute, Capacity: capacity}
			switch {
			case seed%3 == 0:
				policy = ratelimit.FixedWindow{Rate: rate, Period: time.Minute, Capacity: capacity}
			case seed%6 == 1:
				policy = ratelimit.SlidingWindow{Rate: rate, Period: time.Minute}
			}
			return rules.Rule{Limit: "a", Policy: policy}
		}
		before, after := rule(rate, most), rule(rate*(1+random.Float64()*2), most*(1+random.Float64()*2))
		if seed%6 == 1 {
			most = rate
		}
		now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
		old, larger := fullOf(t, before, now), fullOf(t, after, now)
		refused, wouldPass := 0.0, 0.0
		for at := now; at.Before(now.Add(time.Hour)); at = at.Add(time.Duration(random.ExpFloat64() * float64(5*time.Second))) {
			cost := 1 + random.Float64()*4*float64(seed%2)
			cost = min(cost, most)
			var d, e ratelimit.Decision
			old, d = old.Take(at, cost)
			larger, e = larger.Take(at, cost)
			if !d.Allowed {
				refused += cost
				if e.Allowed {
					wouldPass += cost
				}
			}
		}
		bound := admin.AtMost(before, after, refused, []refusals.Sum{{Key: "ada", Cost: refused}})
		require.LessOrEqual(t, wouldPass, bound+1e-6, "seed %d", seed)
		require.LessOrEqual(t, bound, refused)
	}
}

func fullOf(t *testing.T, r rules.Rule, now time.Time) ratelimit.Value {
	t.Helper()
	limit, err := r.AsLimit()
	require.NoError(t, err)
	return limit.For("ada").Full(now)
}
