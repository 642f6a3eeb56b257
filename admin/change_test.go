package admin_test

import (
	"fmt"
	"math"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/admintest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// changed sends a form, follows it to its page, and returns that.
func (f *fixture) changed(t *testing.T, name string, pairs ...string) string {
	t.Helper()
	got := f.post(t, "/admin/"+name, pairs...)
	require.Equal(t, http.StatusSeeOther, got.status, got.body)
	page := f.get(t, "/admin/"+got.header.Get("Location"))
	require.Equal(t, http.StatusOK, page.status)
	require.Contains(t, page.body, `role="status"`)
	f.Load(t)
	return page.body
}

func TestBucketIsResetAndCredited(t *testing.T) {
	t.Parallel()
	for name, secret := range map[string][]byte{"Plain": nil, "Hashed": []byte("0123456789abcdef")} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setup(t, func(c *ratelimit.Config) { c.HashKey = secret })
			f.Take(t, logins.For("ada").Cost(10))
			found := f.post(t, "/admin/find", "limit", "failed-logins", "typed", "ada")
			require.Equal(t, http.StatusSeeOther, found.status)
			key, err := f.Limiter.StoredKey(logins.For("ada"))
			require.NoError(t, err)
			require.Equal(t, "key?"+admintest.Values("limit", "failed-logins", "key", key).Encode(), found.header.Get("Location"))

			f.changed(t, "credit", "limit", "failed-logins", "key", key, "tokens", "4")
			require.InDelta(t, 4, f.Value(t, logins.For("ada")).Tokens, 0.1)
			f.changed(t, "reset", "limit", "failed-logins", "key", key)
			require.Equal(t, 10.0, f.Value(t, logins.For("ada")).Tokens)
			require.Contains(t, f.log.String(), `author="Ana <ana@example.com>"`)
			require.NotContains(t, f.log.String(), "ada\n")
			require.NotContains(t, f.log.String(), key)
		})
	}
}

// TestChangeOfAKeyOnAPlan credits and resets a bucket that holds more than one without a plan could.
func TestChangeOfAKeyOnAPlan(t *testing.T) {
	t.Parallel()
	f := setup(t)
	f.Put(t, rules.Rule{Limit: "messages", Plan: "pro", Policy: ratelimit.TokenBucket{Rate: 1, Period: time.Hour, Capacity: 1000}})
	onPro := messages.For("ada").Plan("pro")
	f.Take(t, onPro.Cost(300))
	for _, form := range [][]string{{"reset"}, {"credit", "tokens", "50"}, {"reset", "plan", "prro"}} {
		got := f.post(t, "/admin/"+form[0], ada(form[1:]...)...)
		require.Equal(t, http.StatusBadRequest, got.status)
		require.Contains(t, got.body, "The form has no plan")
	}
	require.InDelta(t, 700, f.Value(t, onPro).Tokens, 1, "nothing was changed")
	f.changed(t, "credit", ada("tokens", "50", "plan", "pro")...)
	require.InDelta(t, 750, f.Value(t, onPro).Tokens, 1)
	f.changed(t, "reset", ada("plan", "pro")...)
	require.Equal(t, 1000.0, f.Value(t, onPro).Tokens)
	f.changed(t, "reset", ada("plan", " ")...)
	require.InDelta(t, 100, f.Value(t, onPro).Tokens, 1, "which is all that a key on no plan holds")

	page := f.page(t, "key", "limit", "messages", "key", "ada")
	require.Contains(t, page, "The level is for a key without a plan")
	require.Contains(t, page, `<select name="plan" required>`)
	require.Contains(t, f.page(t, "limit", "name", "messages"), "The levels are for keys without a plan")
}

