package httplimit_test

import (
	"net/http"
	"strconv"
	"testing"
	"time"

	"github.com/dunglas/httpsfv"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

var (
	sendMessage = ratelimit.Define("sendMessage", ratelimit.TokenBucket{Rate: 10, Period: time.Minute, Capacity: 3})
	llmTokens   = ratelimit.Define("llmTokens", ratelimit.PerMinute(40_000))
	freeTrial   = ratelimit.Define("freeTrialSignUp", ratelimit.FixedWindow{Rate: 100, Period: time.Hour, Start: ten})
	rpm         = ratelimit.Define("rpm", ratelimit.PerMinute(60))
	rpd         = ratelimit.Define("rpd", ratelimit.FixedWindow{Rate: 1000, Period: ratelimit.Day, Start: ten.Add(-10 * time.Hour)})
)

// example is a response of the field's own examples: what was taken before, what is asked when, and what
// the response says.
type example struct {
	rules    []httplimit.Rule
	spent    ratelimit.Request
	reserved ratelimit.Request
	at       time.Duration // after ten
	cost     float64
	ratioCap float64
	status   int
	policy   string
	limit    string
	retry    string
}

var examples = map[string]example{
	"TB-A1": {
		rules: one(sendMessage), status: 200,
		policy: `"sendMessage";q=10;w=60`, limit: `"sendMessage";r=2;t=12`,
	},
	"TB-A2 the last token": {
		rules: one(sendMessage), spent: sendMessage.For("ada").Cost(1.8), status: 200,
		policy: `"sendMessage";q=10;w=60`, limit: `"sendMessage";r=0;t=5`,
	},
	"TB-A3 a cost and a unit": {
		rules: []httplimit.Rule{{Limit: llmTokens, Key: user, Unit: "tokens"}}, cost: 8500, status: 200,
		policy: `"llmTokens";q=40000;w=60;qu="tokens"`, limit: `"llmTokens";r=31500;t=48`,
	},
	"TB-R1": {
		rules: one(sendMessage), spent: sendMessage.For("ada").Cost(2.8), status: 429, retry: "5",
		policy: `"sendMessage";q=10;w=60`, limit: `"sendMessage";r=0;t=5`,
	},
	"TB-R2 some left, and not enough": {
		rules: one(llmTokens), spent: llmTokens.For("ada").Cost(38_500), cost: 8500, status: 429, retry: "11",
		policy: `"llmTokens";q=40000;w=60`, limit: `"llmTokens";r=1500;t=11`,
	},
	"TB-R3 debts do not show": {
		rules: one(sendMessage), reserved: sendMessage.For("ada").Cost(7), status: 429, retry: "30",
		policy: `"sendMessage";q=10;w=60`, limit: `"sendMessage";r=0;t=30`,
	},
	"FW-A1": {
		rules: one(freeTrial), at: 20 * time.Second, status: 200,
		policy: `"freeTrialSignUp";q=100;w=3600`, limit: `"freeTrialSignUp";r=99;t=3580`,
	},
	"FW-A2 truthful": {
		rules: one(freeTrial), spent: freeTrial.For("ada").Cost(40), at: 59*time.Minute + 50*time.Second, status: 200,
		policy: `"freeTrialSignUp";q=100;w=3600`, limit: `"freeTrialSignUp";r=59;t=10`,
	},
	"FW-A2 with a cap on the ratio": {
		rules: one(freeTrial), spent: freeTrial.For("ada").Cost(40), at: 59*time.Minute + 50*time.Second, ratioCap: 10, status: 200,
		policy: `"freeTrialSignUp";q=100;w=3600`, limit: `"freeTrialSignUp";r=3;t=10`,
	},
	"FW-A3": {
		rules: one(freeTrial), spent: freeTrial.For("ada").Cost(99), at: 40 * time.Minute, status: 200,
		policy: `"freeTrialSignUp";q=100;w=3600`, limit: `"freeTrialSignUp";r=0;t=1200`,
	},
	"FW-R1": {
		rules: one(freeTrial), spent: freeTrial.For("ada").Cost(100), at: 40*time.Minute + time.Second, status: 429, retry: "1199",
		policy: `"freeTrialSignUp";q=100;w=3600`, limit: `"freeTrialSignUp";r=0;t=1199`,
	},
	"FW-R2 a part of a second is a second": {
		rules: one(freeTrial), spent: freeTrial.For("ada").Cost(98), at: 59*time.Minute + 57300*time.Millisecond, cost: 5,
		status: 429, retry: "3",
		policy: `"freeTrialSignUp";q=100;w=3600`, limit: `"freeTrialSignUp";r=2;t=3`,
	},
	"FW-R3 only what refused is stated": {
		rules: []httplimit.Rule{{Limit: rpm, Key: user}, {Limit: rpd, Key: user}},
		spent: rpd.For("ada").Cost(1000), at: 4 * time.Hour, status: 429, retry: "36000",
		policy: `"rpm";q=60;w=60, "rpd";q=1000;w=86400`, limit: `"rpd";r=0;t=36000`,
	},
}

func one(limit ratelimit.Limit) []httplimit.Rule { return []httplimit.Rule{{Limit: limit, Key: user}} }

func TestDraftHeadersOfTheWorkedExamples(t *testing.T) {
	t.Parallel()
	for name, e := range examples {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			b.setClock(ten.Add(e.at))
			e.prepare(t, b)
			config := httplimit.Config{Rules: e.rules, RatioCap: e.ratioCap}
			if e.cost != 0 {
				config.Rules[0].Cost = httplimit.FixedCost(e.cost)
			}
			w := do(b.limited(t, config, respond()), request(t))
			require.Equal(t, e.status, w.Code)
			require.Equal(t, e.policy, w.Header().Get("RateLimit-Policy"))
			require.Equal(t, e.limit, w.Header().Get("RateLimit"))
			require.Equal(t, e.retry, w.Header().Get("Retry-After"))
			requireDraftFields(t, w.Header())
		})
	}
}

