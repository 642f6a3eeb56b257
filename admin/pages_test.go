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
	"github.com/pgratelimit/pgratelimit/internal/admintest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// figure returns a figure of the page of ada's bucket.
func (f *fixture) figure(t *testing.T, limit, name string) string {
	t.Helper()
	page := f.page(t, "key", "limit", limit, "key", "ada")
	figures := found(page, regexp.MustCompile(`data-figure="`+name+`">([^<]*)<`))
	require.Len(t, figures, 1, limit)
	return figures[0]
}

// TestAPauseIsNoRule shows the page of a paused key where the code decides: before a limit has a rule, and after its rule is deleted.
func TestAPauseIsNoRule(t *testing.T) {
	t.Parallel()
	f := setup(t)
	for _, key := range []string{"ada", "", "deleted"} {
		f.pause(t, rules.Pause{Key: key})
		if key == "deleted" {
			f.Put(t, rules.Rule{Limit: "messages", Policy: ratelimit.TokenBucket{Rate: 5, Period: time.Hour}})
			_, err := f.Store.Delete(t.Context(), edit, "messages", "")
			require.NoError(t, err)
			f.Load(t)
		}
		page := f.page(t, "key", "limit", "messages", "key", "ada")
		require.Contains(t, page, "Paused")
		require.Contains(t, page, "Decided by <bdi>the definition in the code</bdi>.", key)
		require.NotContains(t, page, "Decided by <bdi>rule")
	}
}

// TestALimitThatDoesNotExist asks for pages of a limit that nothing knows: neither the code, nor a table.
func TestALimitThatDoesNotExist(t *testing.T) {
	t.Parallel()
	f := setup(t)
	for _, page := range []string{admintest.Address("limit", "name", "nothing"), admintest.Address("key", "limit", "nothing", "key", "ada")} {
		got := f.get(t, page)
		require.Equal(t, http.StatusNotFound, got.status, page)
		require.Contains(t, got.body, "No limit has this name", page)
	}
	f.page(t, "rule", "limit", "nothing", "plan", "") // it may be made here
	f.Take(t, ratelimit.Define("elsewhere", ratelimit.PerHour(1)).For("ada"))
	f.page(t, "limit", "name", "elsewhere") // a table has a bucket of it
	f.page(t, "key", "limit", "elsewhere", "key", "bob")
	f.pause(t, rules.Pause{Limit: "paused", Key: "ada"})
	f.page(t, "limit", "name", "paused")
}

func TestPageSaysWhenABucketGives(t *testing.T) {
	t.Parallel()
	f := setup(t)
	f.Put(t, rules.Rule{Limit: "blocked", Policy: ratelimit.TokenBucket{Rate: 1, Period: time.Hour, Capacity: ratelimit.None}},
		rules.Rule{Limit: "open", Policy: ratelimit.TokenBucket{Rate: 1, Period: time.Hour, Capacity: 1}, Mode: ratelimit.Off})
	f.Exec(t, `INSERT INTO ratelimit.buckets (name, key, shard, value, ts) VALUES ('open', 'ada', 0, 0, (extract(epoch FROM now()) * 1000000)::bigint)`)
	f.Take(t, logins.For("ada").Cost(10))
	for limit, want := range map[string]string{
		"messages": "at once", "blocked": "never", "open": "at once" /* Off refuses nobody */, "failed-logins": "min",
	} {
		require.Contains(t, f.figure(t, limit, "one"), want, limit)
	}
	f.pause(t, rules.Pause{Key: "ada"})
	require.Equal(t, "when the pause ends", f.figure(t, "messages", "one"))
}

