package httplimit_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
)

// example is an example of the draft: the limits, the tokens taken before, the request and its time, and the fields of the response.
type example struct {
	limits        []httplimit.Limit
	spent         float64       // of the last limit
	at            time.Duration // after ten
	cost          float64
	status        int
	policy, limit string
	retry         string
}

// TestDraftHeadersOfTheWorkedExamples promises fields that are true for a client that reads them alone: the tokens left, rounded down, and
// the seconds until there is more, rounded up.
func TestDraftHeadersOfTheWorkedExamples(t *testing.T) {
	t.Parallel()
	const (
		message, trial, month = `"sendMessage";q=10;w=60`, `"freeTrialSignUp";q=100;w=3600`, `"aMonth";q=1000`
		tokens, sliding, two  = `"llmTokens";q=40000;w=60`, `"anyMinute";q=10;w=60`, `"rpm";q=60;w=60, "rpd";q=1000;w=86400`
	)
	inTokens := []httplimit.Limit{{Limit: llmTokens, Key: user, Unit: "tokens"}}
	both := []httplimit.Limit{{Limit: rpm, Key: user}, {Limit: rpd, Key: user}}
	late, at40 := 59*time.Minute+57300*time.Millisecond, 40*time.Minute
	for name, e := range map[string]example{
		"TB-A1":                           {one(sendMessage), 0, 0, 1, 200, message, `"sendMessage";r=2;t=12`, ""},
		"TB-A2 the last token":            {one(sendMessage), 1.8, 0, 1, 200, message, `"sendMessage";r=0;t=5`, ""},
		"TB-A3 a cost and a unit":         {inTokens, 0, 0, 8500, 200, tokens + `;qu="tokens"`, `"llmTokens";r=31500;t=48`, ""},
		"TB-R1":                           {one(sendMessage), 2.8, 0, 1, 429, message, `"sendMessage";r=0;t=5`, "5"},
		"TB-R2 some left, and not enough": {one(llmTokens), 38_500, 0, 8500, 429, tokens, `"llmTokens";r=1500;t=11`, "11"},
		"TB-R3 owed tokens do not show":   {one(sendMessage), 7, 0, 1, 429, message, `"sendMessage";r=0;t=30`, "30"},
		"FW-A1":                           {one(freeTrial), 0, 20 * time.Second, 1, 200, trial, `"freeTrialSignUp";r=99;t=3580`, ""},
		"FW-A2 truthful":                  {one(freeTrial), 40, 59*time.Minute + 50*time.Second, 1, 200, trial, `"freeTrialSignUp";r=59;t=10`, ""},
		"FW-A3":                           {one(freeTrial), 99, at40, 1, 200, trial, `"freeTrialSignUp";r=0;t=1200`, ""},
		"FW-R1":                           {one(freeTrial), 100, at40 + time.Second, 1, 429, trial, `"freeTrialSignUp";r=0;t=1199`, "1199"},
		"FW-R2 a part of a second is one": {one(freeTrial), 98, late, 5, 429, trial, `"freeTrialSignUp";r=2;t=3`, "3"},
		"FW-R3 only what refused":         {both, 1000, 4 * time.Hour, 1, 429, two, `"rpd";r=0;t=36000`, "36000"},
		"SW-A1 until there is more":       {one(anyMinute), 4, 0, 1, 200, sliding, `"anyMinute";r=5;t=70`, ""},
		"SW-R1":                           {one(anyMinute), 10, 0, 1, 429, sliding, `"anyMinute";r=0;t=70`, "70"},
		"CW-A1 months have no one length": {one(aMonth), 99, 0, 1, 200, month, `"aMonth";r=900;t=1944000`, ""},
		"CW-R1":                           {one(aMonth), 1000, 0, 1, 429, month, `"aMonth";r=0;t=1944000`, "1944000"},
	} {
		b := setup(t)
		b.clock.Set(ten.Add(e.at))
		last := e.limits[len(e.limits)-1].Limit
		require.NoError(t, b.limiter.Charge(t.Context(), last.For("ada").Cost(e.spent)))
		e.limits[0].Cost = httplimit.FixedCost(e.cost)
		w := do(b.limited(t, limits(e.limits...), respond()), request(t))
		require.Equal(t, e.status, w.Code, name)
		require.Equal(t, e.policy, w.Header().Get("RateLimit-Policy"), name)
		require.Equal(t, e.limit, w.Header().Get("RateLimit"), name)
		require.Equal(t, e.retry, w.Header().Get("Retry-After"), name)
	}
}
