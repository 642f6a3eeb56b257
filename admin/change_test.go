package admin_test

import (
	"fmt"
	"math"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/test/admintest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// changed sends a form, follows it to its page, and returns that.
func (f *fixture) changed(name string, pairs ...string) string {
	f.Helper()
	got := f.post("/admin/"+name, pairs...)
	require.Equal(f, http.StatusSeeOther, got.status, got.body)
	page := f.get("/admin/" + got.header.Get("Location"))
	require.Equal(f, http.StatusOK, page.status)
	require.Contains(f, page.body, `role="status"`)
	f.Load(f)
	return page.body
}

func TestBucketIsResetAndCredited(t *testing.T) {
	t.Parallel()
	for name, secret := range map[string][]byte{"Plain": nil, "Hashed": []byte("0123456789abcdef")} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setup(t, func(c *ratelimit.Config) { c.HashKey = secret })
			f.Take(t, logins.For("ada").Cost(10))
			found := f.post("/admin/find", "limit", "failed-logins", "typed", "ada")
			require.Equal(t, http.StatusSeeOther, found.status)
			key, err := f.Limiter.StoredKey(logins.For("ada"))
			require.NoError(t, err)
			require.Equal(t, "key?"+admintest.Values("limit", "failed-logins", "key", key).Encode(), found.header.Get("Location"))

			f.changed("credit", "limit", "failed-logins", "key", key, "tokens", "4")
			require.InDelta(t, 4, f.Value(t, logins.For("ada")).Tokens, 0.1)
			all := f.post("/admin/find", "as", "key", "typed", "ada")
			if secret == nil {
				require.Equal(t, "key?key=ada", all.header.Get("Location"))
			} else { // each limit has another hash, and no address has the key
				require.Equal(t, http.StatusOK, all.status)
				require.Contains(t, all.body, "key?key="+key+"&amp;limit=failed-logins")
			}
			f.changed("reset", "limit", "failed-logins", "key", key)
			require.Equal(t, 10.0, f.Value(t, logins.For("ada")).Tokens)
			require.Contains(t, f.log.String(), `author="Ana <ana@example.com>"`)
			require.NotContains(t, f.log.String(), "ada\n")
			require.NotContains(t, f.log.String(), key)
		})
	}
}