// TestPageShowsWhatTheLimiterSays of buckets of each kind: spread over rows, in a window, with leases, owing, off, and in shadow.
func TestPageShowsWhatTheLimiterSays(t *testing.T) {
	t.Parallel()
	f := setup(t)
	daily := ratelimit.TokenBucket{Rate: 5, Period: ratelimit.Day}
	f.Put(t, append(admintest.Kinds(), rules.Rule{Limit: "spread", Policy: ratelimit.TokenBucket{Rate: 1, Period: ratelimit.Day, Capacity: 64, Shards: 8}},
		rules.Rule{Limit: "windows", Policy: ratelimit.FixedWindow{Rate: 50, Period: ratelimit.Day}},
		rules.Rule{Limit: "off", Policy: daily, Mode: ratelimit.Off}, rules.Rule{Limit: "shadow", Policy: daily, Mode: ratelimit.Shadow},
		rules.Rule{Limit: "owing", Policy: daily})...)
	for _, name := range []string{"spread", "windows", "off", "shadow", "exports", "quota"} {
		f.Take(t, admintest.RequestOf(t, name).Cost(4))
	}
	require.NoError(t, f.Limiter.Charge(t.Context(), admintest.RequestOf(t, "owing").Cost(25)))
	lease, err := f.Limiter.Acquire(t.Context(), admintest.RequestOf(t, "jobs").Cost(20))
	require.NoError(t, err)
	for name, words := range map[string]string{
		"spread": "capacity 64", "windows": "50 per day", "off": "5 per day", "shadow": "5 per day", "owing": "5 per day",
		"exports": "50 in any hour", "quota": "50 per year in Europe/Berlin from April 6 on", "jobs": "50 at a time, leases of 1h",
	} {
		v := f.Value(t, admintest.RequestOf(t, name))
		page := f.page(t, "key", "limit", name, "key", "ada")
		require.Contains(t, page, words)
		require.Contains(t, f.get(t, "/admin/rules").body, words)
		tokens := admin.Number(math.Abs(v.Tokens))
		require.Equal(t, map[bool]string{true: "−"}[v.Tokens < 0]+tokens, f.figure(t, name, "tokens"), name)
		require.Equal(t, name == "jobs", strings.Contains(page, fmt.Sprintf(`data-label="Fence">%d</th><td data-label="Slots">20</td>`, lease.Fence)))
		row := tokens + ` <span class="of">`
		if name == "off" { // which takes nothing, and writes no row
			row = "No bucket has a row"
		}
		require.Contains(t, f.page(t, "limit", "name", name), row, name)
	}
	require.Contains(t, f.page(t, "limit", "name", "owing"), "Buckets that owe tokens now")
	require.NoError(t, f.Limiter.Release(t.Context(), lease.ID))
	require.NotContains(t, f.page(t, "key", "limit", "jobs", "key", "ada"), "Who holds slots")
}

// TestPauseThatLiesAhead promises that a pause with a later beginning refuses no request yet. A process that has not loaded it decides
// otherwise than the tables say, and says so.
func TestPauseThatLiesAhead(t *testing.T) {
	t.Parallel()
	f := setup(t)
	require.Contains(t, f.page(t, ""), "This process has not loaded the rules yet")
	from := time.Now().Add(time.Hour)
	_, err := f.Store.Pause(t.Context(), rules.Edit{Author: "ana", Reason: "x", From: from}, rules.Pause{Limit: "messages", Until: from.Add(time.Hour)})
	require.NoError(t, err)
	f.Load(t)
	require.NotContains(t, f.page(t, ""), "This process has not")
	for _, address := range []string{"/admin/", admintest.Address("limit", "name", "messages"), admintest.Address("key", "limit", "messages", "key", "ada")} {
		page := f.get(t, address).body
		require.Contains(t, page, "from "+from.UTC().Format("2006-01-02 15:04:05"), address)
		require.NotContains(t, page, `<span class="tag paused">paused</span>`, address)
	}
	require.Equal(t, "at once", f.figure(t, "messages", "one"))
}

