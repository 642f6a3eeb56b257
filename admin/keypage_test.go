package admin_test

import (
	"fmt"
	"math"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/admin"
	"github.com/pgratelimit/pgratelimit/internal/admintest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// TestChangeOfAKeyOnAPlan credits and resets a bucket that holds more than one without a plan could.
func TestChangeOfAKeyOnAPlan(t *testing.T) {
	t.Parallel()
	f := setup(t)
	f.Put(t, rules.Rule{Limit: "messages", Plan: "pro", Policy: ratelimit.TokenBucket{Rate: 1, Period: time.Hour, Capacity: 1000}})
	onPro := messages.For("ada").Plan("pro")
	f.Take(t, onPro.Cost(300))
	bucket := []string{"limit", "messages", "key", "ada"}
	with := func(pairs ...string) []string { return append(append([]string(nil), bucket...), pairs...) }
	for _, form := range [][]string{{"reset"}, {"credit", "tokens", "50"}, {"reset", "plan", "prro"}} {
		got := f.post(t, "/admin/"+form[0], with(form[1:]...)...)
		require.Equal(t, http.StatusBadRequest, got.status)
		require.Contains(t, got.body, "The form has no plan")
	}
	require.InDelta(t, 700, f.Value(t, onPro).Tokens, 1, "nothing was changed")
	f.changed(t, "credit", with("tokens", "50", "plan", "pro")...)
	require.InDelta(t, 750, f.Value(t, onPro).Tokens, 1)
	f.changed(t, "reset", with("plan", "pro")...)
	require.Equal(t, 1000.0, f.Value(t, onPro).Tokens)
	f.changed(t, "reset", with("plan", " ")...)
	require.InDelta(t, 100, f.Value(t, onPro).Tokens, 1, "which is all that a key on no plan holds")

	page := f.get(t, admintest.Address("key", "limit", "messages", "key", "ada")).body
	require.Contains(t, page, "The level is for a key without a plan")
	require.Contains(t, page, `<select name="plan" required>`)
	require.Contains(t, f.get(t, admintest.Address("limit", "name", "messages")).body, "The levels are for keys without a plan")
}

// TestAPauseIsNoRule shows the page of a paused key where the code decides: before a limit has a rule, and after its rule is deleted.
func TestAPauseIsNoRule(t *testing.T) {
	t.Parallel()
	f := setup(t)
	edit := rules.Edit{Author: "ana", Reason: "x"}
	for _, key := range []string{"ada", "", "deleted"} {
		_, err := f.Store.Pause(t.Context(), edit, rules.Pause{Limit: "messages", Key: key, Until: time.Now().Add(time.Hour)})
		require.NoError(t, err)
		if key == "deleted" {
			f.Put(t, rules.Rule{Limit: "messages", Policy: ratelimit.TokenBucket{Rate: 5, Period: time.Hour}})
			_, err := f.Store.Delete(t.Context(), edit, "messages", "")
			require.NoError(t, err)
		}
		f.Load(t)
		page := f.get(t, admintest.Address("key", "limit", "messages", "key", "ada")).body
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
	require.Equal(t, http.StatusOK, f.get(t, admintest.Address("rule", "limit", "nothing", "plan", "")).status, "it may be made here")
	f.Take(t, ratelimit.Define("elsewhere", ratelimit.PerHour(1)).For("ada"))
	require.Equal(t, http.StatusOK, f.get(t, admintest.Address("limit", "name", "elsewhere")).status, "a table has a bucket of it")
	require.Equal(t, http.StatusOK, f.get(t, admintest.Address("key", "limit", "elsewhere", "key", "bob")).status)
	_, err := f.Store.Pause(t.Context(), rules.Edit{Author: "ana", Reason: "x"}, rules.Pause{Limit: "paused", Key: "ada", Until: time.Now().Add(time.Hour)})
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, f.get(t, admintest.Address("limit", "name", "paused")).status)
}

// gives returns when the page says that the bucket of ada gives a token.
func (f *fixture) gives(t *testing.T, limit string) string {
	t.Helper()
	_, rest, found := strings.Cut(f.get(t, admintest.Address("key", "limit", limit, "key", "ada")).body, `data-figure="one">`)
	require.True(t, found)
	told, _, _ := strings.Cut(rest, "<")
	return told
}

func TestPageSaysWhenABucketGives(t *testing.T) {
	t.Parallel()
	f := setup(t)
	f.Put(t, rules.Rule{Limit: "blocked", Policy: ratelimit.TokenBucket{Rate: 1, Period: time.Hour, Capacity: ratelimit.None}},
		rules.Rule{Limit: "open", Policy: ratelimit.TokenBucket{Rate: 1, Period: time.Hour, Capacity: 1}, Mode: ratelimit.Off})
	require.Equal(t, "at once", f.gives(t, "messages"))
	require.Equal(t, "never", f.gives(t, "blocked"))
	f.Exec(t, `INSERT INTO ratelimit.buckets (name, key, shard, value, ts) VALUES ('open', 'ada', 0, 0, (extract(epoch FROM now()) * 1000000)::bigint)`)
	require.Equal(t, "at once", f.gives(t, "open"), "it refuses nobody")
	f.Take(t, logins.For("ada").Cost(10))
	require.Contains(t, f.gives(t, "failed-logins"), "min")
	_, err := f.Store.Pause(t.Context(), rules.Edit{Author: "ana", Reason: "x"}, rules.Pause{Limit: "messages", Key: "ada", Until: time.Now().Add(time.Hour)})
	require.NoError(t, err)
	f.Load(t)
	require.Equal(t, "when the pause ends", f.gives(t, "messages"))
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
		page := f.get(t, admintest.Address("key", "limit", name, "key", "ada")).body
		require.Contains(t, page, words)
		require.Contains(t, f.get(t, "/admin/rules").body, words)
		_, rest, found := strings.Cut(page, `data-figure="tokens">`)
		require.True(t, found, name)
		told, _, _ := strings.Cut(rest, "<")
		require.Equal(t, admin.Number(math.Abs(v.Tokens)), strings.TrimPrefix(told, "−"), name)
		require.Equal(t, v.Tokens < 0, strings.HasPrefix(told, "−"), name)
		require.Equal(t, name == "jobs", strings.Contains(page, fmt.Sprintf(`data-label="Fence">%d</th><td data-label="Slots">20</td>`, lease.Fence)))
		row := admin.Number(math.Abs(v.Tokens)) + ` <span class="of">`
		if name == "off" { // which takes nothing, and writes no row
			row = "No bucket has a row"
		}
		require.Contains(t, f.get(t, admintest.Address("limit", "name", name)).body, row, name)
	}
	require.Contains(t, f.get(t, admintest.Address("limit", "name", "owing")).body, "Buckets that owe tokens now")
	require.NoError(t, f.Limiter.Release(t.Context(), lease.ID))
	require.NotContains(t, f.get(t, admintest.Address("key", "limit", "jobs", "key", "ada")).body, "Who holds slots")
}

