package httplimit_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// example is an example of the draft: the tokens taken before, the request and its time, and the fields of the response.
type example struct {
	limits   []httplimit.Limit
	spent    ratelimit.Request
	reserved ratelimit.Request
	at       time.Duration // after ten
	cost     float64
	status   int
	policy   string
	limit    string
	retry    string
}

var examples = map[string]example{
	"TB-A1": {
		limits: one(sendMessage), status: 200,
		policy: `"sendMessage";q=10;w=60`, limit: `"sendMessage";r=2;t=12`,
	},
	"TB-A2 the last token": {
		limits: one(sendMessage), spent: sendMessage.For("ada").Cost(1.8), status: 200,
		policy: `"sendMessage";q=10;w=60`, limit: `"sendMessage";r=0;t=5`,
	},
	"TB-A3 a cost and a unit": {
		limits: []httplimit.Limit{{Limit: llmTokens, Key: user, Unit: "tokens"}}, cost: 8500, status: 200,
		policy: `"llmTokens";q=40000;w=60;qu="tokens"`, limit: `"llmTokens";r=31500;t=48`,
	},
	"TB-R1": {
		limits: one(sendMessage), spent: sendMessage.For("ada").Cost(2.8), status: 429, retry: "5",
		policy: `"sendMessage";q=10;w=60`, limit: `"sendMessage";r=0;t=5`,
	},
	"TB-R2 some left, and not enough": {
		limits: one(llmTokens), spent: llmTokens.For("ada").Cost(38_500), cost: 8500, status: 429, retry: "11",
		policy: `"llmTokens";q=40000;w=60`, limit: `"llmTokens";r=1500;t=11`,
	},
	"TB-R3 owed tokens do not show": {
		limits: one(sendMessage), reserved: sendMessage.For("ada").Cost(7), status: 429, retry: "30",
		policy: `"sendMessage";q=10;w=60`, limit: `"sendMessage";r=0;t=30`,
	},
	"FW-A1": {
		limits: one(freeTrial), at: 20 * time.Second, status: 200,
		policy: `"freeTrialSignUp";q=100;w=3600`, limit: `"freeTrialSignUp";r=99;t=3580`,
	},
	"FW-A2 truthful": {
		limits: one(freeTrial), spent: freeTrial.For("ada").Cost(40), at: 59*time.Minute + 50*time.Second, status: 200,
		policy: `"freeTrialSignUp";q=100;w=3600`, limit: `"freeTrialSignUp";r=59;t=10`,
	},
	"FW-A3": {
		limits: one(freeTrial), spent: freeTrial.For("ada").Cost(99), at: 40 * time.Minute, status: 200,
		policy: `"freeTrialSignUp";q=100;w=3600`, limit: `"freeTrialSignUp";r=0;t=1200`,
	},
	"SW-A1 until more than what is left can be had": {
		limits: one(anyMinute), spent: anyMinute.For("ada").Cost(4), status: 200,
		policy: `"anyMinute";q=10;w=60`, limit: `"anyMinute";r=5;t=70`,
	},
	"SW-R1": {
		limits: one(anyMinute), spent: anyMinute.For("ada").Cost(10), status: 429, retry: "70",
		policy: `"anyMinute";q=10;w=60`, limit: `"anyMinute";r=0;t=70`,
	},
	"CW-A1 months have no one length": {
		limits: one(aMonth), spent: aMonth.For("ada").Cost(99), status: 200,
		policy: `"aMonth";q=1000`, limit: `"aMonth";r=900;t=1944000`,
	},
	"CW-R1": {
		limits: one(aMonth), spent: aMonth.For("ada").Cost(1000), status: 429, retry: "1944000",
		policy: `"aMonth";q=1000`, limit: `"aMonth";r=0;t=1944000`,
	},
	"FW-R1": {
		limits: one(freeTrial), spent: freeTrial.For("ada").Cost(100), at: 40*time.Minute + time.Second, status: 429, retry: "1199",
		policy: `"freeTrialSignUp";q=100;w=3600`, limit: `"freeTrialSignUp";r=0;t=1199`,
	},
	"FW-R2 a part of a second is a second": {
		limits: one(freeTrial), spent: freeTrial.For("ada").Cost(98), at: 59*time.Minute + 57300*time.Millisecond, cost: 5,
		status: 429, retry: "3",
		policy: `"freeTrialSignUp";q=100;w=3600`, limit: `"freeTrialSignUp";r=2;t=3`,
	},
	"FW-R3 only what refused is stated": {
		limits: []httplimit.Limit{{Limit: rpm, Key: user}, {Limit: rpd, Key: user}},
		spent:  rpd.For("ada").Cost(1000), at: 4 * time.Hour, status: 429, retry: "36000",
		policy: `"rpm";q=60;w=60, "rpd";q=1000;w=86400`, limit: `"rpd";r=0;t=36000`,
	},
}

func TestDraftHeadersOfTheWorkedExamples(t *testing.T) {
	t.Parallel()
	for name, e := range examples {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			b.clock.Set(ten.Add(e.at))
			e.prepare(t, b)
			config := httplimit.Config{Limits: e.limits}
			if e.cost != 0 {
				config.Limits[0].Cost = httplimit.FixedCost(e.cost)
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
