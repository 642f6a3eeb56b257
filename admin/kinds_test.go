package admin_test

import (
	"fmt"
	"html"
	"math"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/admin"
	"github.com/pgratelimit/pgratelimit/internal/admintest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// kindsOf are rules of kinds that do not fill steadily.
func kindsOf() []rules.Rule {
	return []rules.Rule{
		{Limit: "exports", Policy: ratelimit.SlidingWindow{Rate: 50, Period: time.Hour, Slices: 12}},
		{Limit: "quota", Policy: ratelimit.CalendarWindow{Rate: 50, Resets: ratelimit.Yearly, Zone: "Europe/Berlin", FirstMonth: time.April, FirstDay: 6}},
		{Limit: "jobs", Policy: ratelimit.Concurrency{Most: 50, Lease: time.Hour}},
	}
}

func requestOf(t *testing.T, name string) ratelimit.Request {
	t.Helper()
	limit, err := ratelimit.NewLimit(name, ratelimit.PerDay(1))
	require.NoError(t, err)
	return limit.For("ada")
}

// TestPagesOfKinds promises that pages show the level of each kind as the Limiter says it, in words that fit the kind.
func TestPagesOfKinds(t *testing.T) {
	t.Parallel()
	f := setup(t)
	f.put(t, kindsOf()...)
	f.Take(t, requestOf(t, "exports").Cost(20), requestOf(t, "quota").Cost(20))
	lease, err := f.Limiter.Acquire(t.Context(), requestOf(t, "jobs").Cost(20))
	require.NoError(t, err)
	for name, words := range map[string]string{
		"exports": "50 in any hour", "quota": "50 per year in Europe/Berlin from April 6 on", "jobs": "50 at a time, leases of 1h",
	} {
		page := f.get(t, admintest.Address("key", "limit", name, "key", "ada"))
		require.Equal(t, http.StatusOK, page.status)
		require.Contains(t, page.body, words)
		_, rest, found := strings.Cut(page.body, `data-figure="tokens">`)
		require.True(t, found, name)
		told, _, _ := strings.Cut(rest, "<")
		require.Equal(t, admin.Number(math.Abs(f.value(t, requestOf(t, name)).Tokens)), told, name)
		require.Equal(t, "30", told, name)
		require.Equal(t, name == "jobs", strings.Contains(page.body, fmt.Sprintf(`<th scope="row" data-label="Fence">%d</th><td data-label="Slots">20</td>`, lease.Fence)), "who holds slots")
		require.Contains(t, f.get(t, admintest.Address("limit", "name", name)).body, `30 <span class="of">`, name)
		require.Contains(t, f.get(t, "/admin/rules").body, words)
	}
	require.NoError(t, f.Limiter.Release(t.Context(), lease.ID))
	require.NotContains(t, f.get(t, admintest.Address("key", "limit", "jobs", "key", "ada")).body, "Who holds slots")
}

// TestPagesOfPrices promises that pages show what the upstream of a key accepts, and at which price was reserved.
func TestPagesOfPrices(t *testing.T) {
	t.Parallel()
	f := setup(t)
	f.put(t, rules.Rule{Limit: "upstream", Policy: ratelimit.Adaptive{Contract: ratelimit.TokenBucket{Rate: 50, Period: time.Hour}, Floor: 0.25, Apply: true}},
		rules.Rule{Limit: "watched", Policy: ratelimit.Adaptive{Contract: ratelimit.TokenBucket{Rate: 50, Period: time.Hour}}})
	r, err := f.Limiter.Reserve(t.Context(), requestOf(t, "upstream").Cost(30).Price(2))
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

// TestRulesOfKindsAreEdited promises that the form of a rule says all that the rule does, so that it is stored again as it was.
func TestRulesOfKindsAreEdited(t *testing.T) {
	t.Parallel()
	f := setup(t)
	stated := append(kindsOf(),
		rules.Rule{Limit: "weekly", Policy: ratelimit.CalendarWindow{Rate: 5, Resets: ratelimit.Weekly, Zone: "UTC", FirstWeekday: time.Saturday, MaxReserved: 1}},
		rules.Rule{Limit: "upstream", Policy: ratelimit.Adaptive{Contract: ratelimit.FixedWindow{Rate: 50, Period: time.Minute}, Floor: 0.2, Growth: 0.05, Epoch: 1500 * time.Millisecond, Apply: true}})
	f.put(t, stated...)
	for _, r := range stated {
		fields := fieldsOf(t, f.get(t, admintest.Address("rule", "limit", r.Limit, "plan", "")).body)
		preview := f.get(t, admintest.Address("preview", fields...))
		require.Contains(t, strings.Join(strings.Fields(preview.body), " "), "Nothing changes.", r.Limit)
		before := f.stored(t, r.Limit)
		version := regexp.MustCompile(`name="version" value="([^"]*)"`).FindStringSubmatch(preview.body)
		require.NotNil(t, version)
		f.changed(t, "put-rule", append(fields, "version", version[1], "reason", "again")...)
		after := f.stored(t, r.Limit)
		require.Greater(t, after.Version, before.Version)
		require.Equal(t, before.Rule, after.Rule)
	}
	page := f.get(t, admintest.Address("preview", "limit", "messages", "plan", "", "kind", "concurrency", "more", "most: 5\nlease: 30s",
		"mode", "on", "on_change", "keep")).body
	for _, want := range []string{`<td class="before">60 per minute, capacity 100</td><td class="after">5 at a time, leases of 30s</td>`, "What the change would do"} {
		require.Contains(t, page, want)
	}
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
		got := f.get(t, admintest.Address("preview", append([]string{"limit", "messages", "plan", ""}, fields...)...)).body
		require.Contains(t, got, want, fields)
	}
}

var (
	fields = regexp.MustCompile(`<input ([^>]*)>|(?s)<select name="([^"]*)">(.*?)</select>|<textarea name="([^"]*)"[^>]*>(.*?)</textarea>`)
	option = regexp.MustCompile(`<option(?: value="([^"]*)")?( selected)?>([^<]*)</option>`)
	named  = regexp.MustCompile(`name="([^"]*)"`)
	valued = regexp.MustCompile(`value="([^"]*)"`)
)

// fieldsOf returns what the form of a rule says, as a browser would send it.
func fieldsOf(t *testing.T, page string) (pairs []string) {
	t.Helper()
	_, form, found := strings.Cut(page, `class="rule">`)
	require.True(t, found)
	form, _, _ = strings.Cut(form, "</form>")
	for _, field := range fields.FindAllStringSubmatch(form, -1) {
		name, value := field[2], ""
		if field[1] != "" {
			name = named.FindStringSubmatch(field[1])[1]
			if said := valued.FindStringSubmatch(field[1]); said != nil {
				value = said[1]
			}
		}
		for i, o := range option.FindAllStringSubmatch(field[3], -1) {
			if i == 0 || o[2] != "" {
				value = o[1]
				if !strings.Contains(o[0], "value=") {
					value = o[3]
				}
			}
		}
		if field[4] != "" {
			name, value = field[4], field[5]
		}
		pairs = append(pairs, name, html.UnescapeString(value))
	}
	return pairs
}

// stored returns the rule of a limit.
func (f *fixture) stored(t *testing.T, limit string) rules.Statement {
	t.Helper()
	list, err := f.Store.List(t.Context(), rules.ListQuery{Limit: limit})
	require.NoError(t, err)
	require.NotEmpty(t, list.Rules)
	return list.Rules[len(list.Rules)-1]
}
