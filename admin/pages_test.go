package admin_test

import (
	"fmt"
	"math"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/admin"
	"github.com/pgratelimit/pgratelimit/internal/test/admintest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// figure returns a figure of the page of ada's bucket.
func (f *fixture) figure(limit, name string) string {
	f.Helper()
	page := f.page("key", "limit", limit, "key", "ada")
	figures := found(page, regexp.MustCompile(`data-figure="`+name+`">([^<]*)<`))
	require.Len(f, figures, 1, limit)
	return figures[0]
}

// preview opens the preview of a rule of 60 a minute and 100 at most, and returns its text.
func (f *fixture) preview(rate, capacity, mode string) string {
	f.Helper()
	page := f.page("preview", "limit", "messages", "plan", "", "rate", rate, "period", "1m",
		"capacity", capacity, "kind", "token bucket", "mode", mode, "on_change", "keep")
	return strings.Join(strings.Fields(page), " ")
}

// Each page shows what the tables and the limiter say.
func TestPages(t *testing.T) {
	t.Parallel()
	for name, story := range map[string]func(f *fixture){
		// The page of a paused key where the code decides: before a limit has a rule, and after its rule is deleted.
		"APauseIsNoRule": func(f *fixture) {
			for _, key := range []string{"ada", "", "deleted"} {
				f.pause(rules.Pause{Key: key})
				if key == "deleted" {
					f.Put(f, rules.Rule{Limit: "messages", Policy: ratelimit.TokenBucket{Rate: 5, Period: time.Hour}})
					_, err := f.Store.Delete(f.Context(), edit, "messages", "")
					require.NoError(f, err)
					f.Load(f)
				}
				page := f.page("key", "limit", "messages", "key", "ada")
				require.Contains(f, page, "Paused")
				require.Contains(f, page, "Decided by <bdi>the definition in the code</bdi>.", key)
				require.NotContains(f, page, "Decided by <bdi>rule")
			}
		},
		// Pages of a limit that nothing knows: neither the code, nor a table.
		"ALimitThatDoesNotExist": func(f *fixture) {
			for _, page := range []string{admintest.Address("limit", "name", "nothing"), admintest.Address("key", "limit", "nothing", "key", "ada")} {
				got := f.get(page)
				require.Equal(f, http.StatusNotFound, got.status, page)
				require.Contains(f, got.body, "No limit has this name", page)
			}
			f.page("rule", "limit", "nothing", "plan", "") // it may be made here
			f.Take(f, ratelimit.Define("elsewhere", ratelimit.PerHour(1)).For("ada"))
			f.page("limit", "name", "elsewhere") // a table has a bucket of it
			f.page("key", "limit", "elsewhere", "key", "bob")
			f.pause(rules.Pause{Limit: "paused", Key: "ada"})
			f.page("limit", "name", "paused")
		},
		"PageSaysWhenABucketGives": func(f *fixture) {
			f.Put(f, rules.Rule{Limit: "blocked", Policy: ratelimit.TokenBucket{Rate: 1, Period: time.Hour, Capacity: ratelimit.None}},
				rules.Rule{Limit: "open", Policy: ratelimit.TokenBucket{Rate: 1, Period: time.Hour, Capacity: 1}, Mode: ratelimit.Off})
			f.Exec(f, `INSERT INTO ratelimit.buckets (name, key, shard, value, ts, capacity) VALUES ('open', 'ada', 0, 0, (extract(epoch FROM now()) * 1000000)::bigint, 10)`)
			f.Take(f, logins.For("ada").Cost(10))
			for limit, want := range map[string]string{
				"messages": "now", "blocked": "never", "open": "now" /* Off refuses nobody */, "failed-logins": "min",
			} {
				require.Contains(f, f.figure(limit, "one"), want, limit)
			}
			f.pause(rules.Pause{Key: "ada"})
			require.Equal(f, "when the pause ends", f.figure("messages", "one"))
		},
		// Buckets of each kind: spread over rows, in a window, with leases, owing, off, and in shadow.
		"PageShowsWhatTheLimiterSays": func(f *fixture) {
			daily := ratelimit.TokenBucket{Rate: 5, Period: ratelimit.Day}
			f.Put(f, append(admintest.Kinds(), rules.Rule{Limit: "spread", Policy: ratelimit.TokenBucket{Rate: 1, Period: ratelimit.Day, Capacity: 64, Shards: 8}},
				rules.Rule{Limit: "windows", Policy: ratelimit.FixedWindow{Rate: 50, Period: ratelimit.Day}},
				rules.Rule{Limit: "off", Policy: daily, Mode: ratelimit.Off}, rules.Rule{Limit: "shadow", Policy: daily, Mode: ratelimit.Shadow},
				rules.Rule{Limit: "owing", Policy: daily})...)
			for _, name := range []string{"spread", "windows", "off", "shadow", "exports", "quota"} {
				f.Take(f, admintest.RequestOf(f, name).Cost(4))
			}
			require.NoError(f, f.Limiter.Charge(f.Context(), admintest.RequestOf(f, "owing").Cost(25)))
			lease, err := f.Limiter.Acquire(f.Context(), admintest.RequestOf(f, "jobs").Cost(20))
			require.NoError(f, err)
			for name, words := range map[string]string{
				"spread": "capacity 64", "windows": "50 per day", "off": "5 per day", "shadow": "5 per day", "owing": "5 per day",
				"exports": "50 in any hour", "quota": "50 per year in Europe/Berlin from April 6 on", "jobs": "50 at a time, leases of 1h",
			} {
				v := f.Value(f, admintest.RequestOf(f, name))
				page := f.page("key", "limit", name, "key", "ada")
				require.Contains(f, page, words)
				require.Contains(f, f.get("/admin/rules").body, words)
				tokens := admin.Number(math.Abs(v.Tokens))
				require.Equal(f, map[bool]string{true: "−"}[v.Tokens < 0]+tokens, f.figure(name, "tokens"), name)
				require.Equal(f, name == "jobs", strings.Contains(page, fmt.Sprintf(`data-label="Fence">%d</th><td data-label="Slots">20</td>`, lease.Fence)))
				row := tokens + ` <span class="of">`
				if name == "off" { // which takes nothing, and writes no row
					row = "No bucket has a row"
				}
				require.Contains(f, f.page("limit", "name", name), row, name)
			}
			require.NoError(f, f.Limiter.Release(f.Context(), lease.ID))
			require.NotContains(f, f.page("key", "limit", "jobs", "key", "ada"), "Who holds slots")
		},
		// A pause with a later beginning refuses no request yet. A process that has not loaded it decides
		// otherwise than the tables say, and says so.
		"PauseThatLiesAhead": func(f *fixture) {
			require.Contains(f, f.page(""), "This process has not loaded the rules yet")
			from := time.Now().Add(time.Hour)
			_, err := f.Store.Pause(f.Context(), rules.Edit{Author: "ana", Reason: "x", From: from}, rules.Pause{Limit: "messages", Until: from.Add(time.Hour)})
			require.NoError(f, err)
			f.Load(f)
			require.NotContains(f, f.page(""), "This process has not")
			for _, address := range []string{"/admin/", admintest.Address("limit", "name", "messages"), admintest.Address("key", "limit", "messages", "key", "ada")} {
				page := f.get(address).body
				require.Contains(f, page, "from "+from.UTC().Format("2006-01-02 15:04:05"), address)
				require.NotContains(f, page, `<span class="tag paused">paused</span>`, address)
			}
			require.Equal(f, "now", f.figure("messages", "one"))
		},
		// A page shows what the upstream of a key accepts, as package adaptive has it.
		"PagesOfUpstreams": func(f *fixture) {
			page := func() string { return f.page("key", "limit", "messages", "key", "ada") }
			require.NotContains(f, page(), "data-share")
			f.Exec(f, `INSERT INTO ratelimit.upstreams VALUES ('messages', 'ada', 3, $1, $1, 0, 0, 0, 0.4, true, $1)`, time.Now().Add(time.Hour).UnixMicro())
			require.Contains(f, page(), `Its upstream accepts <strong data-share>0.4</strong> of the contract.`)
			require.Contains(f, page(), "The upstream has asked for a pause until")
		},
		"SearchForLimits": func(f *fixture) {
			f.Take(f, messages.For("ada").Cost(50), messages.For("carla").Cost(90), messages.For("bob").Cost(10))
			limit := regexp.MustCompile(`<th scope="row"><a href="limit\?name=[^"]*">([^<]*)</a>`)
			require.Equal(f, []string{"failed-logins", "free-trials", "llm/tokens", "messages"}, found(f.page(""), limit))
			require.Equal(f, []string{"failed-logins"}, found(f.page("", "search", " LOG"), limit))
			require.Contains(f, f.page("", "search", "nothing"), "No limit's name contains this.")
			key := regexp.MustCompile(`<th scope="row"><a href="key\?[^"]*"><bdi class="key" dir="ltr">([^<]*)</bdi></a>`)
			require.Equal(f, []string{"ada", "bob", "carla"}, found(f.page("limit", "name", "messages"), key))
		},
		// One box finds limits and keys. The page of a key has what each limit has about it, and why it's refused.
		"SearchForALimitOrAKey": func(f *fixture) {
			for _, c := range [][2]string{
				{" messages ", "limit?name=messages"}, {"Mess", "./?search=Mess"}, {"ada", "key?key=ada"}, {"", ""},
			} {
				got := f.post("/admin/find", "typed", c[0])
				require.Equal(f, c[1], got.header.Get("Location"), c[0])
			}
			require.Equal(f, "key?key=mess", f.post("/admin/find", "typed", "mess", "as", "key").header.Get("Location"))
			require.Contains(f, f.page("", "search", "mess"), "Search for the key mess")

			require.Contains(f, f.page("key", "key", "ada"), "Nothing is stored about this key")
			f.Take(f, logins.For("ada").Cost(10), messages.For("ada").Cost(5))
			_, err := f.Limiter.Reserve(f.Context(), tokens.For("ada").Cost(9))
			require.NoError(f, err)
			_, err = f.Store.Override(f.Context(), edit, rules.Override{Limit: "messages", Key: "ada", Multiplier: 2})
			require.NoError(f, err)
			f.pause(rules.Pause{Limit: "search", Key: "ada"})
			f.Exec(f, `INSERT INTO ratelimit.refusals SELECT date_trunc('minute', now()), 'failed-logins', 'x', 'ada', false, 7, 21, 1`)
			page := f.page("key", "key", "ada")
			limit := regexp.MustCompile(`<th scope="row"><a href="key\?key=ada&amp;limit=[^"]*">([^<]*)</a>`)
			require.Equal(f, []string{"failed-logins", "llm/tokens", "messages", "search"}, found(page, limit))
			why := regexp.MustCompile(`<strong>Refused by failed-logins \(the definition in the code\)</strong>: 0[.\d]* of 10 left, ` +
				`and a request costs 3. Allowed from 2`)
			require.Regexp(f, why, page)
			require.Contains(f, page, "2 times")
			require.Contains(f, page, `<span class="tag paused">paused</span>`)
			require.Contains(f, page, `9 of <a href="key?key=ada`)
			require.Regexp(f, why, f.page("key", "limit", "failed-logins", "key", "ada"))
			require.NotContains(f, f.page("key", "limit", "messages", "key", "ada"), "<strong>Refused by")
		},
		// Charts show the allowed and refused requests of an hour, or of a day.
		"RangeOfRequests": func(f *fixture) {
			f.Exec(f, `INSERT INTO ratelimit.refusals (minute, name, route, key, shadow, refused, cost, last_us, allowed)
			SELECT date_trunc('minute', now()) - ago, 'messages', '', '', false, n, n, (extract(epoch FROM now() - ago) * 1e6)::bigint, 100 * n
			FROM (VALUES (interval '0', 2), (interval '5 hours', 30), (interval '5 hours 1 minute', 10), (interval '30 hours', 7)) AS v (ago, n)`)
			for shown, want := range map[string]struct{ allowed, refused, span string }{
				"": {"200", "2", "1 h"}, "15min": {"200", "2", "15 min"}, "1h": {"200", "2", "1 h"}, "24h": {"4,200", "42", "24 h"},
				"7d": {"4,900", "49", "7 d"},
			} {
				chart := "<strong>" + want.allowed + "</strong> allowed and <strong>" + want.refused + "</strong> refused in the last " + want.span
				page := f.page("limit", "name", "messages", "range", shown)
				require.Contains(f, page, chart)
				require.Contains(f, page, ": 200 allowed", "of the present minute")
				if shown == "1h" { // of an axis up to 300
					require.Regexp(f, `<rect class="allowed" x="(59|60)" y="33.3" width="0.8" height="66.7"/>`, page, "under the refusals")
					require.Regexp(f, `<rect x="(59|60)" y="30.3" width="0.8" height="3"/>`, page)
					require.Contains(f, page, "<span>300</span>")
				}
				require.Contains(f, f.page("", "range", shown), want.allowed+" allowed, <strong>"+want.refused+"</strong> refused")
			}
			require.Contains(f, f.page(""), `<a href="./?range=24h&amp;search=">24 h</a>`)
		},
		"PreviewSaysWhatDiffers": func(f *fixture) {
			before := f.written()
			raised := f.preview("90", "120", "on")
			require.Contains(f, raised, `<td class="before">60 per minute, capacity 100</td><td class="after">90 per minute, capacity 120</td>`)
			require.Contains(f, raised, "ratelimit simulate")
			require.Contains(f, raised, `action="put-rule"`)
			require.Contains(f, f.preview("60", "100", "on"), "Nothing changes.")
			require.Contains(f, f.preview("-1", "100", "on"), "Rate is no number from 0 up")
			require.Equal(f, before, f.written(), "a preview changes nothing")
		},
		// The form has the fields of the kind of its rule, or of the page of a kind, with their values.
		"FormOfEachKind": func(f *fixture) {
			f.Put(f, admintest.Kinds()...)
			name := regexp.MustCompile(`<(?:input|select) name="([a-z_]+)"`)
			form := func(pairs ...string) string {
				page := f.page("rule", append(pairs, "plan", "")...)
				return page[strings.Index(page, `action="preview"`):strings.Index(page, `name="mode"`)]
			}
			for limit, want := range map[string][]string{
				"messages": {"rate", "period", "capacity", "max_reserved", "shards"},
				"exports":  {"rate", "period", "slices"},
				"quota":    {"rate", "resets", "zone", "first_weekday", "first_day", "first_month", "max_reserved"},
				"jobs":     {"slots", "lease"},
			} {
				require.Equal(f, want, found(form("limit", limit), name), limit)
			}
			require.Contains(f, form("limit", "quota"), `<option selected>april</option>`)
			require.Contains(f, form("limit", "quota"), `name="zone" size="8" value="Europe/Berlin"`)
			windows := form("limit", "messages", "kind", "fixed window")
			require.Equal(f, []string{"rate", "period", "capacity", "max_reserved", "shards", "start"}, found(windows, name))
			require.Contains(f, windows, `name="rate" inputmode="decimal" size="8" value="60"`)
			require.Contains(f, windows, `<input type="hidden" name="kind" value="fixed window">`)
		},
		// The preview shows the change of a rule to another kind, and what is wrong with its fields.
		"PreviewOfKinds": func(f *fixture) {
			preview := func(fields ...string) string {
				return f.page("preview", append([]string{"limit", "messages", "plan", ""}, fields...)...)
			}
			page := preview("kind", "concurrency", "slots", "5", "lease", "30s", "mode", "on", "on_change", "keep")
			require.Contains(f, page, `<td class="before">60 per minute, capacity 100</td><td class="after">5 at a time, leases of 30s</td>`)
			require.Contains(f, page, "What the change would do")
			f.Put(f, rules.Rule{Limit: "messages", Policy: ratelimit.PerMinute(7)})
			another := []string{"limit", "messages", "plan", "pro", "kind", "calendar window", "rate", "3", "resets", "day", "mode", "on", "on_change"}
			require.Contains(f, f.page("preview", append(another, "keep")...), "it changes the kind from token bucket to calendar window; set its OnChange")
			page = f.page("preview", append(another, "reset")...)
			require.Contains(f, page, `<td class="before">7 per minute</td><td class="after">3 per day in UTC</td>`, "a plan without a rule has the one of all")
			for want, fields := range map[string][]string{
				"its Slots is 0":                          {"kind", "concurrency"},
				"Slots is no number from 0 up":            {"kind", "concurrency", "slots", "x"},
				"its Resets is not set":                   {"kind", "calendar window", "rate", "3"},
				"its Rate is 0":                           {"kind", "calendar window", "resets", "day"},
				"it has a FirstDay, which is for Monthly": {"kind", "calendar window", "rate", "3", "resets", "day", "first_day", "3"},
				"The kind is &#34;leaky bucket&#34;":      {"kind", "leaky bucket", "rate", "3"},
			} {
				require.Contains(f, preview(fields...), want, fields)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			story(setup(t))
		})
	}
}
