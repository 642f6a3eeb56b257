package admin_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/admintest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// TestPagesOfPrices promises that pages show what the upstream of a key accepts, and at which price was reserved.
func TestPagesOfPrices(t *testing.T) {
	t.Parallel()
	f := setup(t)
	f.Put(t, rules.Rule{Limit: "upstream", Policy: ratelimit.Adaptive{Contract: ratelimit.TokenBucket{Rate: 50, Period: time.Hour}, Floor: 0.25, Apply: true}},
		rules.Rule{Limit: "watched", Policy: ratelimit.Adaptive{Contract: ratelimit.TokenBucket{Rate: 50, Period: time.Hour}}})
	r, err := f.Limiter.Reserve(t.Context(), admintest.RequestOf(t, "upstream").Cost(30).Price(2))
	require.NoError(t, err)
	page := func(limit string) string {
		return f.get(t, admintest.Address("key", "limit", limit, "key", "ada")).body
	}
	require.Contains(t, page("upstream"), `A token costs <strong data-price>1</strong>: its upstream is given 1 of the contract.`)
	require.NotContains(t, page("messages"), "data-price")
	ends := time.Now().Add(time.Hour).UTC()
	f.Exec(t, `INSERT INTO ratelimit.prices SELECT name, 'ada', 3, $1, $1, 0, 0, 0, share, true, $1 FROM (VALUES ('upstream', 0.1), ('watched', 0.4)) AS v (name, share)`,
		ends.UnixMicro())
	told := page("upstream")
	require.Contains(t, told, `A token costs <strong data-price>4</strong>: its upstream is given 0.25 of the contract.`)
	require.Contains(t, told, `data-price="4"`)
	require.Contains(t, told, ", as its upstream has asked with Retry-After")
	require.Contains(t, told, `<dd data-figure="one">when the pause ends</dd>`)
	require.Contains(t, told, "60 at a price of 2 of")
	require.Contains(t, f.get(t, admintest.Address("reservations", "state", "")).body, "60 at a price of 2 of")
	require.Contains(t, f.get(t, admintest.Address("reservation", "id", r.ID)).body, "60 at a price of 2 of")
	watched := page("watched")
	require.Contains(t, watched, `A token would cost <strong data-price>2.5</strong>: its upstream is given 0.4 of the contract, were the price charged.`)
	require.Contains(t, watched, "It would be paused until")
	require.NotContains(t, watched, `data-price="`)
	require.Contains(t, watched, `<dd data-figure="one">at once</dd>`)
}

// TestPreviewOfKinds shows the change of a rule to another kind, and says which fields are no fields of a kind.
func TestPreviewOfKinds(t *testing.T) {
	t.Parallel()
	f := setup(t)
	preview := func(fields ...string) string {
		return f.get(t, admintest.Address("preview", append([]string{"limit", "messages", "plan", ""}, fields...)...)).body
	}
	page := preview("kind", "concurrency", "more", "most: 5\nlease: 30s", "mode", "on", "on_change", "keep")
	require.Contains(t, page, `<td class="before">60 per minute, capacity 100</td><td class="after">5 at a time, leases of 30s</td>`)
	require.Contains(t, page, "What the change would do")
	f.Put(t, rules.Rule{Limit: "messages", Policy: ratelimit.PerMinute(7)})
	page = f.get(t, admintest.Address("preview", "limit", "messages", "plan", "pro", "kind", "calendar window", "rate", "3", "more", "resets: day",
		"mode", "on", "on_change", "keep")).body
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