// Each form makes its change, or names the invalid field.
func TestChanges(t *testing.T) {
	t.Parallel()
	for name, story := range map[string]func(f *fixture){
		// A bucket is credited and reset that holds more than one without a plan could.
		"ChangeOfAKeyOnAPlan": func(f *fixture) {
			f.Put(f, rules.Rule{Limit: "messages", Plan: "pro", Policy: ratelimit.TokenBucket{Rate: 1, Period: time.Hour, Capacity: 1000}})
			onPro := messages.For("ada").Plan("pro")
			f.Take(f, onPro.Cost(300))
			for _, form := range [][]string{{"reset"}, {"credit", "tokens", "50"}, {"reset", "plan", "prro"}} {
				got := f.post("/admin/"+form[0], ada(form[1:]...)...)
				require.Equal(f, http.StatusBadRequest, got.status)
				require.Contains(f, got.body, "The form has no plan")
			}
			require.InDelta(f, 700, f.Value(f, onPro).Tokens, 1, "nothing was changed")
			f.changed("credit", ada("tokens", "50", "plan", "pro")...)
			require.InDelta(f, 750, f.Value(f, onPro).Tokens, 1)
			f.changed("reset", ada("plan", "pro")...)
			require.Equal(f, 1000.0, f.Value(f, onPro).Tokens)
			f.changed("reset", ada("plan", " ")...)
			require.InDelta(f, 100, f.Value(f, onPro).Tokens, 1, "which is all that a key on no plan holds")

			page := f.page("key", "limit", "messages", "key", "ada")
			require.Contains(f, page, "Level on each plan")
			require.Contains(f, page, `<select name="plan" required>`)
			require.Contains(f, f.page("limit", "name", "messages"), "<span>plan pro: 100 <span class=\"of\">of 1,000</span></span>")
		},
		"ChangesAreInTheHistoryWithTheirAuthor": func(f *fixture) {
			f.Take(f, messages.For("ada"))

			f.changed("pause", ada("for", "2h", "reason", "a leak")...)
			d, err := f.Limiter.Take(f.Context(), messages.For("ada"))
			require.NoError(f, err)
			require.False(f, d.Allowed)
			require.Equal(f, "a leak", d.States[0].PauseReason)
			require.InDelta(f, 2*time.Hour, d.RetryAfter, float64(time.Minute))

			f.changed("resume", ada("reason", "a new key")...)
			d, err = f.Limiter.Take(f.Context(), messages.For("ada"))
			require.NoError(f, err)
			require.True(f, d.Allowed)

			f.changed("override", ada("says", "policy", "rate", "7", "period", "1h", "capacity", "9",
				"kind", "token bucket", "for", "1d", "reason", "a launch")...)
			list, err := f.Store.List(f.Context(), rules.ListQuery{})
			require.NoError(f, err)
			require.InDelta(f, ratelimit.Day, list.Overrides[0].Until.Sub(list.Overrides[0].From), float64(time.Minute))
			require.Equal(f, 7.0, list.Overrides[0].Override.Policy.(ratelimit.TokenBucket).Rate)
			f.changed("remove-override", ada("reason", "it is over")...)

			rule := []string{
				"limit", "messages", "plan", "pro", "rate", "600", "period", "1m", "capacity", "1,000",
				"kind", "token bucket", "mode", "shadow", "on_change", "scale", "reason", "the offer", "version", "",
			}
			f.changed("put-rule", rule...)
			f.changed("delete-rule", "limit", "messages", "plan", "pro", "reason", "no more", "version", "5")

			entries, err := f.Store.History(f.Context(), rules.HistoryQuery{})
			require.NoError(f, err)
			var reasons []string
			for _, e := range entries {
				require.Equal(f, operator, e.Author)
				reasons = append(reasons, e.Reason)
			}
			require.Equal(f, []string{"no more", "the offer", "it is over", "a launch", "a new key", "a leak"}, reasons)
			require.Equal(f, ratelimit.ScaleTokens, entries[1].Rule.OnChange)
			page := f.get("/admin/history").body
			for _, reason := range reasons {
				require.Contains(f, page, reason)
			}
			require.Equal(f, 6, strings.Count(page, "Ana &lt;ana@example.com&gt;")-1, "each entry and the head of the page")
		},
		"OverrideIsPreviewed": func(f *fixture) {
			f.Put(f, rules.Rule{Limit: "messages", Plan: "pro", Policy: ratelimit.TokenBucket{Rate: 600, Period: time.Minute, Capacity: 1000}})
			next := func(limit, key string, fields ...string) string {
				return f.page("preview-override", append([]string{"limit", limit, "key", key}, fields...)...)
			}
			// The definition in the code is known, so that the outlook of its key is, too.
			f.Take(f, trials.For("ada").Cost(400))
			page := next("free-trials", "ada", "says", "multiplier", "multiplier", "3", "for", "1d")
			require.Contains(f, page, "<strong>a key with 100 of 500 left will have 1100 of 1500, until the window ends, within 1h</strong>")
			require.Contains(f, page, `<td class="before">500 per hour (fixed window)</td><td class="after">1500 per hour (fixed window)</td>`)
			require.Contains(f, page, "<strong>3 times, until 2")
			require.Contains(f, page, `<input type="hidden" name="multiplier" value="3">`)
			page = next("messages", "bob", "says", "on_plan", "on_plan", "pro")
			require.Contains(f, page, "When it takes effect on no plan, ")
			require.Contains(f, page, "a key with 100 of 100 left will have 1000 of 1000</strong>")
			page = next("messages", "bob", "plan", "pro", "says", "policy", "rate", "7", "period", "1h")
			require.Contains(f, page, "a key with 1000 of 1000 left will have 7 of 7</strong>")
			require.Contains(f, next("messages", "bob", "says", "multiplier"), "Multiplier is no number above 0")
			require.Contains(f, next("messages", "bob", "says", "multiplier", "multiplier", "1e9"), "; use one from 1e-06 to")

			// The policy is in code that the page does not know.
			f.Take(f, admintest.RequestOf(f, "unlisted"))
			page = next("unlisted", "ada", "says", "multiplier", "multiplier", "2")
			require.Contains(f, page, "what a key will have depends on its plan or on the code, which the tables do not have")
			require.Contains(f, page, `<td class="after">not known</td>`)

			list, err := f.Store.List(f.Context(), rules.ListQuery{})
			require.NoError(f, err)
			require.Empty(f, list.Overrides, "a preview changes nothing")
			f.who.MayChange = false
			require.NotContains(f, next("messages", "bob", "says", "multiplier", "multiplier", "2"), `action="override"`)
		},
		"ReservationIsCancelled": func(f *fixture) {
			r, err := f.Limiter.Reserve(f.Context(), tokens.For("acme").Cost(50_000))
			require.NoError(f, err)
			require.Contains(f, f.get(admintest.Address("reservation", "id", r.ID)).body, "expires")
			page := f.changed("cancel", "id", r.ID)
			require.Contains(f, page, "cancelled")
			require.Equal(f, 120_000.0, f.Value(f, tokens.For("acme")).Tokens)
			require.Equal(f, http.StatusNotFound, f.post("/admin/cancel", "id", "d070ae61-584c-4b2d-9e70-dc8ddc6059f2").status)
		},
		// The last of more rules than a page lists.
		"RuleOfManyPlans": func(f *fixture) {
			many := make([]rules.Rule, 150)
			for i := range many {
				many[i] = rules.Rule{Limit: "messages", Plan: fmt.Sprintf("plan-%03d", i), Policy: ratelimit.TokenBucket{Rate: 10, Period: time.Minute}}
			}
			_, err := f.Store.Put(f.Context(), rules.Edit{Author: "ana", Reason: "x"}, many...)
			require.NoError(f, err)
			page := f.get(admintest.Address("rule", "limit", "messages", "plan", "plan-149")).body
			require.Contains(f, page, "10 per minute")
			require.NotContains(f, page, "No rule is stored.")
			page = f.get(admintest.Address("rule", "limit", "messages", "plan", "none")).body
			require.Contains(f, page, "No rule is stored. Without one it is <strong>60 per minute, capacity 100</strong>.")
			f.Put(f, rules.Rule{Limit: "messages", Policy: ratelimit.PerMinute(7)})
			page = f.get(admintest.Address("rule", "limit", "messages", "plan", "none")).body
			require.Contains(f, page, "Without one it is <strong>7 per minute</strong>.")
			f.changed("delete-rule", "limit", "messages", "plan", "plan-149", "reason", "x", "version", "1")
		},
		"FormSaysWhatIsWrong": func(f *fixture) {
			for want, form := range map[string][]string{
				"Tokens is no number above 0":              append([]string{"credit"}, ada("tokens", "-1")...),
				"tokens is no number above 0":              append([]string{"credit"}, ada("tokens", "NaN")...),
				"The pause has no duration":                append([]string{"pause"}, ada()...),
				"has no reason":                            {"pause", "limit", "messages", "key", "ada", "for", "1h"},
				"write a duration of up to 40000 days":     append([]string{"pause"}, ada("for", "1e300w")...),
				"The override is empty":                    append([]string{"override"}, ada()...),
				"has no plan":                              append([]string{"override"}, ada("says", "on_plan")...),
				"its Rate is 0":                            append([]string{"override"}, ada("says", "policy")...),
				"For is no span of time: write a duration": append([]string{"pause"}, ada("for", "1,5h")...),
				"Rate is no number from 0 up. ":            append([]string{"override"}, ada("says", "policy", "rate", "0x10", "period", "1h")...),
				"From is not a date and time":              append([]string{"override"}, ada("says", "multiplier", "multiplier", "2", "from", "tomorrow")...),
				"The policy of this limit is unknown":      {"reset", "limit", "unheard-of", "key", "ada"},
				"The form names no key":                    {"reset", "limit", "messages"},
				"The form names no key.":                   {"override", "limit", "messages", "says", "multiplier", "multiplier", "2", "reason", "x"},
				"form names no key. Open":                  {"remove-override", "limit", "messages", "reason", "x"},
				"is not text, or too long":                 {"reset", "limit", "messages", "key", "a\x00b"},
				"not text, or too long, or there twice":    {"reset?key=ada&key=bob", "limit", "messages", "key", "ada"},
				"Multiplier is no number above 0":          append([]string{"override"}, ada("says", "multiplier", "multiplier", "Inf")...),
				"rules: not found":                         append([]string{"resume"}, ada()...),
				"use 1 to 64 letters, digits":              {"pause", "limit", "a limit", "key", "k", "for", "1h", "reason", "x"},
				"Capacity is no number from 0 up":          append([]string{"override"}, ada("says", "policy", "rate", "1", "period", "1h", "capacity", "x")...),
			} {
				got := f.post("/admin/"+form[0], form[1:]...)
				require.Contains(f, []int{http.StatusBadRequest, http.StatusNotFound}, got.status, want)
				require.Contains(f, strings.ToLower(got.body), strings.ToLower(want))
			}
			require.False(f, math.IsNaN(f.Value(f, messages.For("ada")).Tokens))

			// Another user has changed the rule since.
			f.Put(f, rules.Rule{Limit: "messages", Policy: ratelimit.PerMinute(7)})
			rule := func(version string) []string {
				return []string{
					"limit", "messages", "plan", "", "rate", "80", "period", "1m", "kind", "token bucket", "mode", "on", "on_change", "keep",
					"reason", "x", "version", version,
				}
			}
			for name, form := range map[string][]string{"put-rule": rule(""), "delete-rule": rule("9")} {
				got := f.post("/admin/"+name, form...)
				require.Equal(f, http.StatusConflict, got.status, name)
				require.Contains(f, got.body, "This rule has changed since", name)
			}
			f.changed("put-rule", rule("1")...)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			story(setup(t))
		})
	}
}
