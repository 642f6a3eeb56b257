package admin_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/browsertest"
	"github.com/pgratelimit/pgratelimit/internal/admintest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// asPhone is a phone of 360 pixels' width that looks at the page.
func (f *fixture) asPhone(t *testing.T) *tab {
	t.Helper()
	b := &tab{url: f.server.URL, ctx: browsertest.New(t)} // a phone has one tab: in another one touch emulation does not answer
	browsertest.AsPhone(t, b.ctx, 360, "light")
	return b
}

// TestPagesOnAPhone looks for elements that are too wide, or too small to tap.
func TestPagesOnAPhone(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "starts a browser")
	f := setup(t)
	id := f.Furnish(t)
	b := f.asPhone(t)
	for name, page := range admintest.Pages(id) {
		b.open(t, page)
		play[bool](t, b, unfold+`return true;`)
		require.Empty(t, browsertest.Misfits(t, b.ctx, 360), name)
	}
}

// send fills in the form that sends to an action, presses its button, and waits for the page with the result.
func (b *tab) send(t *testing.T, page, action string, fields map[string]string) {
	t.Helper()
	b.open(t, page)
	play[bool](t, b, unfold+`return true;`)
	form := fmt.Sprintf(`form[action="%s"]`, action)
	for name, value := range fields {
		field := form + ` [name="` + name + `"]`
		if name == "says" {
			require.NoError(t, chromedp.Do(b.ctx, chromedp.Click(field+`[value="`+value+`"]`)))
			continue
		}
		require.NoError(t, chromedp.Do(b.ctx, chromedp.SetValue(field, value)))
	}
	require.NoError(t, chromedp.Do(b.ctx, chromedp.Click(form+` button`), chromedp.WaitVisible(`[role=status]`)))
}

// TestEachChangeByItsButton presses every button that changes something, at a desk and on a phone, and looks into the tables.
func TestEachChangeByItsButton(t *testing.T) {
	t.Parallel()
	for name, browse := range map[string]func(*fixture, *testing.T) *tab{"Desk": (*fixture).browse, "Phone": (*fixture).asPhone} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			b := browse(f, t)
			f.put(t, rules.Rule{Limit: "messages", Plan: "pro", Policy: ratelimit.TokenBucket{Rate: 600, Period: time.Minute}})
			f.Take(t, messages.For("ada").Cost(90), logins.For("ada").Cost(10))
			f.buttonsOfABucket(t, b)
			f.buttonsOfALimit(t, b)
		})
	}
}

func (f *fixture) buttonsOfABucket(t *testing.T, b *tab) {
	t.Helper()
	bucket, login := admintest.Address("key", "limit", "messages", "key", "ada"), admintest.Address("key", "limit", "failed-logins", "key", "ada")
	says := func(sql string) (text string) {
		require.NoError(t, f.Pool.QueryRow(t.Context(), sql).Scan(&text))
		return text
	}
	b.send(t, login, "credit", map[string]string{"tokens": "4"})
	require.InDelta(t, 4, f.value(t, logins.For("ada")).Tokens, 0.5)
	b.send(t, login, "reset", nil)
	require.Equal(t, 10.0, f.value(t, logins.For("ada")).Tokens)
	b.send(t, bucket, "reset", map[string]string{"plan": "pro"})
	require.Equal(t, 600.0, f.value(t, messages.For("ada").Plan("pro")).Tokens)
	b.send(t, bucket, "pause", map[string]string{"for": "2d", "reason": "a leak"})
	require.Equal(t, "a leak, 2 days", says(`SELECT reason || ', ' || round((until_us - from_us) / 86400e6) || ' days' FROM ratelimit.rules WHERE of = 'pause' AND key = 'ada' AND says IS NOT NULL`))
	b.send(t, bucket, "resume", map[string]string{"reason": "it is over"})
	require.Equal(t, "0", says(`SELECT count(*)::text FROM ratelimit.rules WHERE of = 'pause' AND end_us > extract(epoch FROM clock_timestamp()) * 1000000`))
	b.send(t, bucket, "override", map[string]string{"says": "multiplier", "multiplier": "3", "reason": "a launch"})
	const last = ` FROM ratelimit.rules WHERE of = 'override' ORDER BY version DESC LIMIT 1`
	require.Equal(t, "3", says(`SELECT says->>'multiplier'`+last))
	b.send(t, bucket, "override", map[string]string{"says": "on_plan", "on_plan": "pro", "reason": "a launch"})
	require.Equal(t, "pro", says(`SELECT says->>'on_plan'`+last))
	b.send(t, bucket, "override", map[string]string{"says": "policy", "rate": "1,500", "period": "1h", "reason": "a launch"})
	require.Equal(t, "1500 in 1h", says(`SELECT (says #>> '{policy,rate}') || ' in ' || (says #>> '{policy,period}')`+last))
	b.send(t, bucket, "remove-override", map[string]string{"reason": "it is over"})
	list, err := f.Store.List(t.Context(), rules.ListQuery{})
	require.NoError(t, err)
	for _, o := range list.Overrides {
		require.False(t, o.Until.IsZero())
	}
	r, err := f.Limiter.Reserve(t.Context(), tokens.For("acme").Cost(50_000))
	require.NoError(t, err)
	b.send(t, admintest.Address("reservation", "id", r.ID), "cancel", nil)
	require.Equal(t, string(ratelimit.Cancelled), says(`SELECT state FROM ratelimit.reservations`))
	require.Equal(t, 120_000.0, f.value(t, tokens.For("acme")).Tokens)
}

func (f *fixture) buttonsOfALimit(t *testing.T, b *tab) {
	t.Helper()
	b.send(t, admintest.Address("limit", "name", "messages"), "pause", map[string]string{"reason": "an attack"})
	require.NotContains(t, play[string](t, b, `return document.body.innerText;`), "Nothing was changed")
	list, err := f.Store.List(t.Context(), rules.ListQuery{})
	require.NoError(t, err)
	whole := list.Pauses[0]
	require.Empty(t, whole.Key)
	require.InDelta(t, time.Hour, whole.Until.Sub(whole.From), float64(time.Minute))
	b.send(t, admintest.Address("limit", "name", "messages"), "resume", map[string]string{"reason": "it is over"})

	b.open(t, admintest.Address("rule", "limit", "messages", "plan", ""))
	require.NoError(t, chromedp.Do(b.ctx,
		chromedp.SetValue(`form[action="preview"] [name="rate"]`, "45.5"), chromedp.Click(`form[action="preview"] button`),
		chromedp.WaitVisible(`form[action="put-rule"]`), chromedp.SetValue(`form[action="put-rule"] [name="reason"]`, "less"),
		chromedp.Click(`form[action="put-rule"] button`), chromedp.WaitVisible(`[role=status]`)))
	list, err = f.Store.List(t.Context(), rules.ListQuery{})
	require.NoError(t, err)
	policy, _ := list.Rules[0].Rule.Policy.(ratelimit.TokenBucket)
	require.Equal(t, 45.5, policy.Rate)
	require.Equal(t, 100.0, policy.Capacity, "as the definition in the code has it")
	b.send(t, admintest.Address("rule", "limit", "messages", "plan", ""), "delete-rule", map[string]string{"reason": "it is over"})
	list, err = f.Store.List(t.Context(), rules.ListQuery{})
	require.NoError(t, err)
	for _, r := range list.Rules {
		require.Equal(t, r.Plan == "", !r.Until.IsZero(), "the rule ends in a moment, and that of the plan pro does not")
	}
}