func TestChangesAreInTheHistoryWithTheirAuthor(t *testing.T) {
	t.Parallel()
	f := setup(t)
	f.Take(t, messages.For("ada"))

	f.changed(t, "pause", ada("for", "2h", "reason", "a leak")...)
	d, err := f.Limiter.Take(t.Context(), messages.For("ada"))
	require.NoError(t, err)
	require.False(t, d.Allowed)
	require.Equal(t, "a leak", d.States[0].PauseReason)
	require.InDelta(t, 2*time.Hour, d.RetryAfter, float64(time.Minute))

	f.changed(t, "resume", ada("reason", "a new key")...)
	d, err = f.Limiter.Take(t.Context(), messages.For("ada"))
	require.NoError(t, err)
	require.True(t, d.Allowed)

	f.changed(t, "override", ada("says", "policy", "rate", "7", "period", "1h", "capacity", "9",
		"kind", "token bucket", "for", "1d", "reason", "a launch")...)
	list, err := f.Store.List(t.Context(), rules.ListQuery{})
	require.NoError(t, err)
	require.InDelta(t, ratelimit.Day, list.Overrides[0].Until.Sub(list.Overrides[0].From), float64(time.Minute))
	require.Equal(t, 7.0, list.Overrides[0].Override.Policy.(ratelimit.TokenBucket).Rate)
	f.changed(t, "remove-override", ada("reason", "it is over")...)

	rule := []string{
		"limit", "messages", "plan", "pro", "rate", "600", "period", "1m", "capacity", "1,000",
		"kind", "token bucket", "mode", "shadow", "on_change", "scale", "reason", "the offer", "version", "",
	}
	f.changed(t, "put-rule", rule...)
	f.changed(t, "delete-rule", "limit", "messages", "plan", "pro", "reason", "no more", "version", "5")

	entries, err := f.Store.History(t.Context(), rules.HistoryQuery{})
	require.NoError(t, err)
	var reasons []string
	for _, e := range entries {
		require.Equal(t, operator, e.Author)
		reasons = append(reasons, e.Reason)
	}
	require.Equal(t, []string{"no more", "the offer", "it is over", "a launch", "a new key", "a leak"}, reasons)
	require.Equal(t, ratelimit.ScaleTokens, entries[1].Rule.OnChange)
	page := f.get(t, "/admin/history").body
	for _, reason := range reasons {
		require.Contains(t, page, reason)
	}
	require.Equal(t, 6, strings.Count(page, "Ana &lt;ana@example.com&gt;")-1, "each entry and the head of the page")
}

func TestReservationIsCancelled(t *testing.T) {
	t.Parallel()
	f := setup(t)
	r, err := f.Limiter.Reserve(t.Context(), tokens.For("acme").Cost(50_000))
	require.NoError(t, err)
	require.Contains(t, f.get(t, admintest.Address("reservation", "id", r.ID)).body, "ends by itself")
	page := f.changed(t, "cancel", "id", r.ID)
	require.Contains(t, page, "cancelled")
	require.Equal(t, 120_000.0, f.Value(t, tokens.For("acme")).Tokens)
	require.Equal(t, http.StatusNotFound, f.post(t, "/admin/cancel", "id", "d070ae61-584c-4b2d-9e70-dc8ddc6059f2").status)
}

// TestRuleThatSomebodyElseChanged is the second of two people who changed a rule at once.
func TestRuleThatSomebodyElseChanged(t *testing.T) {
	t.Parallel()
	f := setup(t)
	rule := func(rate, version string) []string {
		return []string{
			"limit", "messages", "plan", "", "rate", rate, "period", "1m",
			"kind", "token bucket", "mode", "on", "on_change", "keep", "reason", "why", "version", version,
		}
	}
	f.changed(t, "put-rule", rule("70", "")...)
	got := f.post(t, "/admin/put-rule", rule("80", "")...)
	require.Equal(t, http.StatusConflict, got.status)
	require.Contains(t, got.body, "This rule has changed since")
	f.changed(t, "put-rule", rule("80", "1")...)
	gone := []string{"limit", "messages", "plan", "", "reason", "why", "version"}
	require.Equal(t, http.StatusConflict, f.post(t, "/admin/delete-rule", append(gone, "1")...).status)
	f.changed(t, "delete-rule", append(gone, "2")...)
}