func (e example) prepare(t *testing.T, b *bundle) {
	t.Helper()
	if e.spent.Limit().Name() != "" {
		b.take(t, e.spent)
	}
	if e.reserved.Limit().Name() != "" {
		r, err := b.limiter.Reserve(t.Context(), e.reserved)
		require.NoError(t, err)
		require.True(t, r.Allowed)
	}
}

// requireDraftFields checks that both fields are what the draft says, by a parser that is not ours, and returns the
// numbers of each policy.
func requireDraftFields(t *testing.T, header http.Header) (policies, limits map[string]map[string]int64) {
	t.Helper()
	parse := func(field string, required ...string) map[string]map[string]int64 {
		list, err := httpsfv.UnmarshalList(header.Values(field))
		require.NoError(t, err, "%s: %q", field, header.Values(field))
		require.NotEmpty(t, list)
		all := make(map[string]map[string]int64)
		for _, member := range list {
			item, ok := member.(httpsfv.Item)
			require.True(t, ok)
			require.IsType(t, "", item.Value, "the name of a policy is a String")
			numbers := make(map[string]int64)
			for _, parameter := range required {
				value, found := item.Params.Get(parameter)
				require.True(t, found, "%s has no %s", field, parameter)
				require.IsType(t, int64(0), value, "%s is an Integer", parameter)
				numbers[parameter], _ = value.(int64)
				require.GreaterOrEqual(t, numbers[parameter], int64(0))
			}
			name, _ := item.Value.(string)
			require.NotContains(t, all, name, "each policy is stated once")
			all[name] = numbers
		}
		return all
	}
	policies, limits = parse("RateLimit-Policy", "q", "w"), parse("RateLimit", "r", "t")
	for name, p := range policies {
		require.Positive(t, p["q"], name)
		require.Positive(t, p["w"], name)
	}
	for name := range limits {
		require.Contains(t, policies, name)
	}
	return policies, limits
}

// requireNoFields checks that nothing is said about limits.
func requireNoFields(t *testing.T, header http.Header) {
	t.Helper()
	for name := range header {
		require.NotContains(t, name, "Ratelimit")
	}
	require.NotContains(t, header, "Retry-After")
}