// TestPauseThatLiesAhead promises that a pause with a later beginning refuses no request yet.
func TestPauseThatLiesAhead(t *testing.T) {
	t.Parallel()
	f := setup(t)
	from := time.Now().Add(time.Hour)
	edit := rules.Edit{Author: "ana", Reason: "x", From: from}
	_, err := f.Store.Pause(t.Context(), edit, rules.Pause{Limit: "messages", Until: from.Add(time.Hour)})
	require.NoError(t, err)
	f.Load(t)
	begins := "from " + from.UTC().Format("2006-01-02 15:04:05")
	for _, page := range []string{"/admin/", admintest.Address("limit", "name", "messages"), admintest.Address("key", "limit", "messages", "key", "ada")} {
		got := f.get(t, page)
		require.Contains(t, got.body, begins, page)
		require.NotContains(t, got.body, `<span class="tag paused">paused</span>`, page)
	}
	require.Equal(t, "at once", f.gives(t, "messages"))
}

// TestProcessThatHasNotLoadedTheRules decides otherwise than the tables say, and its pages say so.
func TestProcessThatHasNotLoadedTheRules(t *testing.T) {
	t.Parallel()
	f := setup(t)
	require.Contains(t, f.get(t, "/admin/").body, "This process has not loaded the rules yet")
	f.Load(t)
	require.NotContains(t, f.get(t, "/admin/").body, "This process has not")
}
