package httplimit_test

import (
	"errors"
	"math"
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
)

func TestStatedCost(t *testing.T) {
	t.Parallel()
	clamped := httplimit.StatedCost{Header: "X-Tokens", Min: 2, Default: 5, Max: 100}
	for want, all := range map[float64][][]string{
		5:   {nil, {""}, {"many"}, {"NaN"}, {"12 34"}, {"1,000"}},
		7:   {{"7"}, {"x", "7"}},
		7.5: {{" 7.5 "}},
		2:   {{"2"}, {"1"}, {"0"}, {"-3"}, {"-Inf"}},
		100: {{"100"}, {"101"}, {"1e300"}, {"1e999"}, {"Inf"}},
		9:   {{"7", "9", "x"}}, // the greatest
	} {
		for _, stated := range all {
			r := request(t)
			r.Header["X-Tokens"] = stated
			cost, err := clamped.Of(r)
			require.NoError(t, err, stated)
			require.Equal(t, want, cost, stated)
		}
	}
	cost, err := httplimit.StatedCost{Header: "X-Tokens"}.Of(request(t))
	require.NoError(t, err)
	require.Equal(t, 1.0, cost, "the zero StatedCost's default")
}

// TestCostsAreChargedAndAnswered promises the answer for each cost, and the charge.
func TestCostsAreChargedAndAnswered(t *testing.T) {
	t.Parallel()
	fn := func(cost float64, err error) httplimit.Cost {
		return httplimit.CostFunc(func(*http.Request) (float64, error) { return cost, err })
	}
	header := httplimit.StatedCost{Header: "X-Tokens", Default: 3}
	for name, c := range map[string]struct {
		cost    httplimit.Cost
		stated  string
		status  int
		reason  string
		charged float64
		result  string
	}{
		"Default":       {nil, "", 200, "", 1, "allowed perPlan"},
		"Fixed":         {httplimit.FixedCost(4), "", 200, "", 4, "allowed perPlan"},
		"Free":          {httplimit.FixedCost(0), "", 200, "", 0, "allowed perPlan"},
		"Fraction":      {httplimit.FixedCost(0.25), "", 200, "", 0.25, "allowed perPlan"},
		"Header":        {header, "7", 200, "", 7, "allowed perPlan"},
		"HeaderAbsent":  {header, "", 200, "", 3, "allowed perPlan"},
		"AboveCapacity": {header, "101", 413, "too-costly", 0, "too_costly perPlan"},
		"Infinite":      {header, "1e999", 413, "too-costly", 0, "too_costly perPlan"},
		"Func":          {fn(5, nil), "", 200, "", 5, "allowed perPlan"},
		"FuncRejects":   {fn(5, httplimit.ErrInvalidCost), "", 400, "bad-cost", 0, "bad_cost perPlan"},
		"FuncFails":     {fn(5, errors.New("unreadable")), "", 503, "not-decided", 0, "failed_closed perPlan"},
		"NaN":           {fn(math.NaN(), nil), "", 400, "bad-cost", 0, "bad_cost perPlan"},
		"Negative":      {fn(-1, nil), "", 400, "bad-cost", 0, "bad_cost perPlan"},
		"TooSmall":      {fn(1e-300, nil), "", 400, "bad-cost", 0, "bad_cost perPlan"},
		"TooLarge":      {fn(math.Inf(1), nil), "", 413, "too-costly", 0, "too_costly perPlan"},
	} {
		b := setup(t)
		config := httplimit.Config{Limits: []httplimit.Limit{{Limit: perPlan, Key: user, Cost: c.cost}}, FailOpen: true}
		w := do(b.limited(t, config, respond()), request(t, "X-Tokens", c.stated))
		require.Equal(t, c.status, w.Code, name)
		require.Equal(t, c.reason, w.Header().Get("RateLimit-Reason"), name)
		require.Equal(t, c.status == 503, w.Header().Get("Retry-After") != "", "where a wait may help")
		require.Equal(t, c.charged, b.charged(t, perPlan.For("ada")), name)
		require.Equal(t, []string{c.result}, b.told.results(), name)
	}
}
