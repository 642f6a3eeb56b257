package main

import (
	"net/http"
	"time"

	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// The tiers. A request passes when all that apply to it have enough, and then takes from all of them in one
// call.
//
//nolint:gochecknoglobals // a Limit is a value that nothing changes, as a compiled regexp is
var (
	// perAddress counts the requests of an address, whoever it says it is, so that guessing keys and asking
	// without one is bounded too.
	perAddress = ratelimit.Define("gateway.address", ratelimit.PerMinute(120))

	// perFree and perPro are the plans: what an API key may spend, in the tokens that a request states. Visitors
	// without a key have the free plan.
	perFree = ratelimit.Define("gateway.free", ratelimit.PerMinute(60))
	perPro  = ratelimit.Define("gateway.pro", ratelimit.PerMinute(600))

	// overall is what the upstream can bear of everybody together.
	overall = ratelimit.Define("gateway.all", ratelimit.PerMinute(5000))

	// daily is being tried on the free plan, and refuses nobody yet. Its days are those of UTC.
	daily = ratelimit.Define("gateway.free-daily", ratelimit.FixedWindow{
		Rate: 80, Period: ratelimit.Day, Start: time.Date(2026, time.January, 1, 0, 0, 0, 0, time.UTC),
	})

	// perPoll is how often an address may ask what it has left, which is a query each time.
	perPoll = ratelimit.Define("gateway.poll", ratelimit.PerMinute(120))
)

// What a request may state to cost, in the header that names it.
const (
	costHeader = "X-Tokens"
	maxCost    = 100
)

// statedCost returns what a request costs: 1 when it states nothing, and the most when it states too much.
func statedCost() httplimit.StatedCost { return httplimit.StatedCost{Header: costHeader, Max: maxCost} }

// rules returns what a request is asked for. address is who it comes from, and caller who pays for it.
func rules(address, caller httplimit.Key) []httplimit.Rule {
	cost := statedCost()
	plans := map[string]ratelimit.Limit{planFree: perFree, planPro: perPro}
	known := func(r *http.Request) bool { return !identityOf(r).stranger }
	free := func(r *http.Request) bool { return identityOf(r).plan == planFree }
	return []httplimit.Rule{
		{Limit: perAddress, Key: address},
		{LimitFor: httplimit.Tiers(plans, planOf, perFree), Key: caller, Cost: cost, Unit: "tokens", When: known},
		{Limit: overall, Global: true, Cost: cost, Unit: "tokens", When: known},
		{Limit: daily, Key: caller, Cost: cost, Unit: "tokens", When: free, Shadow: true},
	}
}