// TestPagesOfPrices promises that pages show what the upstream of a key accepts, and at which price was reserved.
func TestPagesOfPrices(t *testing.T) {
	t.Parallel()
	f := setup(t)
	f.Put(t, rules.Rule{Limit: "upstream", Policy: ratelimit.Adaptive{Contract: ratelimit.TokenBucket{Rate: 50, Period: time.Hour}, Floor: 0.25, Apply: true}},
		rules.Rule{Limit: "watched", Policy: ratelimit.Adaptive{Contract: ratelimit.TokenBucket{Rate: 50, Period: time.Hour}}})
	r, err := f.Limiter.Reserve(t.Context(), admintest.RequestOf(t, "upstream").Cost(30).Price(2))
	require.NoError(t, err)
	page := func(limit string) string { return f.page(t, "key", "limit", limit, "key", "ada") }
	require.Contains(t, page("upstream"), `A token costs <strong data-price>1</strong>: its upstream is given 1 of the contract.`)
	require.NotContains(t, page("messages"), "data-price")
	f.Exec(t, `INSERT INTO ratelimit.prices SELECT name, 'ada', 3, $1, $1, 0, 0, 0, share, true, $1 FROM (VALUES ('upstream', 0.1), ('watched', 0.4)) AS v (name, share)`,
		time.Now().Add(time.Hour).UnixMicro())
	told := page("upstream")
	require.Contains(t, told, `A token costs <strong data-price>4</strong>: its upstream is given 0.25 of the contract.`)
	require.Contains(t, told, `data-price="4"`)
	require.Contains(t, told, ", as its upstream has asked with Retry-After")
	require.Contains(t, told, `<dd data-figure="one">when the pause ends</dd>`)
	for _, page := range []string{told, f.page(t, "reservations", "state", ""), f.page(t, "reservation", "id", r.ID)} {
		require.Contains(t, page, "60 at a price of 2 of")
	}
	watched := page("watched")
	require.Contains(t, watched, `A token would cost <strong data-price>2.5</strong>: its upstream is given 0.4 of the contract, were the price charged.`)
	require.Contains(t, watched, "It would be paused until")
	require.NotContains(t, watched, `data-price="`)
	require.Contains(t, watched, `<dd data-figure="one">at once</dd>`)
}

func TestSearchAndOrder(t *testing.T) {
	t.Parallel()
	f := setup(t)
	f.Take(t, messages.For("ada").Cost(50), messages.For("carla").Cost(90), messages.For("bob").Cost(10))
	limit := regexp.MustCompile(`<th scope="row"><a href="limit\?name=[^"]*">([^<]*)</a>`)
	require.Equal(t, []string{"failed-logins", "free-trials", "llm/tokens", "messages"}, found(f.page(t, ""), limit))
	require.Equal(t, []string{"failed-logins"}, found(f.page(t, "", "search", " LOG"), limit))
	require.Contains(t, f.page(t, "", "search", "nothing"), "No name of a limit contains this.")
	key := regexp.MustCompile(`<th scope="row"><a href="key\?[^"]*"><bdi class="key" dir="ltr">([^<]*)</bdi></a>`)
	for order, want := range map[string][]string{
		"": {"ada", "bob", "carla"}, "key": {"ada", "bob", "carla"}, "level": {"carla", "ada", "bob"}, "last change": {"bob", "carla", "ada"}, "size": {"ada", "bob", "carla"},
	} {
		require.Equal(t, want, found(f.page(t, "limit", "name", "messages", "sort", order), key), order)
	}
}

// TestRangeOfRequests promises that charts show the allowed and refused requests of an hour, or of a day.
func TestRangeOfRequests(t *testing.T) {
	t.Parallel()
	f := setup(t)
	f.Exec(t, `INSERT INTO ratelimit.refusals (minute, name, route, key, shadow, refused, cost, last_us, allowed)
		SELECT date_trunc('minute', now()) - ago, 'messages', '', '', false, n, n, (extract(epoch FROM now() - ago) * 1e6)::bigint, 100 * n
		FROM (VALUES (interval '0', 2), (interval '5 hours', 30), (interval '5 hours 1 minute', 10), (interval '30 hours', 7)) AS v (ago, n)`)
	for shown, want := range map[string]struct{ allowed, refused, span string }{
		"": {"200", "2", "hour"}, "hour": {"200", "2", "hour"}, "day": {"4,200", "42", "day"},
	} {
		chart := "<strong>" + want.allowed + "</strong> allowed and <strong>" + want.refused + "</strong> refused in the last " + want.span
		page := f.page(t, "limit", "name", "messages", "range", shown)
		require.Contains(t, page, chart)
		require.Contains(t, page, ": 200 allowed</title>", "of the present minute")
		if shown == "hour" {
			require.Regexp(t, `<rect class="allowed" x="(59|60)" y="3" width="0.8" height="97">`, page, "under the refusals")
			require.Regexp(t, `<rect x="(59|60)" y="0" width="0.8" height="3">`, page)
		}
		require.Contains(t, f.page(t, "", "range", shown), want.allowed+" allowed, <strong>"+want.refused+"</strong> refused")
	}
	require.Contains(t, f.page(t, ""), `<a href="./?range=day&amp;search=">day</a>`)
}