func TestTheWorkedRefusalInFull(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.take(t, sendMessage.For("ada").Cost(2.8))
	w := do(b.limited(t, rules(one(sendMessage)...), respond()), request(t))
	require.Equal(t, http.StatusTooManyRequests, w.Code)
	require.JSONEq(t, `{
		"type": "https://iana.org/assignments/http-problem-types#quota-exceeded",
		"title": "Request cannot be satisfied as assigned quota has been exceeded",
		"status": 429,
		"detail": "sendMessage: 10 per minute; retry in 5 s",
		"violated-policies": ["sendMessage"]
	}`, w.Body.String())
	require.Equal(t, http.Header{
		"Content-Type":           {"application/problem+json"},
		"Content-Length":         {strconv.Itoa(w.Body.Len())},
		"Cache-Control":          {"no-store"},
		"Retry-After":            {"5"},
		"Ratelimit-Reason":       {"quota-exceeded"},
		"Ratelimit-Policy":       {`"sendMessage";q=10;w=60`},
		"Ratelimit":              {`"sendMessage";r=0;t=5`},
		"X-Content-Type-Options": {"nosniff"},
	}, w.Header())
}

// TestQuotasAreWholeNumbers promises that a rate that is no whole number of tokens in whole seconds is stated as
// one.
func TestQuotasAreWholeNumbers(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for want, policy := range map[string]ratelimit.Policy{
		`"odd";q=10;w=60`:             ratelimit.PerMinute(10),
		`"odd";q=1;w=2`:               ratelimit.TokenBucket{Rate: 0.5, Period: time.Second, Capacity: 5},
		`"odd";q=50;w=1`:              ratelimit.TokenBucket{Rate: 5, Period: 100 * time.Millisecond},
		`"odd";q=2;w=3`:               ratelimit.TokenBucket{Rate: 1, Period: 1500 * time.Millisecond},
		`"odd";q=1;w=3`:               ratelimit.TokenBucket{Rate: 1.0 / 3, Period: time.Second, Capacity: 5},
		`"odd";q=3;w=1`:               ratelimit.PerSecond(3.14159265358979), // rounded down
		`"odd";q=1;w=86400000`:        ratelimit.TokenBucket{Rate: 0.001, Period: ratelimit.Day, Capacity: 5},
		`"odd";q=1000000000000;w=1`:   ratelimit.PerSecond(1e12),
		`"odd";q=999999999999999;w=1`: ratelimit.TokenBucket{Rate: 1e12, Period: time.Microsecond, Capacity: 1e12},
		`"odd";q=5;w=3155760000`:      ratelimit.TokenBucket{Rate: 5, Period: 36525 * ratelimit.Day},
		`"odd";q=7;w=604800`:          &ratelimit.TokenBucket{Rate: 7, Period: ratelimit.Week},
		`"odd";q=1000000;w=3`:         ratelimit.TokenBucket{Rate: 1, Period: 3 * time.Microsecond, Capacity: 5},
		`"odd";q=60;w=60`:             &ratelimit.FixedWindow{Rate: 60, Period: time.Minute},
	} {
		limit := ratelimit.Define("odd", policy)
		w := do(b.limited(t, rules(httplimit.Rule{Limit: limit, Key: user, Cost: httplimit.FixedCost(0)}), respond()), request(t))
		require.Equal(t, want, w.Header().Get("RateLimit-Policy"), "%v", policy)
		requireDraftFields(t, w.Header())
	}
}