// TestRuleOfManyPlans changes the last of more rules than a page lists.
func TestRuleOfManyPlans(t *testing.T) {
	t.Parallel()
	f := setup(t)
	many := make([]rules.Rule, 150)
	for i := range many {
		many[i] = rules.Rule{Limit: "messages", Plan: fmt.Sprintf("plan-%03d", i), Policy: ratelimit.TokenBucket{Rate: 10, Period: time.Minute}}
	}
	_, err := f.Store.Put(t.Context(), rules.Edit{Author: "ana", Reason: "x"}, many...)
	require.NoError(t, err)
	page := f.get(t, admintest.Address("rule", "limit", "messages", "plan", "plan-149")).body
	require.Contains(t, page, "10 per minute")
	require.NotContains(t, page, "No rule is stored.")
	page = f.get(t, admintest.Address("rule", "limit", "messages", "plan", "none")).body
	require.Contains(t, page, "No rule is stored. Without one it is <strong>60 per minute, capacity 100</strong>.")
	f.Put(t, rules.Rule{Limit: "messages", Policy: ratelimit.PerMinute(7)})
	page = f.get(t, admintest.Address("rule", "limit", "messages", "plan", "none")).body
	require.Contains(t, page, "Without one it is <strong>7 per minute</strong>.")
	f.changed(t, "delete-rule", "limit", "messages", "plan", "plan-149", "reason", "x", "version", "1")
}

func TestFormSaysWhatIsWrong(t *testing.T) {
	t.Parallel()
	f := setup(t)
	for want, form := range map[string][]string{
		"Tokens is no number above 0":          append([]string{"credit"}, ada("tokens", "-1")...),
		"tokens is no number above 0":          append([]string{"credit"}, ada("tokens", "NaN")...),
		"The pause has no duration":            append([]string{"pause"}, ada()...),
		"has no reason":                        {"pause", "limit", "messages", "key", "ada", "for", "1h"},
		"write a span of up to 40000 days":     append([]string{"pause"}, ada("for", "1e300w")...),
		"The override is empty":                append([]string{"override"}, ada()...),
		"has no plan":                          append([]string{"override"}, ada("says", "on_plan")...),
		"its Rate is 0":                        append([]string{"override"}, ada("says", "policy")...),
		"For is no span of time: write a span": append([]string{"pause"}, ada("for", "1,5h")...),
		"Rate is no number from 0 up. ":        append([]string{"override"}, ada("says", "policy", "rate", "0x10", "period", "1h")...),
		"From is no instant":                   append([]string{"override"}, ada("says", "multiplier", "multiplier", "2", "from", "tomorrow")...),
		"The policy of this limit is unknown":  {"reset", "limit", "unheard-of", "key", "ada"},
		"The form names no key":                {"reset", "limit", "messages"},
		"The form names no key.":               {"override", "limit", "messages", "says", "multiplier", "multiplier", "2", "reason", "x"},
		"form names no key. Open":              {"remove-override", "limit", "messages", "reason", "x"},
		"is not text, or too long":             {"reset", "limit", "messages", "key", "a\x00b"},
		"Multiplier is no number above 0":      append([]string{"override"}, ada("says", "multiplier", "multiplier", "Inf")...),
		"rules: not found":                     append([]string{"resume"}, ada()...),
		"use 1 to 64 letters, digits":          {"pause", "limit", "a limit", "key", "k", "for", "1h", "reason", "x"},
		"Capacity is no number from 0 up":      append([]string{"override"}, ada("says", "policy", "rate", "1", "period", "1h", "capacity", "x")...),
	} {
		got := f.post(t, "/admin/"+form[0], form[1:]...)
		require.Contains(t, []int{http.StatusBadRequest, http.StatusNotFound}, got.status, want)
		require.Contains(t, strings.ToLower(got.body), strings.ToLower(want))
	}
	require.False(t, math.IsNaN(f.Value(t, messages.For("ada")).Tokens))
}