func TestOlderHeaders(t *testing.T) {
	t.Parallel()
	const tokens = 8500
	after := func(t *testing.T, headers httplimit.Headers) (allowed, refused http.Header) {
		t.Helper()
		b := setup(t)
		b.setClock(ten.Add(1500 * time.Millisecond))
		handler := b.limited(t, httplimit.Config{Headers: headers, Rules: []httplimit.Rule{
			{Limit: rpm, Key: user},
			{Limit: llmTokens, Key: user, Unit: "tokens", Cost: httplimit.FixedCost(tokens)},
		}}, respond())
		b.take(t, rpm.For("ada").Cost(9))
		b.take(t, llmTokens.For("ada").Cost(40_000-2*tokens))
		first, second := do(handler, request(t)), do(handler, request(t))
		require.Equal(t, http.StatusOK, first.Code)
		require.Equal(t, http.StatusOK, second.Code)
		third := do(handler, request(t))
		require.Equal(t, http.StatusTooManyRequests, third.Code)
		require.Equal(t, "13", third.Header().Get("Retry-After")) // 8500 at 40000 a minute
		return first.Header(), third.Header()
	}
	pick := func(header http.Header, names ...string) []string {
		var all []string
		for _, name := range names {
			require.Len(t, header.Values(name), 1, name)
			all = append(all, header.Get(name))
		}
		require.Empty(t, header.Values("RateLimit"))
		return all
	}

	t.Run("Trio", func(t *testing.T) {
		t.Parallel()
		names := []string{"RateLimit-Limit", "RateLimit-Remaining", "RateLimit-Reset"}
		allowed, refused := after(t, httplimit.TrioHeaders)
		require.Equal(t, []string{"40000", "8500", "48"}, pick(allowed, names...))
		require.Equal(t, []string{"40000", "0", "13"}, pick(refused, names...))
	})
	t.Run("Epoch", func(t *testing.T) {
		t.Parallel()
		names := []string{"X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset"}
		allowed, refused := after(t, httplimit.EpochHeaders)
		require.Equal(t, []string{"40000", "8500", "1773050449"}, pick(allowed, names...)) // 10:00:49
		require.Equal(t, []string{"40000", "0", "1773050415"}, pick(refused, names...))
	})
	t.Run("OpenAI", func(t *testing.T) {
		t.Parallel()
		names := []string{
			"x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests",
			"x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens",
		}
		allowed, refused := after(t, httplimit.OpenAIHeaders)
		require.Equal(t, []string{"60", "50", "10s", "40000", "8500", "47.25s"}, pick(allowed, names...))
		require.Equal(t, []string{"60", "49", "11s", "40000", "0", "1m0s"}, pick(refused, names...))
	})
	t.Run("None", func(t *testing.T) {
		t.Parallel()
		allowed, refused := after(t, httplimit.NoHeaders)
		requireNoFields(t, allowed)
		require.NotContains(t, refused, "Ratelimit-Policy")
	})
}

func TestHeadersAreThereBeforeTheHandlerWrites(t *testing.T) {
	t.Parallel()
	b := setup(t)
	handler := b.limited(t, rules(userRule), inline(func(e exchange) {
		require.NotEmpty(t, e.w.Header().Get("RateLimit"))
		e.w.Header().Del("RateLimit") // and may be changed
	}))
	w := do(handler, request(t))
	require.Empty(t, w.Header().Get("RateLimit"))
	require.NotEmpty(t, w.Header().Get("RateLimit-Policy"))
}

func TestNestedMiddlewaresShareTheFields(t *testing.T) {
	t.Parallel()
	b := setup(t)
	handler := b.limited(t, rules(httplimit.Rule{Limit: everyone, Global: true}),
		b.limited(t, rules(userRule), respond()))
	w := do(handler, request(t))
	require.Equal(t, http.StatusOK, w.Code)
	policies, limits := requireDraftFields(t, w.Header())
	require.Len(t, policies, 2)
	require.Equal(t, int64(999), limits["everyone"]["r"])
	require.Equal(t, int64(2), limits["perUser"]["r"])

	b.take(t, perUser.For("ada").Cost(2))
	w = do(handler, request(t))
	require.Equal(t, http.StatusTooManyRequests, w.Code)
	policies, limits = requireDraftFields(t, w.Header())
	require.Len(t, policies, 2)
	require.Len(t, limits, 1, "only what refused is stated")
	require.Contains(t, limits, "perUser")
}

// TestNoFieldHoldsAKey promises that what the client sent to say who it is does not come back.
func TestNoFieldHoldsAKey(t *testing.T) {
	t.Parallel()
	const secret = "sk-live-4242"
	b := setup(t)
	for _, headers := range []httplimit.Headers{httplimit.DraftHeaders, httplimit.TrioHeaders, httplimit.EpochHeaders, httplimit.OpenAIHeaders} {
		handler := b.limited(t, httplimit.Config{Headers: headers, RetryJitter: 0.5, Rules: []httplimit.Rule{userRule}}, respond())
		for range 5 {
			w := do(handler, request(t, "X-User", secret))
			require.NotContains(t, w.Body.String(), secret)
			for name, values := range w.Header() {
				require.NotContains(t, name+values[0], secret)
			}
		}
	}
	require.NotContains(t, b.log.String(), secret)
}
